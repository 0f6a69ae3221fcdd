"""Group attention over all pixels: exact within a window, random features beyond."""

import torch
from attention_operands import Largest
from group_layers import everywhere, image
from small_groups import GROUPS

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupTransformer
from tg_equiattn.nn.performer.random_features import RandomFeatures
from tg_equiattn.tables import Tables
from tg_equiattn.testing import equivariance_error


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
    x = torch.randn(1, 3, 4, 64, 64, requires_grad=True)
    with Largest() as largest:
        layer(x).sum().backward()
    assert largest.count < 64**2 * 4**2 * 2 * 25 / 2


def test_draws():
    """Every second step in training, or by hand in all layers of a model."""
    layer, x = everywhere(GROUPS["C4"], redraw_interval=2), torch.randn(1, 3, 4, 5, 5)
    first, second, third = (layer(x) for _ in range(3))
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    model = GroupTransformer(
        GROUPS["C4"], 3, 2, channels=(4, 4), heads=1, kernel_size=3, attn_type="global",
        attn_kwargs={"num_random_features": 7},
    )  # fmt: skip
    before = [m.directions(x.device, x.dtype).clone() for m in model.modules() if isinstance(m, RandomFeatures)]
    model.redraw_features()
    after = [m.directions(x.device, x.dtype) for m in model.modules() if isinstance(m, RandomFeatures)]
    assert [p.shape for p in after] == [(7, 4)] * 2
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    GroupTransformer(GROUPS["C4"], 3, 2, channels=(4,), heads=1, kernel_size=3).redraw_features()  # there are none
