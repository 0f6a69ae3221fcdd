"""Content-free biases of each head, on every path of group attention."""

import pytest
import torch
from attention_operands import assert_same, group_attention, operands
from oracles import attention_materialised

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional import lifting_attention
from tg_equiattn.groups import cyclic


def biases(tensors, std=1.0):
    """Biases that fit operands: 3 heads in one image are more lanes than a tile may have, 3 in two are fewer."""
    (heads, elements), rho_space = tensors[0].shape[1:4:2], tensors[3]
    shapes = (heads, *rho_space.shape[:2]), (heads, elements)
    return [(std * torch.randn(s, dtype=rho_space.dtype)).to(rho_space.device).requires_grad_() for s in shapes]


def attend(tensors, index, neighbourhood, full=False, **options):
    *features, rho_space, rho_group, space_bias, group_bias = tensors
    if full:
        rho_space, rho_group = rho_space[:, :, None] + rho_group, None
    return group_attention(
        *features, rho_space, rho_group, index, neighbourhood=neighbourhood, space_bias=space_bias,
        group_bias=group_bias, **options,
    )  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("relation", "spatial"), [("ge_vit", (5, 6)), ("lifted", (7, 3)), ("gsa", (3, 5))])
@pytest.mark.parametrize("backend", ["torch", "plain"])
def test_matches_materialised_formula(backend, relation, spatial, full, device):
    tensors, neighbourhood = operands(3, spatial, device=device)
    added = biases(tensors)
    index = relation_index(cyclic(3), relation).to(device)
    out = attend([*tensors, *added], index, neighbourhood, full, backend=backend)
    expected = attention_materialised(*tensors, index, 3, 5**-0.5, *added)
    assert_same(out, expected, [*tensors, *added])


@pytest.mark.parametrize("kernel_size", [3, None])
@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
def test_every_form_agrees(relation, kernel_size, device):
    """In volumes, too: factorised, direct (a full encoding), plain."""
    for spatial in ((4, 5), (2, 3, 2)):
        tensors, neighbourhood = operands(4, spatial, kernel_size, device=device)
        tensors = [*tensors, *biases(tensors)]
        index = relation_index(cyclic(4), relation).to(device)
        for other in ({"backend": "plain"}, {"full": True}):
            out, expected = (attend(tensors, index, neighbourhood, **options) for options in ({}, other))
            assert_same(out, expected, tensors)


def test_lifting(device):
    tensors, neighbourhood = operands(1, (5, 4), outputs=4, device=device)
    *features, rho_space, _ = tensors
    space_bias, _ = biases(tensors)
    options = {"neighbourhood": neighbourhood, "space_bias": space_bias}
    lifted = lifting_attention(*(x.squeeze(3) for x in features), rho_space, **options)
    nothing = torch.zeros(1, 5, dtype=torch.float64, device=device)
    index = torch.zeros(4, 1, 1, dtype=torch.int64, device=device)
    expected = attention_materialised(*features, rho_space, nothing, index, 3, 5**-0.5, space_bias)
    assert_same(lifted, expected, [*features, rho_space, space_bias])
