"""Group attention over all pixels: exact within a window, random features beyond.

Definition and symmetry are test_attention.py's, batches test_masks.py's."""

import pytest
import torch
from attention_operands import Largest
from group_layers import attention, everywhere, image
from small_groups import GROUPS

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional import global_group_attention, orthogonal_projection
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GEViT, GlobalGroupAttention
from tg_equiattn.nn.performer.random_features import RandomFeatures
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
    layer.index = group.cayley.clone()
    assert equivariance_error(layer, group, x) > 1e-3
    torch.nn.init.zeros_(layer.far_bias)
    assert equivariance_error(layer, group, x) <= 1e-10


@pytest.mark.parametrize("far_bias", [-80.0, 80.0])
def test_limits_are_the_window_and_the_features(far_bias, randomise):
    """With little far weight the layer is GroupAttention of relation "relative"; with much of it no window is left."""
    group = GROUPS["D2"]
    layer = randomise(everywhere(group)).double()
    window = attention(group, relation="relative").double()
    window.load_state_dict(layer.state_dict(), strict=False)
    x = image(group, (5, 6), True)
    with torch.no_grad():
        layer.far_bias.fill_(far_bias)
        out = layer(x)
        if far_bias < 0:
            torch.testing.assert_close(out, window(x), rtol=0, atol=1e-12)
        else:  # no place is known: pixels that are exchanged take their outputs along
            order = torch.randperm(30)
            moved = layer(x.flatten(3)[..., order].view_as(x))
            torch.testing.assert_close(moved, out.flatten(3)[..., order].view_as(out), rtol=0, atol=1e-12)


def test_many_features_are_the_softmax_over_all_pixels():
    """The estimate converges to weights of exp(c <q, k>), everywhere, and the window's scores on top."""
    group, spatial = cyclic(2), (4, 5)
    query, key = 0.5 * torch.randn(2, 1, 2, 3, 2, *spatial, dtype=torch.float64)
    value = torch.randn(1, 2, 4, 2, *spatial, dtype=torch.float64)
    index = relation_index(group, "relative")
    nothing = torch.zeros(2, 9, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    far_bias = torch.zeros(2, 2, dtype=torch.float64)
    estimate = global_group_attention(
        query, key, value, orthogonal_projection(60_000, 3), *nothing, index,
        neighbourhood=Neighbourhood(2, 3), biases=(torch.full((2, 2, 9), -90.0).double(), None, far_bias),
    )  # fmt: skip
    q, k, v = (x.flatten(3).mT for x in (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).mT.view_as(estimate)
    torch.testing.assert_close(estimate, exact, rtol=0, atol=0.02)
    far = (exact - v.mean(2)[..., None, None, None].view(1, 2, 4, 1, 1, 1)).abs().max()
    assert far > 0.2  # and no plain mean


def test_every_second_head_starts_far():
    """Most of its weight is outside of the window, of the others within."""
    layer, x = everywhere(GROUPS["C4"], heads=4), torch.randn(2, 3, 4, 16, 16)
    near = layer.attention_map(x, (8, 8))[..., 7:10, 7:10].sum((0, 2, 3, 4, 5, 6)) / 8  # of 2 images and 4 elements
    assert near[::2].min() > 0.7
    assert near[1::2].max() < 0.4


def test_far_content_reaches_all_pixels(randomise):
    layer = randomise(everywhere(GROUPS["C4"])).double()
    x = image(GROUPS["C4"], (3, 12), True)
    other = x.clone()
    other[..., -1] += 1
    assert (layer(other) - layer(x))[..., 0].abs().min() > 0
    window = attention(GROUPS["C4"], relation="relative").double()
    assert torch.equal(window(other)[..., 0], window(x)[..., 0])


def test_balance_of_near_and_far_does_not_hang_on_the_image(randomise):
    """An image on a torus, and the same repeated: each copy gets what the image gets."""
    layer = randomise(everywhere(GROUPS["C4"], padding_mode="circular")).double()
    x = image(GROUPS["C4"], (4, 5), True)
    torch.testing.assert_close(layer(x.repeat(1, 1, 1, 3, 2)), layer(x).repeat(1, 1, 1, 3, 2), rtol=0, atol=1e-12)


def test_draws(randomise):
    """Redrawn by hand and by the step, in training only, and the same after loading."""
    layer = randomise(everywhere(GROUPS["C4"], redraw_interval=2))
    x = torch.randn(1, 3, 4, 5, 5)
    out = [layer(x) for _ in range(3)]
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[1], out[2])
    other = everywhere(GROUPS["C4"], redraw_interval=2)
    other.load_state_dict(layer.state_dict())
    for _ in range(3):
        assert torch.equal(layer(x), other(x))
    layer.eval()
    before = [layer(x) for _ in range(4)]
    assert all(torch.equal(out, before[0]) for out in before)
    layer.redraw_features()
    assert not torch.equal(layer(x), before[0])


def test_memory_is_linear():
    """No tensor has a number for each two pixels, nor one for each pixel, element and neighbour."""
    layer = everywhere(cyclic(4), kernel_size=5)
    x = torch.randn(1, 3, 4, 48, 48, requires_grad=True)
    with Largest() as largest:
        layer(x).sum().backward()
    assert largest.count < 48**2 * 4 * 2 * 25 / 2


def test_draws_of_models():
    model = GEViT(GROUPS["C4"], 3, 2, channels=(4, 4), heads=1, kernel_size=3, attention={"num_features": 7})
    before = [m.projection.clone() for m in model.modules() if isinstance(m, RandomFeatures)]
    model.redraw_features()
    after = [m.projection for m in model.modules() if isinstance(m, RandomFeatures)]
    assert [p.shape for p in after] == [(7, 3)] * 2
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    GEViT(GROUPS["C4"], 3, 2, channels=(4,), heads=1, kernel_size=3).redraw_features()  # there are none
    everywhere = {"relation": "relative", "attention": {"num_features": None}}
    preset = GEViT.rotmnist(GROUPS["C4"], channels=(4,) * 5, heads=1, **everywhere)
    layers = [m for m in preset.modules() if isinstance(m, GlobalGroupAttention)]
    assert [layer.locality for layer in layers] == [None] * 5  # as the papers
