"""Images of which only some pixels are there: keys, statistics and pools leave the others out."""

import copy
import functools

import pytest
import torch
from group_layers import GROUPS, LAYERS, image
from group_layers import block as small_block
from space import take_weights

from tg_equiattn.group.layers import RegularBatchNorm, SpatialCrop, SpatialMaxPool
from tg_equiattn.groups import cyclic, dihedral, dyadic
from tg_equiattn.nn import (
    GEViT,
    GlobalGroupAttention,
    GlobalPooling,
    GroupTransformer,
    RegularGlobalNorm,
    RegularLayerNorm,
)
from tg_equiattn.testing import act

D4 = GROUPS["D4"]
INSIDE = (..., slice(1, 5), slice(2, 5))  # 4 x 3 pixels of 6 x 7
SCALES = dyadic(3, cyclic(4))
CASES = [*((name, D4, {}) for name in LAYERS), ("global", D4, {"window_shape": "disk", "kernel_size": 5}),
         ("lifted", dihedral(2), {"kernel_size": 9}), ("lifting", SCALES, {}), ("relative", SCALES, {})]  # fmt: skip


def rectangle(images=1):
    mask = torch.zeros(images, 6, 7, dtype=torch.bool)
    mask[INSIDE] = True
    return mask


def made(name, group=D4, **options):
    return LAYERS[name](group, **options).double()


def poisoned(x, mask):
    return x.masked_fill(~mask.view(len(mask), *[1] * (x.ndim - mask.ndim), *mask.shape[1:]), torch.nan)


def outside(x):
    x = x.detach().clone()
    x[INSIDE] = 0
    return x


def moved(x, mask, group, element):
    return act(x, group, element), act(mask[:, None].double(), group, element)[:, 0] > 0.5


def mask_error(module, x, mask, group):
    expected, worst = module(x, mask), 0.0
    for element in group.lattice.nonzero().flatten().tolist():
        out = module(*moved(x, mask, group, element))
        worst = max(worst, float((out - act(expected, group, element)).detach().abs().max()))
    return worst / float(expected.detach().abs().max())


def same_inside(module, alone, x, mask, atol=1e-10):
    """Outputs, and gradients of inputs and parameters, are those of the image cut out, whatever is around it."""
    around, inside = poisoned(x, mask).requires_grad_(), x[INSIDE].clone().requires_grad_()
    out, expected = module(around, mask), alone(inside)
    torch.testing.assert_close(out[INSIDE], expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), [around, *module.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [inside, *alone.parameters()])
    assert not outside(out).any()
    assert not outside(grads[0]).any()
    for a, b in zip([grads[0][INSIDE], *grads[1:]], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(("name", "group", "options"), CASES)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rectangle_is_an_image_of_its_own(name, group, options, plain, randomise):
    layer = randomise(made(name, group, **options))
    masked = copy.deepcopy(layer)
    masked.plain = plain
    same_inside(masked, layer, image(group, (6, 7), name != "lifting"), rectangle())


def test_masks_of_batches(randomise):
    """One for all images, all pixels or none, no images; images that are no numbers stay alone."""
    for name in LAYERS:
        layer = randomise(made(name, GROUPS["C4"]))
        x, mask = image(GROUPS["C4"], (5, 6), name != "lifting", batch=3), torch.rand(3, 5, 6) < 0.6
        expected = layer(x, mask)
        assert torch.equal(layer(x, mask[:1]), layer(x, mask[:1].expand(3, -1, -1)))
        torch.testing.assert_close(layer(x, torch.ones_like(mask)), layer(x), rtol=0, atol=1e-12)
        assert not layer(x, torch.zeros_like(mask)).any()
        assert layer(x[:0], mask[:0]).shape[0] == 0
        x[1] = torch.nan
        torch.testing.assert_close(layer(x, mask)[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-12)


NORMS = [RegularGlobalNorm, RegularLayerNorm, RegularBatchNorm, *(
    functools.partial(RegularBatchNorm, momentum=m, affine=False, track_running_stats=t)
    for m, t in ((None, True), (0.1, False)))]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, training, randomise):
    """Statistics of a rectangle are those of the image cut out, the running ones too."""
    given, alone = (norm(3).double().train(training) for _ in range(2))
    alone.load_state_dict(randomise(given).state_dict())
    for _ in range(2):
        same_inside(given, alone, image(D4, (6, 7), True), rectangle())
    torch.testing.assert_close(given.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)
    alone.load_state_dict(given.state_dict())
    before = {name: x.clone() for name, x in given.named_buffers() if "running" in name}
    given(image(D4, (6, 7), True), rectangle() & False)  # says nothing of features
    assert all(torch.equal(given.get_buffer(name), x) for name, x in before.items())
    given.eval(), alone.eval()
    same_inside(given, alone, image(D4, (6, 7), True), rectangle())


@pytest.mark.parametrize("space", ["mean", "max", "sum"])
def test_global_pooling(space):
    x, mask = image(D4, (6, 7), True), rectangle()
    pool = GlobalPooling(space, "mean")
    torch.testing.assert_close(pool(poisoned(x, mask), mask), pool(x[INSIDE]), rtol=0, atol=1e-12)
    assert not pool(poisoned(x, mask & False), mask & False).any()


def test_max_pooling_and_crops():
    x, mask = image(D4, (6, 8), True) - 5, torch.zeros(1, 6, 8, dtype=torch.bool)
    mask[..., 2:5, 1:5] = True  # no whole number of blocks: what is there of a block counts
    pool = SpatialMaxPool(2)
    out, blocks = pool(poisoned(x, mask), mask), pool.mask_after(mask)
    assert blocks[0].tolist() == [[False] * 4, [True, True, True, False], [True, True, True, False]]
    assert not out.masked_fill(blocks, 0).any()
    torch.testing.assert_close(out[..., 1, 0], x[..., 2:4, 1].amax(-1), rtol=0, atol=0)
    torch.testing.assert_close(out[..., 2, 1], x[..., 4, 2:4].amax(-1), rtol=0, atol=0)
    crop = SpatialCrop(1)
    assert torch.equal(crop.mask_after(mask), mask[..., 1:-1, 1:-1])
    assert torch.equal(crop(x, mask)[..., 1:4, :4], x[..., 2:5, 1:5])


BLOCKS = [{}, {"norm": "layer"}, {"norm": "global"}, {"kind": GlobalGroupAttention}]


@pytest.mark.parametrize("options", BLOCKS)
def test_blocks(options, randomise):
    """In training: a rectangle in a block is an image of its own, and masks are turned with images."""
    block = randomise(small_block(D4, 3, 5, **options)).double()
    x, mask = image(D4, (6, 7), True), rectangle()
    out = block(poisoned(x, mask), mask)
    torch.testing.assert_close(out[INSIDE], block(x[INSIDE]), rtol=0, atol=1e-10)
    assert not outside(out).any()
    assert mask_error(block.eval(), image(D4, (5, 6), True), torch.rand(2, 5, 6) < 0.6, D4) <= 1e-10


@pytest.mark.parametrize("kind", [GroupTransformer, GEViT])
def test_models(kind, randomise):
    """Images of several sizes in one batch, padded: logits are those of each image alone."""
    options = {"channels": (4, 5), "heads": 2, "kernel_size": 3, "pools": (1,)}
    crops = {"crops": (1, 0)} if kind is GEViT else {}
    model = randomise(kind(D4, 2, 3, **options, **crops), 0.4).double().eval()
    x, mask = image(D4, (12, 10), False)[:, :2], torch.zeros(2, 12, 10, dtype=torch.bool)
    mask[0, :8, :6], mask[1, 2:, :10] = True, True
    # crops take rows from every side: of the images, not of the batch, hence the margin of one pixel
    padded = torch.nn.functional.pad(poisoned(x, mask), [2] * 4)
    outer = torch.nn.functional.pad(mask, [2] * 4)
    whole = kind(D4, 2, 3, **options).double().eval()
    take_weights(whole, model)
    logits = whole(padded, outer)
    for n, piece in enumerate((x[:1, :, :8, :6], x[1:, :, 2:, :10])):
        torch.testing.assert_close(logits[n : n + 1], whole(piece), rtol=0, atol=1e-10)
    shifted = whole(padded.roll(1, -1), outer.roll(1, -1))  # blocks of the pool are others then
    assert (shifted - logits).abs().max() > 1e-3
    cropped = model(poisoned(x, mask), mask)
    assert bool(cropped.isfinite().all())
    for element in range(8):
        torch.testing.assert_close(model(*moved(x, mask, D4, element)), cropped, rtol=0, atol=1e-10)
    assert (model(act(x, D4, 1), moved(x, mask, D4, 3)[1]) - cropped).abs().max() > 1e-3
