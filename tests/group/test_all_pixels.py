"""All pixels: exact attention that reaches distant pixels from the start, and windows with random features beyond."""

import pytest
import torch
from attention_operands import Largest
from group_layers import GROUPS, everywhere, image

from tg_equiattn.group.encodings import RELATIONS
from tg_equiattn.groups import cyclic, octahedral
from tg_equiattn.nn import GroupAttention, LiftingAttention
from tg_equiattn.testing import equivariance_error
from tg_equiattn.torch_state import Tables


def made(name, group=None, **options):
    """A new layer over all pixels: lifting, or group attention with a relation."""
    if name != "lifting":
        options["relation"] = name
    kind = LiftingAttention if name == "lifting" else GroupAttention
    return kind(group or cyclic(4), 3, 8, kernel_size=None, **options).double()


def change(layer, spatial):
    """The change of the output at the first pixel by the last pixel, relative to the largest output."""
    elements = () if layer.lifts else (len(layer.group),)
    x = torch.randn(1, 3, *elements, *spatial, dtype=torch.float64)
    other = x.clone()
    last, first = (..., *(-1 for _ in spatial)), (..., *(0 for _ in spatial))
    other[last] += 3
    with torch.no_grad():
        out = layer(x)
        return float((layer(other) - out)[first].abs().max() / out.abs().max())


@pytest.mark.filterwarnings("ignore:relation='gsa'")
@pytest.mark.parametrize("name", RELATIONS)
def test_a_new_layer_gives_weight_to_distant_pixels(name):
    assert change(made(name), (11, 12)) > 1e-4
    assert change(made(name, locality=4.0), (11, 12)) < 1e-10  # a negative control
    if name in ("lifting", "frame"):
        assert change(made(name, octahedral()), (5, 4, 6)) > 1e-5


@pytest.mark.filterwarnings("ignore:parameters are zero")
def test_wrong_index_is_not_equivariant(randomise):
    """Negative control: with h s in place of h^-1 s, of the far part alone, the same check fails."""
    group = GROUPS["D4"]
    layer = randomise(everywhere(group)).double()
    with torch.no_grad():
        layer.locality.preference.zero_()
        layer.encoding.table.zero_()
    x = image(group, (3, 3), True)
    assert equivariance_error(layer, group, x) <= 1e-10
    layer.index = Tables(group.cayley.clone)
    assert equivariance_error(layer, group, x) > 1e-3
    torch.nn.init.zeros_(layer.far_bias)
    assert equivariance_error(layer, group, x) <= 1e-10


def test_every_second_head_starts_far():
    """Most of its weight is outside of the window, of the others within."""
    layer, x = everywhere(GROUPS["C4"], heads=4), torch.randn(2, 3, 4, 16, 16)
    near = layer.attention_map(x, (8, 8))[..., 7:10, 7:10].sum((0, 2, 3, 4, 5, 6)) / 8  # of 2 images and 4 elements
    assert near[::2].min() > 0.7
    assert near[1::2].max() < 0.4


def test_balance_of_near_and_far_does_not_hang_on_the_image(randomise):
    """An image on a torus, and the same repeated: each copy gets what the image gets."""
    layer = randomise(everywhere(GROUPS["C4"], padding_mode="circular")).double()
    x = image(GROUPS["C4"], (4, 5), True)
    torch.testing.assert_close(layer(x.repeat(1, 1, 1, 3, 2)), layer(x).repeat(1, 1, 1, 3, 2), rtol=0, atol=1e-12)


def test_memory_is_linear():
    """No tensor has a number for each two pixels, nor one for each pixel, neighbour and pair of elements."""
    layer = everywhere(cyclic(4), kernel_size=5)
    x = torch.randn(1, 3, 4, 80, 80, requires_grad=True)
    with Largest() as largest:
        layer(x).sum().backward()
    assert largest.count < 80**2 * 4**2 * 2 * 25 / 2
