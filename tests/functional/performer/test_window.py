"""Attention with a window against its naive double sum."""

import math

import pytest
import torch
from clouds import gradients
from oracles import positive_features
from space import batch_of

from tg_equiattn.functional import window_attention
from tg_equiattn.grids import PixelGrid
from tg_equiattn.pairs import Pairs

HEADS, D, E, M, FAR = 3, 5, 7, 11, 0.3
GRID = PixelGrid((5, 7), 3)
TORUS = PixelGrid((5, 7), 3, periodic=True)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_definition(query, key, value, projection, pair_bias, self_bias, neighbors, graph):
    """Every weight of every pair of nodes (N, heads, d) with a graph index; a node of graph -1 does not exist."""
    pairs, n = neighbors.csr, len(query)
    pair_bias = passed_over(pair_bias, neighbors)
    graph = torch.as_tensor(graph, device=query.device)
    phi_query, phi_key = (positive_features(t / D**0.25, projection) for t in (query, key))
    same = (graph[:, None] == graph) & (graph >= 0)
    weights = math.exp(FAR) * torch.einsum("ihm,jhm->hij", phi_query, phi_key) / M
    exact = torch.einsum("ihd,jhd->hij", query, key) / D**0.5
    each = torch.arange(n, device=query.device)
    weights = weights.index_put(
        (torch.arange(HEADS)[:, None], pairs.row, pairs.col),
        (exact[:, pairs.row, pairs.col] + pair_bias).exp(), accumulate=True,
    )  # fmt: skip
    weights = weights + torch.zeros_like(weights).index_put(
        (torch.arange(HEADS)[:, None], each, each), (exact[:, each, each] + self_bias[:, None]).exp()
    )
    weights = weights * same
    total = weights.sum(-1, keepdim=True)
    mean = weights / torch.where(total > 0, total, torch.ones_like(total))
    return torch.einsum("hij,jhe->ihe", mean, value)


def passed_over(pair_bias, neighbors):
    """Biases of pairs: minus infinity for those that do not exist, which stay where values are not read."""
    return pair_bias if neighbors.exists is None else pair_bias.masked_fill(~neighbors.exists, -torch.inf)


def operands(n, near):
    query, key, value = (double(n, HEADS, width).requires_grad_() for width in (D, D, E))
    return query, key, value, double(HEADS, len(near.offsets)).requires_grad_(), double(HEADS).requires_grad_()


def equal(out, expected, inputs):
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(*(gradients([x], inputs) for x in (out, expected)), rtol=1e-9, atol=1e-10)


def far_bias(like):
    return like.new_full((HEADS,), FAR)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("grid", [GRID, TORUS], ids=["grid", "torus"])
def test_equals_the_double_sum(on_device, grid, copies):
    near, n = grid.neighbors(copies, on_device), len(grid)
    *tensors, pair_bias, self_bias = inputs = operands(copies * n, near)
    projection, graph = double(M, D), torch.arange(copies).repeat_interleave(n)
    biases = pair_bias, self_bias, near
    out = window_attention(*tensors, projection, *biases, far_bias=far_bias(tensors[0]), batch=graph)
    equal(out, by_definition(*tensors, projection, *biases, graph), inputs)


def test_graphs_of_other_sizes(on_device):
    """Any pairs, some of them given twice, some of a node with itself, which count once."""
    graph = batch_of([13, 1, 0, 17])
    target, source = ((graph[:, None] == graph) & (torch.rand(31, 31) < 0.3)).nonzero().T
    assert bool((target == source).any())
    target, source = torch.cat([target, target[:9]]), torch.cat([source, source[:9]])
    near = Pairs(torch.stack([source, target]), 31, torch.zeros(len(target), 2))
    *tensors, pair_bias, self_bias = inputs = operands(31, near)
    arguments = *tensors, double(M, D), pair_bias, self_bias, near
    out = window_attention(*arguments, far_bias=far_bias(pair_bias), batch=graph, batch_size=4)
    equal(out, by_definition(*arguments, graph), inputs)


def test_far_bias_is_zero_by_default_and_removes_the_far(on_device):
    near = GRID.neighbors(1, on_device)
    *tensors, pair_bias, self_bias = operands(35, near)
    options = (double(M, D), pair_bias, self_bias, near)
    out = window_attention(*tensors, *options)
    zero, none = (window_attention(*tensors, *options, far_bias=torch.full_like(self_bias, f)) for f in (0.0, -1e3))
    torch.testing.assert_close(out, zero, rtol=0, atol=0)
    scores = torch.einsum("ihd,jhd->hij", *tensors[:2]) / D**0.5
    pairs, each = near.csr, torch.arange(35)
    allowed = torch.zeros_like(scores)  # the weights of the biases, added up where a pair that does not exist lies
    place = torch.arange(HEADS)[:, None], pairs.row, pairs.col
    allowed = allowed.index_put(place, passed_over(pair_bias, near).exp(), accumulate=True)
    allowed[:, each, each] = self_bias.exp()[:, None]
    allowed = allowed.log()
    expected = torch.einsum("hij,jhe->ihe", (scores + allowed).softmax(-1), tensors[2])
    torch.testing.assert_close(none, expected, rtol=1e-11, atol=1e-12)
