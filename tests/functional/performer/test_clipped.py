"""Strategy 2 against its naive double sum, whole and masked."""

import pytest
import torch
from clouds import double, equal
from oracles import positive_features

from tg_equiattn.functional.performer.clipped import clipped_attention_impl
from tg_equiattn.grids import PixelGrid
from tg_equiattn.node_batch import NodeBatch

HEADS, D, E, M = 3, 5, 7, 11
GRIDS = {"grid": PixelGrid((5, 7), 3), "torus": PixelGrid((5, 7), 3, periodic=True), "all near": PixelGrid((2, 3), 7)}


def distance(i, j, grid):
    height, width = grid.shape
    dx, dy = abs(j % width - i % width), abs(j // width - i // width)
    return min(dx, width - dx) + min(dy, height - dy) if grid.periodic else dx + dy


def by_definition(query, value, table, projection, grid, exists):
    """One row of queries (n, heads, d) of a grid, whose keys are the nodes that exist."""
    n, k = len(grid), table.shape[1] - 1
    phi_query, phi_table = (positive_features(t / D**0.25, projection) for t in (query, table))
    keys, out = [j for j in range(n) if exists[j]], []
    for i in range(n):
        distances = [min(distance(i, j, grid), k) for j in keys]
        w = torch.einsum("hm,hjm->jh", phi_query[i], phi_table[:, distances])
        mean = torch.einsum("jh,jhe->he", w, value[keys]) / w.sum(0)[:, None]
        out.append(mean if exists[i] else 0 * mean)
    return torch.stack(out)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_equals_the_double_sum(on_device, grid, masked):
    """Of two graphs; what a node that does not exist is given does not matter, nor what it gives."""
    n, k = len(grid), int(grid.cutoff)
    query, value = (double(2 * n, HEADS, width).requires_grad_() for width in (D, E))
    table, projection = double(HEADS, k + 1, D).requires_grad_(), double(M, D)
    mask = torch.rand(2, n) < 0.7 if masked else None
    exists = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    near = grid.neighbors(2, on_device)
    near = near if mask is None else near.restricted(mask.flatten())
    heads_first = query.transpose(0, 1), value.transpose(0, 1)
    out = clipped_attention_impl(*heads_first, projection, table, near, NodeBatch.dense(2, n, mask, query.device))
    out = out.transpose(0, 1)
    parts = zip(query.split(n), value.split(n), exists.tolist(), strict=True)
    expected = torch.cat([by_definition(q, v, table, projection, grid, e) for q, v, e in parts])
    out = torch.where(exists.flatten()[:, None, None], out, 0.0)
    equal(out, expected, (query, value, table))


def test_stays_right_where_every_node_is_near():
    """The far row of the table may weigh more than all others by 1e20: with no node far it must not be felt."""
    near, projection = PixelGrid((1, 2), 3).neighbors(), torch.tensor([[1.0]])
    table = torch.tensor([1e-20, 3e-20, 1e-20, 1.0]).log()
    table = 1 - (1 - 2 * table).sqrt()  # of the two numbers w with w - w^2 / 2 as asked for, the lower one
    query, value, nodes = torch.zeros(1, 2, 1), torch.randn(1, 2, 3), NodeBatch.flat(torch.empty(2), None)
    out = clipped_attention_impl(query, value, projection, table[None, :, None], near, nodes)
    torch.testing.assert_close(out, (value + 3 * value.flip(1)) / 4, rtol=1e-4, atol=1e-5)
