"""Hierarchies of escnn layers: strides, contexts of half or twice the resolution, and windows of thick slices."""

import pytest
import torch
from escnn import nn
from fields import GSPACES, regular, trivial
from tg_equiattn.integrations.escnn import (
    MaskedSequential,
    R2AttentionBlock,
    R2GroupAttention,
    R2LiftingAttention,
    group_from_gspace,
    to_standard_torch,
)

from tg_equiattn.testing import act

FLIPS = GSPACES["flipRot4"]
OPTIONS = {"heads": 2, "kernel_size": 3, "head_channels": 4}


def hierarchy():
    hidden = regular(FLIPS, 2)
    return MaskedSequential(
        R2LiftingAttention(trivial(FLIPS), hidden, stride=2, **OPTIONS),
        nn.ReLU(hidden),
        R2GroupAttention(hidden, hidden, stride=2, **OPTIONS),
        nn.R2Conv(hidden, hidden, 3, padding=1),
    )


def test_layers_check_themselves(randomise):
    """On images of odd sides, which escnn's shapes count, and off the lattice."""
    hidden = regular(GSPACES["rot8"], 2)
    layer = randomise(R2GroupAttention(hidden, hidden, stride=2, heads=2, kernel_size=13)).double()
    errors = layer.check_equivariance(atol=1e-10, rtol=1e-10, off_lattice=True)
    assert len(errors) == 8
    assert layer.evaluate_output_shape((2, hidden.size, 13, 9)) == (2, hidden.size, 7, 5)
    assert layer(hidden(torch.randn(2, hidden.size, 13, 9).double())).shape == (2, hidden.size, 7, 5)
    with pytest.raises(ValueError, match=r"input sides must be odd with stride=2, got \(8, 9\)"):
        layer(hidden(torch.randn(2, hidden.size, 8, 9).double()))


def test_a_hierarchy_with_masks(randomise):
    """Equivariant for every element, padded as alone, and the same as an exported module."""
    model, group = randomise(hierarchy(), 0.4).double().eval(), group_from_gspace(FLIPS)
    x, mask = torch.randn(2, 3, 9, 13).double(), torch.zeros(2, 9, 13, dtype=torch.bool)
    mask[:, :5, :9] = True
    alone = model(model.in_type(x[:, :, :5, :9])).tensor
    padded = model(model.in_type(x.masked_fill(~mask[:, None], torch.nan)), mask).tensor
    torch.testing.assert_close(padded[:, :, :2, :3], alone[:, :, :2, :3], rtol=0, atol=1e-12)
    assert torch.equal(model.mask_after(mask), mask[:, ::4, ::4])
    torch.testing.assert_close(to_standard_torch(model)(x.nan_to_num(), mask), padded, rtol=0, atol=1e-12)
    for index in range(len(group)):
        turned = act(mask[:, None].double(), group, index)[:, 0] > 0.5
        got = model(model.in_type(act(x, group, index)), turned).tensor
        wanted = act(padded.unflatten(1, (-1, len(group))), group, index).flatten(1, 2)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # filters of R2Conv are in float32


@pytest.mark.parametrize(("queries", "keys"), [((3, 5), (5, 9)), ((5, 9), (3, 5)), ((3, 4), (6, 8)), ((6, 8), (3, 4))])
def test_decoders_and_encoders(queries, keys, randomise):
    """Contexts of half and of twice the resolution, in a layer and in a block, and exported."""
    hidden, other = regular(FLIPS, 2), regular(FLIPS, 3)
    layer = R2GroupAttention(hidden, hidden, context_type=other, **OPTIONS)
    for module in (layer, R2AttentionBlock(layer)):
        module = randomise(module, 0.4).double().eval()
        x, context = (torch.randn(2, t.size, *s).double() for t, s in ((hidden, queries), (other, keys)))
        mask = torch.rand(2, *keys) < 0.7
        out = module(hidden(x), context=other(context), context_mask=mask).tensor
        torch.testing.assert_close(
            to_standard_torch(module)(x, context=context, context_mask=mask), out, rtol=0, atol=1e-12
        )
        element = list(FLIPS.fibergroup.elements)[3]
        got = module(
            hidden(x).transform(element), context=other(context).transform(element),
            context_mask=act(mask[:, None].double(), group_from_gspace(FLIPS), 3)[:, 0] > 0.5,
        )  # fmt: skip
        torch.testing.assert_close(got.tensor, module.out_type(out).transform(element).tensor, rtol=0, atol=1e-10)
