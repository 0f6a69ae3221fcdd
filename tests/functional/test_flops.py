"""Counts of floating point operations: those of the plain forms, and of what backward computes again."""

import math

import pytest
import torch
from attention_operands import table_operands
from torch.utils.flop_counter import FlopCounterMode

from tg_equiattn import functional as F
from tg_equiattn import nn as layers
from tg_equiattn.functional.edge_products import edge_dot, edge_sum
from tg_equiattn.functional.group.operator import windowed_attention
from tg_equiattn.functional.hyena.lag_convolution import first_lag, lag_convolution
from tg_equiattn.functional.performer.feature_attention import feature_readout, feature_summary
from tg_equiattn.grids import PixelGrid, Window

NEAR = PixelGrid((3, 5), 2).neighbors().csr
G, L, M, D, E = 2, 13, 11, 5, 7
PROJECTION = torch.randn(M, D)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def counts(function, *inputs):
    """Of the forward and of the backward pass."""
    with FlopCounterMode(display=False) as forward:
        out = function(*inputs)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad([x.sum() for x in outputs], inputs)
    return forward.get_total_flops(), backward.get_total_flops()


SUMMARY = leaf(G, L, D), leaf(G, L, E)
READOUT = leaf(G, L, D), leaf(G, M, E), leaf(G, M)
HALVES = {
    "summary": (lambda key, value, plain: feature_summary(key, PROJECTION, 0.5, value, None, plain), SUMMARY),
    "readout": (
        lambda query, content, level, plain: feature_readout(query, PROJECTION, content, level, plain),
        READOUT,
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_attention_by_features(name):
    """As the plain form; backward makes the scores again."""
    function, inputs = HALVES[name]
    forward, backward = counts(lambda *x: function(*x, False), *inputs)
    plain, plain_backward = counts(lambda *x: function(*x, True), *inputs)
    assert forward == plain == 2 * G * L * M * (D + E)
    assert backward == plain_backward + 2 * G * L * M * D


def test_products_at_pairs():
    """What the product of all pairs counts, the share of those that are there."""
    query, key, weight = leaf(G, 15, D), leaf(G, 15, D), leaf(G, len(NEAR.col))
    whole, backward = counts(lambda q, k: q @ k.mT, query, key)
    share = len(NEAR.col) / 15**2
    assert counts(lambda q, k: edge_dot(q, k, NEAR), query, key) == (whole * share, backward * share)
    assert counts(lambda w, k: edge_sum(w, k, NEAR), weight, key) == (whole * share, backward * share)


def ffts(number, length):
    return number * round(2.5 * length * math.log2(length))


@pytest.mark.parametrize("causal", [False, True])
def test_long_convolutions(causal):
    """Three FFTs of each component at the length that is taken, and in backward three for each operand."""
    mode, length = ("causal", 28) if causal else ("circular", 14)
    for function, shape, each in ((F.scalar_long_conv, (3, 14, 5), 1), (F.vector_long_conv, (3, 14, 5, 3), 3)):
        found = counts(lambda q, k, f=function: f(q, k, mode=mode), leaf(*shape), leaf(*shape))
        assert found == (ffts(3 * 3 * 5 * each, length), 2 * ffts(3 * 3 * 5 * each, length))
    first = first_lag(14, causal)
    forward, backward = counts(lambda x, h: lag_convolution(x, h, None, first), leaf(3, 14, 5), leaf(14 - first, 5))
    assert (forward, backward) == (ffts(2 * 15 + 5, 28), 2 * ffts(2 * 15 + 5, 28))


def test_vector_attention():
    """Products with six and with nine components; backward is twice as much, and the scores again."""
    pairs = 3 * 5 * 11**2
    assert counts(F.vector_attention, *[leaf(3, 11, 5, 3) for _ in range(3)]) == (30 * pairs, 72 * pairs)


@pytest.mark.parametrize("relation", ["frame", "lifting", "relative", "ge_vit", "full relative", "full ge_vit"])
def test_group_attention(relation):
    """What matrix products of the definition count, the same scores one image and offset at a time."""
    window, spatial = Window(2, 3), (3, 5)
    operands, index = table_operands(relation, window, spatial)
    query, key, value, offsets, elements = operands
    settings = index, None, torch.tensor(0), 3, (), False, 0.0
    run = lambda *x: windowed_attention(*x, elements, *settings)  # noqa: E731
    found = counts(run, query, key, value, offsets)

    pixels, t = 2 * 2 * 15, 3 if index is not None and index.ndim == 3 else 1
    keys = 3 if index is not None else 1
    of_queries = query.shape[3] if index is None or index.ndim == 2 else 3
    content = counts(lambda q, k: q @ k, leaf(pixels * of_queries, 1, 3), leaf(pixels * of_queries, 3, keys * 9))
    position = counts(lambda q, r: q @ r, leaf(pixels * t * 3, 1, 4), leaf(pixels * t * 3, 4, offsets.shape[2] * 9))
    argument = counts(
        lambda q, r: q @ r, leaf(pixels * of_queries, 1, 4), leaf(pixels * of_queries, 4, elements.shape[1])
    )
    values = counts(lambda w, v: w @ v, leaf(pixels * 3, 1, keys * 9), leaf(pixels * 3, keys * 9, 5))
    forward = [x for x, _ in (content, position, argument)]
    assert found[0] == sum(forward) + values[0]
    assert found[1] == sum(x for _, x in (content, position, argument, values)) + sum(forward)


def test_empty_sequences_count_nothing():
    for function in (F.scalar_long_conv, lambda x, h: lag_convolution(x, h[0], None, 0)):
        assert counts(function, leaf(2, 0, 3), leaf(2, 0, 3)) == (0, 0)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (layers.PerformerAttention(12, 15, 3, method="features", position=None), (torch.randn(2, 35, 12),)),
        (layers.VectorSelfAttention(3, 5), (torch.randn(2, 7, 3), torch.randn(2, 7, 5, 3))),
        (layers.SE3HyenaOperator(3, 5), (torch.randn(2, 7, 3), torch.randn(2, 7, 5, 3))),
    ],
)
def test_operators_of_layers_are_counted(layer, inputs):
    with FlopCounterMode(display=False) as counter:
        if isinstance(layer, layers.PerformerAttention):
            layer(*inputs, grid=PixelGrid((5, 7), 3))
        else:
            layer(*inputs, None)
    ours = [n for n in counter.get_flop_counts()["Global"] if str(n).startswith("tg_equiattn.")]
    assert ours
