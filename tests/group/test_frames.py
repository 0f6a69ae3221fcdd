"""Attention of elements in their own frames, the maps between elements, and what it is without content."""

import pytest
import torch
import torch.nn.functional as F
from group_layers import GROUPS, attention, image, kept_for_backward, lifting
from torch import nn

from tg_equiattn.grids import Window
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupLinear, LiftingAttention
from tg_equiattn.testing import equivariance_error
from tg_equiattn.torch_state import Tables


def expanded(kernel, group):
    """The filters ((o, h), (c, s), 3, 3) of a group convolution with K (o, c, 9 offsets, |H|)."""
    offsets = Window(2, 3).offsets().double()
    filters = torch.zeros(len(kernel), len(group), kernel.shape[1], len(group), 9, dtype=kernel.dtype)
    for h, matrix in enumerate(group.matrices):
        places = [int((offsets == matrix.T @ offset).all(1).nonzero()) for offset in offsets]
        elements = group.cayley[group.inverse[h]]
        filters[:, h] = kernel[:, :, places][..., elements].transpose(2, 3)
    return filters.flatten(0, 1).flatten(1, 2).unflatten(-1, (3, 3))


@pytest.mark.parametrize("name", ["C4", "D4"])
def test_a_head_for_each_place_is_a_group_convolution(name):
    """Of any filters, at borders too: places are sharp, values mix elements, nothing looks by content."""
    group, kernel = GROUPS[name], torch.randn(3, 2, 9, len(GROUPS[name]), dtype=torch.float64)
    options = {"heads": 9, "head_channels": 3, "locality": 60.0, "content_heads": 0}
    layer = attention(group, in_channels=2, out_channels=3, **options).double()
    centres = layer.locality.centre.detach()
    order = [int((Window(2, 3).offsets() == centre).all(1).nonzero()) for centre in centres]
    with torch.no_grad():
        layer.value.weight.copy_(kernel[:, :, order].permute(2, 0, 1, 3).flatten(0, 1))
        layer.out.weight.copy_(torch.eye(3).repeat(1, 9)[..., None])
    x = torch.randn(2, 2, len(group), 5, 6, dtype=torch.float64)
    expected = F.conv2d(x.flatten(1, 2), expanded(kernel, group), padding=1).unflatten(1, (3, -1))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)
    layer.locality.locality_strength.data.fill_(1.0)
    assert (layer(x) - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", list(GROUPS))
def test_group_linear(name):
    """Its definition and its symmetry; with another table it has none."""
    group = GROUPS[name]
    layer, spatial = GroupLinear(group, 3, 5).double(), (3,) * group.dim
    x = torch.randn(2, 3, len(group), *spatial, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    weight = torch.stack([layer.weight[:, :, group.cayley[group.inverse[h]]] for h in range(len(group))])
    expected = torch.einsum("hocs,bcs...->boh...", weight, x) + layer.bias.view(5, *[1] * (1 + group.dim))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    first = (..., *[0] * group.dim)
    torch.testing.assert_close(layer(x[first]), layer(x)[first], rtol=0, atol=1e-12)
    if group.lattice.all() and len(group) > 2:
        assert equivariance_error(layer, group, x) < 1e-12
        index = layer.index(torch.device("cpu")).roll(1, 0)
        index[0] = index[0].flip(0)
        layer.index = Tables(lambda: index)
        assert equivariance_error(layer, group, x) > 0.1


@pytest.mark.parametrize("make", [attention, lifting])
def test_which_heads_look_by_content(make, randomise):
    """As many as asked for, from the start: their maps change with the input, those of the others do not."""
    group, pixel = GROUPS["C4"], (2, 2)
    default = 5 if make is attention else 2
    for heads, given, count in ((9, None, default), (2, None, 1), (9, 4, 4), (3, 0, 0)):
        layer = make(group, heads=heads, content_heads=given).double()
        assert layer.content_heads == count
        images = (image(group, (5, 6), make is attention, batch=1) for _ in range(2))
        one, other = (layer.attention_map(x, pixel)[0] for x in images)
        changed = (one - other).abs().flatten(1).amax(1)
        assert (changed[:count] > 1e-3).all()
        assert (changed[count:] == 0).all()
    assert make(group, kernel_size=None, heads=9).content_heads == 9
    assert make(group, locality=None, heads=9).content_heads == 9


@pytest.mark.parametrize("relation", ["ge_vit", "lifted", "relative"])
def test_heads_without_content_of_every_relation(relation, randomise):
    """They are heads whose queries are zero, where no key is outside of the image, and they are equivariant. Their maps
    are their weights."""
    group = GROUPS["D4"]
    options = {"heads": 2, "kernel_size": 3, "relation": relation, "locality": 1.0, "padding_mode": "circular"}
    few, every = (randomise(attention(group, content_heads=count, **options)).double() for count in (1, 2))
    state = every.state_dict()
    for name, x in few.state_dict().items():
        if isinstance(x, torch.Tensor):
            x.copy_(state[name][: len(x)])
    for projection in (every.query.weight, every.query.bias):
        projection.data[len(few.query.bias) :] = 0
    x = image(group, (4, 5), True, batch=2)
    torch.testing.assert_close(few(x), every(x), rtol=0, atol=1e-12)
    maps = (layer.attention_map(x, (1, 2)) for layer in (few, every))
    torch.testing.assert_close(*maps, rtol=0, atol=1e-12)
    assert equivariance_error(few, group, image(group, (5, 5), True, batch=1)) < 1e-12


def test_lifting_keeps_less_than_its_scores_for_backward():
    """At the defaults, what autograd keeps is smaller than the scores of a single head."""
    layer, x = LiftingAttention(cyclic(8), 3, 16), torch.randn(2, 3, 24, 24, requires_grad=True)
    assert kept_for_backward(layer, x) < 4 * 2 * 8 * layer.window.count() * 24 * 24
