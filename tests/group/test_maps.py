"""Attention maps: the weights of chosen pixels."""

import pytest
import torch
from group_layers import GROUPS, LAYERS, image

from tg_equiattn.group.windows import zero_where_masked
from tg_equiattn.testing import act

NAMES = ["ge_vit", "lifted"]  # whose outputs sum over several queries
FRAMES = ("frame", "lifting", "global frame")  # an output meets keys of one element
ROTARY = {"kernel_size": None, "encoding": "rotary"}
OPTIONS = [{}, {"kernel_size": 5, "window_shape": "disk"}, {"padding_mode": "circular"}, {"kernel_size": None}]
CASES = [(name, options, (5, 6)) for name in LAYERS for options in OPTIONS]
CASES += [(name, ROTARY, keys) for name in ("frame", "relative", "lifting") for keys in ((5, 6), (3, 4))]
CASES += [(n, {"content_heads": 2}, k) for n in ("lifting", "frame", "relative", "ge_vit") for k in ((3, 9), (2, 3))]


def heads_of(layer, x, mask, context, seen):
    query, key, value = layer._operands(zero_where_masked(x, mask), zero_where_masked(context, seen))
    return zero_where_masked(layer._heads(query, key, value, seen, 0.0), mask), value


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "options", "keys"), CASES)
def test_weights_sum_to_one_and_give_the_output(name, options, keys, masked, randomise):
    """Also of contexts on grids of other resolution."""
    group, pixels = GROUPS["D2"], {(3, 9): (2, 5), (2, 3): (3, 5)}.get(keys, (5, 6))
    if name.startswith("global") and options.get("kernel_size", 3) is None:
        options = {"num_random_features": 5}
    if name in ("frame", "lifting"):
        options = {"content_heads": 2} | options
    layer, x = randomise(LAYERS[name](group, **options)).double(), image(group, pixels, name != "lifting")
    own = {} if keys == pixels else {"context": image(group, keys, name != "lifting")}
    mask = torch.rand(2, *pixels) < 0.7 if masked else None
    seen = torch.rand(2, *keys) < 0.7 if masked and own else mask
    if masked:
        mask[:, 1, 4] = mask[:, 0, 0] = seen[:, 1, 1] = seen[:, 0, 0] = True
        own |= {"context_mask": seen} if own else {}
    weights = layer.attention_map(x, [(1, 4), (0, 0)], mask, **own)
    elements = (4, 4 if name in NAMES else 1, 1 if name in FRAMES else 4)
    assert weights.shape == (2, 2, 2, *elements, *keys)
    sums = weights.sum((-3, -2, -1))
    torch.testing.assert_close(sums, (sums > 0.5).to(sums) if own else torch.ones_like(sums), rtol=0, atol=1e-12)
    assert weights.min() >= 0
    out, value = heads_of(layer, x, mask, own.get("context", x), seen)
    value = value.expand(-1, -1, -1, elements[2] if name == "lifting" else 4, -1, -1)
    applied = torch.einsum("bpnhtsyx,bnc" + ("h" if "frame" in name else "s") + "yx->bpnch", weights, value)
    expected = torch.stack([out[..., 1, 4], out[..., 0, 0]], 1)
    torch.testing.assert_close(applied, expected, rtol=0, atol=1e-12)
    if masked:
        assert not weights.sum((2, 3, 4, 5)).masked_fill(seen[:, None], 0).any()


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
