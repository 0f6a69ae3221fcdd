"""Circular windows: images without borders. Definition and symmetry are test_attention.py's."""

import pytest
import torch
from group_layers import LAYERS, image
from small_groups import GROUPS

from tg_equiattn.groups import trivial
from tg_equiattn.testing import equivariance_error

D4 = GROUPS["D4"]


def made(name, group=D4, **options):
    return LAYERS[name](group, padding_mode="circular", **options).double()


def roll_error(module, x, shifts=(2, -1)):
    axes = tuple(range(-len(shifts), 0))
    out = module(x).detach()
    return float((module(x.roll(shifts, axes)) - out.roll(shifts, axes)).detach().abs().max() / out.abs().max())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_rolls(name, plain, randomise):
    """Exact; with borders they are not."""
    layer = randomise(made(name))
    layer.plain = plain
    x = image(D4, (3, 4), name != "lifting")
    assert roll_error(layer, x) <= 1e-12
    assert roll_error(randomise(LAYERS[name](D4)).double(), x) > 1e-2


def test_volumes(randomise):
    group = GROUPS["octahedral"]
    layer = randomise(made("lifting", group, heads=1))
    x = image(group, (2, 4, 3), False, batch=1)
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
    layer = made("lifting", trivial(2), in_channels=9, out_channels=9, heads=9, head_channels=9)
    with torch.no_grad():
        for p in (*layer.query.parameters(), *layer.encoding.parameters(), layer.value.bias):
            p.zero_()
        layer.locality.sharpness.fill_(200.0)
    x = torch.randn(1, 9, 4, 5, dtype=torch.float64)
    heads = layer._weigh(*layer._operands(x, None, None), layer.index, None, 0.0)[:, :, :, 0]
    value = layer.project(x)[2]
    for head, (right, up) in enumerate(layer.locality.centre.int().tolist()):
        torch.testing.assert_close(heads[:, head], value[:, head].roll((up, -right), (-2, -1)), rtol=0, atol=1e-12)
