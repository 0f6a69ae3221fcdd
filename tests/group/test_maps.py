"""Attention maps: the weights of chosen pixels."""

import pytest
import torch
from group_layers import LAYERS, image
from small_groups import GROUPS

from tg_equiattn.group.windows import zero_where_masked
from tg_equiattn.testing import act

NAMES = ["ge_vit", "lifted"]  # whose outputs sum over several queries
OPTIONS = [{}, {"kernel_size": 5, "window_shape": "disk"}, {"padding_mode": "circular"}]


def heads_of(layer, x, mask=None, context=None):
    x = zero_where_masked(x, mask)
    query, key, value = layer._operands(x, x if context is None else zero_where_masked(context, mask))
    return zero_where_masked(layer._heads(query, key, value, mask, 0.0), mask), value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, {"kernel_size": None}])
@pytest.mark.parametrize("name", list(LAYERS))
def test_weights_sum_to_one_and_give_the_output(name, options, masked, randomise):
    if name.startswith("global") and options.get("kernel_size", 3) is None:
        options = {"num_random_features": 5}
    group = GROUPS["D2"]
    if name in ("frame", "lifting"):
        options = options | {"content_heads": 2}
    layer, x = randomise(LAYERS[name](group, **options)).double(), image(group, (5, 6), name != "lifting")
    mask = torch.rand(2, 5, 6) < 0.7 if masked else None
    if masked:
        mask[:, 1, 4] = mask[:, 0, 0] = True
    weights, (out, value) = layer.attention_map(x, [(1, 4), (0, 0)], mask), heads_of(layer, x, mask)
    own = "frame" in name
    seen = 1 if own or name == "lifting" else 4
    assert weights.shape == (2, 2, 2, 4, 4 if name in NAMES else 1, seen, 5, 6)
    torch.testing.assert_close(weights.sum((-3, -2, -1)), torch.ones(weights.shape[:5]).double(), rtol=0, atol=1e-12)
    assert weights.min() >= 0
    applied = torch.einsum("bpnhtsyx,bnc" + ("h" if own else "s") + "yx->bpnch", weights, value)
    expected = torch.stack([out[..., 1, 4], out[..., 0, 0]], 1)
    torch.testing.assert_close(applied, expected, rtol=0, atol=1e-12)
    if masked:
        assert not weights.sum((2, 3, 4, 5)).masked_fill(mask[:, None], 0).any()


@pytest.mark.parametrize("name", list(LAYERS))
def test_maps_turn_with_the_image(name, randomise):
    """map(L_g x, g i)[h, t, s, g j] = map(x, i)[g^-1 h, g^-1 t, g^-1 s, j], for every g; of another pixel not."""
    group = GROUPS["D4"]
    layer, x = randomise(LAYERS[name](group)).double(), image(group, (4, 4), name != "lifting", batch=1)
    row, column = 1, 3
    weights = layer.attention_map(x, (row, column))[0]  # (heads, h, t, s, y, x)
    for element in range(len(group)):
        at = torch.zeros(1, 1, 4, 4).double()
        at[..., row, column] = 1
        pixel = act(at, group, element)[0, 0].nonzero()[0]
        turned = layer.attention_map(act(x, group, element), pixel)[0]
        back = group.cayley[group.inverse[element]]
        expected = weights
        for axis in (1, 2, 3):
            if weights.shape[axis] > 1:
                expected = expected.index_select(axis, back)
        expected = act(expected.flatten(0, 3)[None], group, element)[0].unflatten(0, expected.shape[:4])
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)
        if element != group.identity:
            assert (turned - weights).abs().max() > 1e-3
