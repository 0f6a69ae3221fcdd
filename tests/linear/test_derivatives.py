"""Derivatives of linear attention beyond the first: against finite differences, at extreme scores, in chunks."""

import pytest
import torch

from tg_equiattn.functional import linear_attention, window_attention
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.grids import PixelGrid
from tg_equiattn.linear.linear_attention import Inputs
from tg_equiattn.linear.near_pairs import clipped_attention_impl

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

HEADS, D, E, M = 2, 3, 2, 5
GRID = PixelGrid((3, 4), 3)
NEAR = GRID.neighbors()
PAIRS, N = len(NEAR.offsets), len(GRID)


def attend_window(query, key, value, projection, pair_bias, self_bias, far_bias):
    return window_attention(query, key, value, projection, pair_bias, self_bias, NEAR, far_bias=far_bias)


def attend_clipped(query, value, projection, table):
    nodes = NodeBatch.flat(query, None)
    query, value = query.transpose(0, 1), value.transpose(0, 1)
    return clipped_attention_impl(Inputs(query, query, value, projection), table, NEAR, nodes).transpose(0, 1)


QUERY, VALUE, PROJECTION = (N, HEADS, D), (N, HEADS, E), (M, D)
FUNCTIONS = {
    "linear": (linear_attention, (QUERY, QUERY, VALUE, PROJECTION)),
    "window": (attend_window, (QUERY, QUERY, VALUE, PROJECTION, (HEADS, PAIRS), (HEADS,), (HEADS,))),
    "clipped": (attend_clipped, (QUERY, VALUE, PROJECTION, (HEADS, 4, D))),
}


@pytest.fixture(params=FUNCTIONS)
def problem(request):
    """A function of all its operands but the projection, which is fixed, and their shapes."""
    function, shapes = FUNCTIONS[request.param]
    place = shapes.index(PROJECTION)
    projection = torch.randn(PROJECTION, dtype=torch.float64)

    def call(*operands):
        fixed = projection.to(operands[0])
        return function(*operands[:place], fixed, *operands[place:])

    return call, [s for s in shapes if s != PROJECTION]


@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_extreme_scores_stay_finite(problem, norm):
    """In float32, of scores up to ten thousand, by operators and plain compositions; outputs are means of values."""
    call, shapes = problem
    inputs = [(norm * torch.nn.functional.normalize(torch.randn(s), dim=-1)).requires_grad_() for s in shapes]
    energy, everything = lambda *x: call(*x).square().sum(), tuple(range(len(inputs)))
    out = call(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    plain = torch.func.grad(energy, everything)
    curved = torch.func.grad(lambda *x: sum(g.square().sum() for g in plain(*x)), everything)
    assert all(t.isfinite().all() for t in (out, *grads, *second, *plain(*inputs), *curved(*inputs)))
    assert out.abs().max() <= inputs[shapes.index(VALUE)].abs().max() * (1 + 1e-4)
