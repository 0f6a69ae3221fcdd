"""Transformer blocks in the Fourier basis, over pixels and points, and models of patches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tg_equiattn.groups import cyclic, dihedral, icosahedral, octahedral
from tg_equiattn.nn import FrameTransformer, FrameTransformerBlock, GroupAttention, no_weight_decay
from tg_equiattn.testing import equivariance_error
from tg_equiattn.torch_state import Tables

C4, D4, C8, CUBE = cyclic(4), dihedral(4), cyclic(8), octahedral()


def block(group=D4, channels=4, **options):
    made = FrameTransformerBlock(group, channels, **{"heads": 2} | options).double()
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(mean=float(name == "gains"), std=0.4)
    return made.eval()


def model(group=D4, **options):
    options = {"patch_size": 2, "channels": 4, "num_layers": 2, "heads": 2} | options
    made = FrameTransformer(group, 3, 5, **options).double()
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(mean=float("gain" in name), std=0.4)
    return made.eval()


def images(group, *spatial, channels=4, batch=2):
    return torch.randn(batch, channels, len(group), *spatial, dtype=torch.float64)


@pytest.mark.parametrize("group", [D4, CUBE])
def test_block_by_its_parts(group):
    """Pre-norm attention, which is that of GroupAttention over all pixels, and an MLP of group-linear maps."""
    made, x = block(group), images(group, *(3, 2, 2)[: group.dim])
    attention = GroupAttention(group, 4, 4, heads=2, kernel_size=None, head_channels=2).double()
    with torch.no_grad():
        for name, weight, bias in zip(
            ("query", "key", "value"), made.qkv.weight.chunk(3), made.qkv.bias.chunk(3), strict=True
        ):
            getattr(attention, name).weight.copy_(weight)
            getattr(attention, name).bias.copy_(bias)
        attention.encoding.frequencies.copy_(made.encoding.frequencies)
        attention.out.weight.copy_(torch.eye(4)[..., None])
        attention.out.bias.zero_()
    gain = made.gains.view(2, 1, 4, 1, *[1] * group.dim)

    def norm(t):
        return t / (t.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()

    y = x + made.out(attention(norm(x) * gain[0]))
    expected = y + made.down(F.gelu(made.up(norm(y) * gain[1])))
    torch.testing.assert_close(made(x), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("group", [C4, D4, CUBE])
def test_block_is_equivariant_to_elements_and_translations(group):
    made, spatial = block(group), (2, 3, 2) if group.dim == 3 else (3, 4)
    x = images(group, *spatial)
    assert equivariance_error(made, group, x) < 1e-13
    places = torch.rand(7, group.dim, dtype=torch.float64)
    points, shift = images(group, 7), torch.full_like(places, 3.7)
    torch.testing.assert_close(made(points, positions=places + shift), made(points, positions=places))
    matrices = group.matrices[[1, 0, *range(2, len(group))]]
    made.matrices = Tables(lambda: matrices)
    assert equivariance_error(made, group, x) > 1e-4


@pytest.mark.parametrize("group", [C8, icosahedral()])
def test_points_are_exact_for_every_group(group):
    """Of a padded batch, for elements that map no grid to itself; padding and batch mates change nothing."""
    made, count = block(group), 5
    x, places = images(group, count), torch.randn(2, count, group.dim, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    out = made(x, mask, positions=places)
    size = float(out.detach().abs().max())
    for element in range(1, len(group), 7):
        moved = made(x[:, :, group.moved(element)], mask, positions=places @ group.matrices[element].T)
        torch.testing.assert_close(moved, out[:, :, group.moved(element)], rtol=0, atol=1e-12 * size)
    alone = made(x[1:, ..., :3], positions=places[1:, :3])
    torch.testing.assert_close(out[1:, ..., :3], alone, rtol=0, atol=1e-12)
    assert (out[1, ..., 3:] == 0).all()
    x[1, ..., 3:], places[1, 3:] = torch.nan, torch.nan
    torch.testing.assert_close(made(x, mask, positions=places), out)
    shared = made(x[:1].repeat(2, 1, 1, 1), positions=places[0])
    torch.testing.assert_close(shared[1], out[0])


@pytest.mark.parametrize("group", [C4, D4, CUBE])
@pytest.mark.parametrize("lifts", [True, False])
def test_model_is_equivariant(group, lifts):
    """Logits are invariant, features are regular, for every element and sides that differ."""
    sides = (4, 2, 2) if group.dim == 3 else (4, 6)
    for pool in (True, False):
        made = model(group, lifts=lifts, pool=pool)
        x = images(group, *sides, channels=3)
        x = x[:, :, 0] if lifts else x
        assert made(x).shape == (2, 5, *([] if pool else [len(group), *(n // 2 for n in sides)]))
        assert equivariance_error(made, group, x) < 1e-13
    index = made.index(torch.device("cpu"))[[1, 0, *range(2, len(group))]]
    made.index = Tables(lambda: index)
    assert equivariance_error(made, group, x) > 1e-3


def test_masks_and_translations_of_patches():
    """Content that moves by patches in a padded image has the same logits; masked pixels change nothing."""
    made, small = model(), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    outs = []
    for row, column in ((0, 0), (2, 4), (4, 2)):
        x, mask = torch.full((2, 3, 8, 10), torch.nan, dtype=torch.float64), torch.zeros(1, 8, 10, dtype=torch.bool)
        x[..., row : row + 4, column : column + 6] = small
        mask[:, row : row + 4, column : column + 6] = True
        outs.append(made(x, mask))
        patches = made.mask_after(mask)
        assert patches.shape == (1, 4, 5)
        assert patches.sum() == 6
        assert (made.features(x, mask)[..., ~patches[0]] == 0).all()
    for out in outs:
        torch.testing.assert_close(out, made(small), rtol=0, atol=1e-12)


def test_patches_are_a_convolution():
    """Without blocks, features are a convolution with rotated filters, normalised."""
    made, x = model(C4, num_layers=1), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    made.blocks = nn.ModuleList()
    filters = torch.stack([torch.rot90(made.weight.unflatten(2, (2, 2)), n, (2, 3)) for n in range(4)], 1)
    lifted = F.conv2d(x, filters.flatten(0, 1), stride=2).unflatten(1, (-1, 4)) + made.bias.view(-1, 1, 1, 1)
    norm = (lifted.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(made.features(x), lifted / norm * made.gain.view(-1, 1, 1, 1))


def test_dropout_and_stochastic_depth():
    """Whole channels of a token, and whole branches of a sample; neither in eval mode."""
    made, x = block(dropout=0.5), images(D4, 3, 2, batch=1).expand(400, -1, -1, -1, -1)
    assert torch.equal(made(x), block_without(made, "dropout")(x))
    rows = torch.ones(50, 8 * 4, dtype=torch.float64)
    dropped = made.train()._dropped(rows, 1).unflatten(1, (8, 4))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    made = block(drop_path=0.5).train()
    kept = made._dropped(torch.ones(60, 32, dtype=torch.float64), 20).unflatten(0, (20, 3))
    assert torch.equal(kept, kept[:, :1, :1].expand_as(kept))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    rates = [each.drop_path for each in FrameTransformer(C4, 1, 2, channels=4, num_layers=3, drop_path=0.2).blocks]
    assert rates == [0.0, 0.1, 0.2]


def block_without(made, name):
    other = copy.deepcopy(made)
    setattr(other, name, 0.0)
    return other


def test_presets():
    """Widths of timm's models, as multiples of the order of the group."""
    for group in (C4, D4, CUBE):
        for preset, width in (("tiny", 192), ("small", 384), ("base", 768)):
            made = getattr(FrameTransformer, preset)(group, 3, 10, num_layers=1, patch_size=4)
            assert len(group) * made.channels == width
            assert made.channels // made.blocks[0].heads in range(8, 65)
    assert len(FrameTransformer.tiny(D4, 3, 10).blocks) == 12
    assert no_weight_decay(model(num_layers=1)) == {"blocks.0.encoding.frequencies"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FrameTransformerBlock(D4, 6, heads=4), "heads must divide channels=6 into heads of .*got 4"),
        (lambda: FrameTransformerBlock(D4, 4, heads=4), "heads must divide channels=4 into heads of at least 2"),
        (
            lambda: FrameTransformerBlock(D4, 4)(torch.zeros(1, 4, 8, 3), positions=[[0.0, 0.0]] * 3),
            "positions must be real numbers of shape .* got",
        ),
        (lambda: FrameTransformer(C8, 3, 5, patch_size=4, channels=4, num_layers=1), "patch_size must be 1 for C8"),
        (lambda: model()(torch.randn(1, 3, 5, 4).double()), r"multiples of patch_size=2, .* pad images to \(6, 4\)"),
        (lambda: model()(torch.randn(1, 2, 4, 4).double()), r"input must have shape \(B, 3, H, W\)"),
        (lambda: block()(images(D4, 3)), r"input must have shape \(B, 4, 8, H, W\)"),
        (lambda: block()(images(D4, 3), positions=torch.randn(4, 2)), r"positions must be .* of shape \(3, 2\) or"),
        (lambda: block()(images(D4, 3, 2), torch.ones(2, 3, dtype=torch.bool)), "mask must be"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
