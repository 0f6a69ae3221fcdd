"""Circular windows: images without borders."""

import pytest
import torch
from group_layers import LAYERS, image, oracle
from small_groups import GROUPS

from tg_equiattn.groups import dihedral, trivial
from tg_equiattn.nn import GroupAttention, LiftingAttention
from tg_equiattn.testing import TOLERANCE, equivariance_error

D4 = GROUPS["D4"]


def made(name, group=D4, **options):
    return LAYERS[name](group, padding_mode="circular", **options).double()


def roll_error(module, x, shifts=(2, -1)):
    axes = tuple(range(-len(shifts), 0))
    out = module(x).detach()
    return float((module(x.roll(shifts, axes)) - out.roll(shifts, axes)).detach().abs().max() / out.abs().max())


@pytest.mark.parametrize("name", [n for n in LAYERS if not n.startswith("global")])
def test_definition(name, randomise):
    """Windows that meet pixels twice, too: 5 pixels wide over 2 x 4."""
    group, relation = dihedral(2), None if name == "lifting" else name
    for kernel_size, spatial in ((3, (3, 4)), (5, (2, 4))):
        layer = randomise(made(name, group, kernel_size=kernel_size), 0.5)
        x = image(group, spatial, name != "lifting", batch=1).requires_grad_()
        expected, inputs = oracle(layer, x, relation), [x, *layer.parameters()]
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)
        probe = torch.randn_like(expected)
        grads = [torch.autograd.grad((out * probe).sum(), inputs) for out in (layer(x), expected)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_rolls(name, plain, randomise):
    """Exact; with borders they are not."""
    layer = randomise(made(name))
    layer.plain = plain
    x = image(D4, (4, 5), name != "lifting")
    assert roll_error(layer, x) <= 1e-12
    assert roll_error(randomise(LAYERS[name](D4)).double(), x) > 1e-2


@pytest.mark.parametrize("group", ["C4", "D4", "C8", "mirror"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_equivariance(name, group, randomise, device):
    """Of the group, odd and even sides, squares and disks."""
    group = GROUPS[group]
    for kernel_size, spatial in ((3, (5, 6)), (5, (4, 4))):
        layer = randomise(made(name, group, kernel_size=kernel_size)).to(device)
        for dtype in (torch.float64, torch.float32):
            x = image(group, spatial, name != "lifting", dtype).to(device)
            assert equivariance_error(layer.to(dtype), group, x) <= TOLERANCE[dtype]


def test_volumes(randomise):
    group = GROUPS["octahedral"]
    layer = randomise(made("lifting", group, heads=1))
    x = image(group, (3, 4, 3), False, batch=1)
    assert equivariance_error(layer, group, x) <= 1e-10
    assert roll_error(layer, x, (1, -1, 2)) <= 1e-12


@pytest.mark.parametrize("form", ["ge_vit", "relative"])
def test_masks_on_a_torus(form, randomise):
    """Rolled together with the image the mask changes nothing; left as it is it does."""
    layer, x, mask = randomise(made(form)), image(D4, (5, 6), True), torch.rand(2, 5, 6) < 0.6
    rolled = layer(x.roll(2, -1), mask.roll(2, -1))
    torch.testing.assert_close(rolled, layer(x, mask).roll(2, -1), rtol=0, atol=1e-12)
    assert (layer(x.roll(2, -1), mask) - rolled).abs().max() > 1e-2


def test_a_head_can_be_a_tap_of_a_circular_convolution():
    """Sharp places alone: away from the border and across it, each head gives the pixel at its offset."""
    layer = LiftingAttention(
        trivial(2), 9, 9, heads=9, head_channels=9, kernel_size=3, padding_mode="circular"
    ).double()
    with torch.no_grad():
        for p in (*layer.query.parameters(), *layer.encoding.parameters(), layer.value.bias):
            p.zero_()
        layer.locality.sharpness.fill_(200.0)
    x = torch.randn(1, 9, 4, 5, dtype=torch.float64)
    heads = layer._weigh(*layer._operands(x, None, None), layer.index, None, 0.0)[:, :, :, 0]
    value = layer.project(x)[2]
    for head, (right, up) in enumerate(layer.locality.centre.int().tolist()):
        torch.testing.assert_close(heads[:, head], value[:, head].roll((up, -right), (-2, -1)), rtol=0, atol=1e-12)


def test_bad_arguments():
    with pytest.raises(ValueError, match="padding_mode must be 'mask' where kernel_size is None"):
        GroupAttention(D4, 3, 3, heads=1, kernel_size=None, padding_mode="circular")
    with pytest.raises(ValueError, match=r"padding_mode must be one of \('mask', 'circular'\), got 'zeros'"):
        LiftingAttention(D4, 3, 3, heads=1, padding_mode="zeros")
    layer = GroupAttention(D4, 3, 3, heads=1, kernel_size=7, padding_mode="circular")
    assert layer(torch.randn(1, 3, 8, 3, 3)).shape == (1, 3, 8, 3, 3)
    with pytest.raises(ValueError, match=r"kernel_size must be at most 5 with padding_mode='circular' .* got 7"):
        layer(torch.randn(1, 3, 8, 2, 5))
    assert "padding_mode='circular'" in repr(layer)
