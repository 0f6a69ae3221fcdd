"""Attention with a window against its naive double sum."""

import math

import pytest
import torch
from oracles import positive_features

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
    direction = torch.randn_like(out)
    grads = (torch.autograd.grad((t * direction).sum(), inputs) for t in (out, expected))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


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
    graph = torch.repeat_interleave(torch.arange(4), torch.tensor([13, 1, 0, 17]))
    target, source = ((graph[:, None] == graph) & (torch.rand(31, 31) < 0.3)).nonzero().T
    assert bool((target == source).any())
    target, source = torch.cat([target, target[:9]]), torch.cat([source, source[:9]])
    near = Pairs(torch.stack([source, target]), 31, torch.zeros(len(target), 2))
    *tensors, pair_bias, self_bias = inputs = operands(31, near)
    projection = double(M, D)
    out = window_attention(
        *tensors, projection, pair_bias, self_bias, near, far_bias=far_bias(pair_bias), batch=graph, batch_size=4
    )
    equal(out, by_definition(*tensors, projection, pair_bias, self_bias, near, graph), inputs)


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


@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_large_scores_stay_finite(norm):
    n = len(GRID)
    query, key = (norm * torch.nn.functional.normalize(torch.randn(n, HEADS, D), dim=-1) for _ in range(2))
    value, projection, near = torch.randn(n, HEADS, E), torch.randn(M, D), GRID.neighbors()
    query.requires_grad_()
    bias = 100 * torch.randn(HEADS, len(near.offsets))
    out = window_attention(query, key, value, projection, bias, 100 * torch.randn(HEADS), near)
    for t in (out, *torch.autograd.grad(out.sum(), query)):
        assert t.isfinite().all()
    assert out.abs().max() <= value.abs().max() * (1 + 1e-5)  # means of values


NEAR = GRID.neighbors()
Q, W, PAIRS, OWN = torch.ones(35, HEADS, D), torch.ones(M, D), torch.ones(HEADS, len(NEAR.offsets)), torch.ones(HEADS)


@pytest.mark.parametrize(
    ("message", "arguments", "options"),
    [
        ("query, key and value must be", (Q, Q[:5], Q, W, PAIRS, OWN, NEAR), {}),
        ("projection must be", (Q, Q, Q, W[:, :2], PAIRS, OWN, NEAR), {}),
        (r"pair_bias must have shape \(3, \d+\), got \(2,", (Q, Q, Q, W, PAIRS[:2], OWN, NEAR), {}),
        ("self_bias must have shape", (Q, Q, Q, W, PAIRS, OWN[:2], NEAR), {}),
        ("far_bias must have shape", (Q, Q, Q, W, PAIRS, OWN, NEAR), {"far_bias": OWN[:2]}),
        ("neighbors must be of 30 nodes, got 35", (Q[:30], Q[:30], Q[:30], W, PAIRS, OWN, NEAR), {}),
        ("batch must be sorted", (Q, Q, Q, W, PAIRS, OWN, NEAR), {"batch": torch.arange(35).flip(0)}),
    ],
)  # fmt: skip
def test_bad_arguments(message, arguments, options):
    with pytest.raises(ValueError, match=message):
        window_attention(*arguments, **options)
