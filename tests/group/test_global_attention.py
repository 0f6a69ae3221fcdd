"""Group attention over all pixels: exact within a window, random features beyond."""

import pytest
import torch
from attention_operands import Largest
from group_layers import everywhere, image
from small_groups import GROUPS

from tg_equiattn.groups import cyclic
from tg_equiattn.testing import equivariance_error
from tg_equiattn.torch_state import Tables


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
