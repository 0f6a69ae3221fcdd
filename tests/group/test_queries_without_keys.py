"""Queries without a valid key have zero weights, outputs and gradients in every layer and in every form of attention.
Masks of queries act on outputs, masks of keys on keys alone."""

import copy

import pytest
import torch
from group_layers import LAYERS, image, images_by_oracle

from tg_equiattn.group.windows import fill_where_masked
from tg_equiattn.groups import cyclic, dihedral, dyadic, from_generators

D2, C3, SCALES = dihedral(2), cyclic(3), dyadic(3)
ABOUT_X = from_generators([[[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]])
LOCAL = [name for name in LAYERS if not name.startswith("global")]
DISK, CIRCULAR, ALL = {"kernel_size": 5, "window_shape": "disk"}, {"padding_mode": "circular"}, {"kernel_size": None}
SLOW = ("lifted", D2, {}), ("ge_vit", ABOUT_X, {"heads": 1}), ("lifted", D2, CIRCULAR), ("ge_vit", D2, ALL)
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
CASES = [
    *((name, D2, {}) for name in LAYERS if name != "lifted"),
    *((name, C3, DISK) for name in ("frame", "relative", "global frame")),
    *((name, ABOUT_X, {"heads": 1}) for name in ("lifting", "frame")),
    *((name, SCALES, {}) for name in ("lifting", "relative")),
    *((name, D2, CIRCULAR) for name in ("lifting", "global")),
    *((name, D2, ALL) for name in ("lifting", "frame", "relative")),
    *((name, D2, ALL | {"encoding": None}) for name in LOCAL),
    *SLOW,
]


def problem(name, group, options, randomise):
    """A layer of cross attention, an input and a context, and the masks of both. The context of the first image has one
    pixel, that of the second has none, and that of the third is any."""
    layer = randomise(LAYERS[name](group, context_channels=2, **options), 0.5).double()
    spatial = (3, 1, 2) if group.dim == 3 else (2, 3)
    x = image(group, spatial, name != "lifting", batch=3).requires_grad_()
    context = torch.randn(3, 2, *x.shape[2:], dtype=torch.float64, requires_grad=True)
    mask, seen = torch.rand(3, *spatial) < 0.8, torch.rand(3, *spatial) < 0.4
    seen[:2] = False
    seen[0].flatten()[0] = True
    return layer, (x, context), (mask, seen)


def call(layer, images, masks):
    x, context = (fill_where_masked(y, m, torch.nan) for y, m in zip(images, masks, strict=True))
    return layer(x, masks[0], context=context, context_mask=masks[1])


def derivatives(out, inputs, order=1):
    """The outputs, the gradient of a number that they give and, of order 2, the gradient of one that this gives."""
    first = torch.autograd.grad(out.cos().sum(), inputs, create_graph=order > 1)
    return [[out], first, *([torch.autograd.grad(sum(x.square().sum() for x in first), inputs)] if order > 1 else [])]


def same(found, expected, tolerance=1e-10):
    """Within a tolerance of the largest number of an order."""
    for some, others in zip(found, expected, strict=False):
        scale = max(1.0, *(float(x.detach().abs().max()) for x in others))
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b.to(a), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("name", "group", "options"), CASES)
def test_by_definition(name, group, options, randomise):
    """Outputs, and derivatives by inputs and all parameters, with NaN in masked places; in float32, too."""
    layer, images, masks = problem(name, group, options, randomise)
    inputs = [*images, *layer.parameters()]
    expected = derivatives(images_by_oracle(layer, name, images[0], masks[0], images[1], masks[1]), inputs, 2)
    same(derivatives(call(layer, images, masks), inputs, 2), expected)
    single, floats = copy.deepcopy(layer).float(), [x.detach().float().requires_grad_() for x in images]
    same(derivatives(call(single, floats, masks), [*floats, *single.parameters()]), expected, 1e-4)
