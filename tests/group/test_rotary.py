"""Rotary positions in frames: attention to all pixels by torch's fused kernels."""

import functools

import pytest
import torch
from attention_operands import assert_same
from group_layers import kept_for_backward

from tg_equiattn.group.encodings import RotaryEncoding, rotated
from tg_equiattn.groups import cyclic, dihedral, octahedral
from tg_equiattn.nn import GEViT, GroupAttention, GroupTransformer, LiftingAttention, no_weight_decay
from tg_equiattn.testing import equivariance_error
from tg_equiattn.torch_state import Tables

C4, D4, CUBE = cyclic(4), dihedral(4), octahedral()
RELATIVE = functools.partial(GroupAttention, relation="relative")
KINDS = [pytest.param(kind, id=name) for name, kind in (
    ("frame", GroupAttention), ("relative", RELATIVE), ("lifting", LiftingAttention)
)]  # fmt: skip
MATRICES = {"C4": C4, "D4": D4, "cube": CUBE}


def made(kind, group=C4, **options):
    layer = kind(group, 3, 5, **{"heads": 2, "kernel_size": None, "head_channels": 5} | options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.6)
    return layer


def images(kind, group, *spatial, batch=2):
    elements = [] if kind is LiftingAttention else [len(group)]
    return torch.randn(batch, 3, *elements, *spatial, dtype=torch.float64)


def positions(spatial):
    """Positions of pixels, in words: x right and y up, in volumes x last, -y in the middle and z first."""
    axes = torch.meshgrid(*[torch.arange(n).double() - (n - 1) / 2 for n in spatial], indexing="ij")
    axes = [axis.flatten() for axis in axes]
    return torch.stack([axes[-1], -axes[-2], *axes[:-2]], -1)


def by_definition(layer, x, context=None, mask=None):
    """The scores of each head and element from h^-1 (x_j - x_i), with matrices of rotation."""
    group, (query, key, value) = layer.group, layer.project(x, context, layer.head_channels**-0.5)
    if layer.lifts:
        query, key, value = (t.unsqueeze(3).expand(-1, -1, -1, len(group), *t.shape[3:]) for t in (query, key, value))
    pixels, keys, relative = query.shape[4:], key.shape[4:], layer.relation == "relative"
    offsets = positions(keys)[None] * max(pixels) / max(keys) - positions(pixels)[:, None]
    outs, every = [], range(len(group))
    if relative:
        offsets = offsets.repeat(1, len(group), 1)
        mask = None if mask is None else mask.flatten(1).repeat(1, len(group))
    for h, matrix in enumerate(group.matrices):
        q, k, v = (t[:, :, :, h].flatten(3).mT for t in (query, key, value))
        if relative:  # all elements s, whose keys know h^-1 s
            known = [layer.encoding.table[group.cayley[group.inverse[h], s]] for s in every]
            k = torch.cat([key[:, :, :, s].flatten(3).mT + known[s] for s in every], 2)
            v = torch.cat([value[:, :, :, s].flatten(3).mT for s in every], 2)
        angle = torch.einsum("epx,ijx->eijp", layer.encoding.frequencies, offsets @ matrix)
        (q1, q2), (k1, k2) = ((t[..., :4:2], t[..., 1:4:2]) for t in (q, k))
        dot = lambda a, b, w: torch.einsum("beip,bejp,eijp->beij", a, b, w)  # noqa: E731
        scores = dot(q1, k1, angle.cos()) + dot(q2, k2, angle.cos()) + q[..., 4:] @ k[..., 4:].mT
        scores = scores + dot(q2, k1, angle.sin()) - dot(q1, k2, angle.sin())
        if mask is not None:
            scores = scores.masked_fill(~mask.flatten(1)[:, None, None], -torch.inf)
        outs.append((scores.softmax(-1) @ v).mT)
    out = torch.stack(outs, 3)
    return layer.out(out.flatten(1, 2).unflatten(-1, pixels))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "spatial"), [(D4, (3, 4)), (CUBE, (2, 3, 2))])
def test_definition(kind, group, spatial):
    layer = made(kind, group)
    x = images(kind, group, *spatial, batch=1).requires_grad_()
    assert_same(layer(x), by_definition(layer, x), [x, *layer.parameters()], 1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MATRICES)
def test_equivariance_to_every_element(kind, name):
    """For images of any sides, even and odd; another table of matrices is seen."""
    group = MATRICES[name]
    layer = made(kind, group)
    for spatial in ((4, 5), (5, 5)) if group.dim == 2 else ((3, 2, 4),):
        assert equivariance_error(layer, group, images(kind, group, *spatial)) < 1e-13
    matrices = group.matrices[[1, 0, *range(2, len(group))]]
    layer.geometry = Tables(lambda: matrices)
    assert equivariance_error(layer, group, images(kind, group, *spatial)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_translations(kind):
    """Content that moves in a larger image, of which the rest is masked, has the same outputs."""
    layer, small = made(kind, D4), images(kind, D4, 3, 4)
    outs = []
    for row, column in ((0, 0), (2, 1), (5, 3)):
        x, mask = images(kind, D4, 9, 8), torch.zeros(1, 9, 8, dtype=torch.bool)
        x[..., row : row + 3, column : column + 4] = small
        mask[:, row : row + 3, column : column + 4] = True
        outs.append(layer(x, mask)[..., row : row + 3, column : column + 4])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(layer(small), outs[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_context_masks_and_queries_without_keys(kind):
    """Keys on a grid of another size, with a mask; a query without a valid key has the bias of the output map."""
    layer = made(kind, D4, context_channels=3)
    x, context = images(kind, D4, 3, 4), images(kind, D4, 5, 5).requires_grad_()
    mask = torch.rand(2, 5, 5) < 0.5
    every = torch.ones(2, 3, 4, dtype=torch.bool)
    found = layer(x, every, context=context, context_mask=mask)
    assert_same(found, by_definition(layer, x, context, mask), [context, *layer.parameters()], 1e-11)
    mask[1] = False
    out = layer(x, every, context=context, context_mask=mask)
    bias = layer.out.bias.view(-1, 1, 1, 1).expand_as(out[1])
    torch.testing.assert_close(out[1], bias)
    changed = torch.where(mask[:, None] if kind is LiftingAttention else mask[:, None, None], context, torch.nan)
    torch.testing.assert_close(layer(x, every, context=changed, context_mask=mask), out)


@pytest.mark.parametrize("kind", KINDS)
def test_precision_and_dropout(kind):
    """Phases are in float32 under autocast, also at distant pixels; dropped weights have the right mean."""
    layer, x = made(kind, C4, dropout=0.4).float().eval(), images(kind, C4, 1, 60).float()
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().mean() < 0.03 * expected.abs().mean()
    small, layer = images(kind, C4, 2, 3, batch=1).float(), layer.train()
    mean = layer(small.expand(4000, *small.shape[1:])).mean(0)
    assert (mean - layer.eval()(small)[0]).abs().mean() < 0.05 * mean.abs().mean()


def test_odd_channels_and_angles():
    """The last channel of an odd number stays; lengths stay; angles of positions add up."""
    encoding = RotaryEncoding(2, 2, 5).double()
    x, places = torch.randn(7, 8, 2, 5, dtype=torch.float64), torch.randn(2, 7, 2, dtype=torch.float64)
    one, other, both = (encoding(p, D4.matrices) for p in (*places, places.sum(0)))
    out = rotated(x, one)
    assert torch.equal(out[..., 4], x[..., 4])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated(out, other), rotated(x, both))


def test_defaults():
    """Rotary over all pixels with one query per output and without locality; tables elsewhere, and in presets of
    papers."""
    name = lambda kind, **options: kind(C4, 4, 4, **options).encoding_name  # noqa: E731
    kinds = GroupAttention, RELATIVE, LiftingAttention
    for kind in kinds:
        assert name(kind, kernel_size=None) == "rotary"
        assert name(kind, kernel_size=None, locality=4.0) == "axial"
        assert name(kind, kernel_size=None, encoding="joint") == "joint"
        assert name(kind, kernel_size=None, encoding=None) is None
        assert name(kind) == "axial"
    assert name(GroupAttention, kernel_size=None, relation="lifted") == "axial"
    assert GroupAttention(C4, 20, 20, kernel_size=None).head_channels == 4  # three, and one for pairs
    for model, expected in ((GroupTransformer, "rotary"), (GEViT, "axial")):
        layers = [
            m
            for m in model(C4, 1, 3, channels=(4,), kernel_size=None).modules()
            if isinstance(m, (GroupAttention, LiftingAttention))
        ]
        assert {(layer.encoding_name, layer.locality) for layer in layers} == {(expected, None)}
    for kind in kinds:
        assert no_weight_decay(kind(C4, 4, 4, kernel_size=None)) == {"encoding.frequencies"}


def test_half_of_the_pairs_start_without_positions():
    """At the start their scores are products of content alone, at any distance."""
    layer = GroupAttention(cyclic(4), 4, 4, heads=2, head_channels=10, kernel_size=None)
    still = (layer.encoding.frequencies == 0).all(-1)
    assert still.tolist() == 2 * [[False] * 3 + [True] * 2]
    assert not layer.query.bias.any()
    assert not (RotaryEncoding(2, 2, 2).frequencies == 0).any()


def test_relative_keys_start_as_queries():
    """So features that are equal have large scores from the first step; not between different features."""
    layer = RELATIVE(C4, 4, 4, kernel_size=None)
    assert torch.equal(layer.key.weight, layer.query.weight)
    layer = RELATIVE(C4, 4, 4, kernel_size=None, context_channels=4)
    assert not torch.equal(layer.key.weight, layer.query.weight)


@pytest.mark.parametrize("kind", [GroupAttention, RELATIVE])
def test_no_table_of_pairs_is_kept_for_backward(kind):
    """What autograd keeps grows with the pixels, not with their pairs."""
    layer = kind(C4, 8, 8, kernel_size=None)
    small, large = (kept_for_backward(layer, torch.randn(1, 8, 4, side, side)) for side in (12, 24))
    assert large < 5 * small
