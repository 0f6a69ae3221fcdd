"""Attention with a window against its naive double sum."""

import math

import pytest
import torch
from clouds import double, equal
from oracles import positive_features
from space import batch_of

from tg_equiattn.functional import window_attention
from tg_equiattn.graphs import NeighborList
from tg_equiattn.grids import PixelGrid

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

HEADS, D, E, M, FAR = 3, 5, 7, 11, 0.3
GRID = PixelGrid((5, 7), 3)
TORUS = PixelGrid((5, 7), 3, periodic=True)


def by_definition(query, key, value, projection, pair_bias, self_bias, neighbors, graph, far=FAR):
    """Every weight of every pair of nodes (N, heads, d) with a graph index."""
    pairs, n = neighbors.csr, len(query)
    there = torch.ones_like(pairs.row, dtype=torch.bool) if neighbors.mask is None else neighbors.mask
    phi_query, phi_key = (positive_features(t / D**0.25, projection) for t in (query, key))
    weights = math.exp(far) * torch.einsum("ihm,jhm->hij", phi_query, phi_key) / M
    exact = torch.einsum("ihd,jhd->hij", query, key) / D**0.5
    each = torch.arange(n, device=query.device)
    weights = weights.index_put(
        (torch.arange(HEADS)[:, None], pairs.row, pairs.col),
        (exact[:, pairs.row, pairs.col] + pair_bias).exp() * there, accumulate=True,
    )  # fmt: skip
    weights = weights + torch.zeros_like(weights).index_put(
        (torch.arange(HEADS)[:, None], each, each), (exact[:, each, each] + self_bias[:, None]).exp()
    )
    weights = weights * (graph[:, None] == graph)
    return torch.einsum("hij,jhe->ihe", weights / weights.sum(-1, keepdim=True), value)


def operands(n, near):
    query, key, value = (double(n, HEADS, width).requires_grad_() for width in (D, D, E))
    return query, key, value, double(HEADS, len(near.offsets)).requires_grad_(), double(HEADS).requires_grad_()


@pytest.mark.parametrize("far", [FAR, None, -1e3])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("grid", [GRID, TORUS], ids=["grid", "torus"])
def test_equals_the_double_sum(on_device, grid, copies, far):
    """With weights of the far, one by default, and none."""
    near, n = grid.neighbors(copies, on_device), len(grid)
    *tensors, pair_bias, self_bias = inputs = operands(copies * n, near)
    projection, graph = double(M, D), torch.arange(copies).repeat_interleave(n)
    biases = pair_bias, self_bias, near
    given = None if far is None else torch.full_like(self_bias, far)
    out = window_attention(*tensors, projection, *biases, far_bias=given, batch=graph)
    equal(out, by_definition(*tensors, projection, *biases, graph, far or 0.0), inputs)


def test_graphs_of_other_sizes(on_device):
    """Any pairs, some of them given twice, some of a node with itself, which count once."""
    graph = batch_of([13, 1, 0, 17])
    target, source = ((graph[:, None] == graph) & (torch.rand(31, 31) < 0.3)).nonzero().T
    assert bool((target == source).any())
    target, source = torch.cat([target, target[:9]]), torch.cat([source, source[:9]])
    near = NeighborList(torch.stack([source, target]), 31, torch.zeros(len(target), 2))
    *tensors, pair_bias, self_bias = inputs = operands(31, near)
    arguments = *tensors, double(M, D), pair_bias, self_bias, near
    out = window_attention(*arguments, far_bias=torch.full_like(self_bias, FAR), batch=graph, batch_size=4)
    equal(out, by_definition(*arguments, graph), inputs)
