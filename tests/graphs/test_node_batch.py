"""Graphs of different sizes: mixing in groups against one at a time, rows, means, radial order, blocks of nodes."""

import itertools

import pytest
import torch
from space import batch_of, motion

from tg_equiattn.chains.sequences import radial_order
from tg_equiattn.graphs.node_batch import NodeBatch

CPU = torch.device("cpu")


def ragged_of(sizes, *bounds, **options):
    return NodeBatch.flat(torch.empty(sum(sizes), 0), batch_of(sizes), *bounds, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_sorts_by_distance_in_every_sequence(dtype):
    sizes = (5, 1, 0, 31)
    pos = torch.randn(37, 3, dtype=dtype)
    node_batch = ragged_of(sizes)
    order = radial_order(pos, node_batch)
    assert torch.equal(order.sort().values, torch.arange(37))
    assert torch.equal(node_batch.batch[order], node_batch.batch)
    distance = node_batch.centred(pos).norm(dim=1)[order]
    assert all((part.diff() >= 0).all() for part in distance.split(sizes))
    r = motion(dtype, reflect=True)
    assert torch.equal(radial_order(pos @ r.T + 3, node_batch), order)
    p = torch.cat([start + torch.randperm(n) for start, n in ((0, 5), (5, 1), (6, 31))])
    assert torch.equal(p[radial_order(pos[p], node_batch)], order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_breaks_ties_by_scalars(dtype):
    """A cube's corners lie equally far from its centre; distinct scalars tell them apart, in any pose and order."""
    pos = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=dtype)
    scalars = torch.randn(8, 2, dtype=dtype)
    node_batch = NodeBatch.dense(1, 8, None, CPU)
    order = radial_order(pos, node_batch, scalars)
    for reflect in (False, True):
        p = torch.randperm(8)
        moved = pos[p] @ motion(dtype, reflect).T + torch.randn(3, dtype=dtype)
        assert torch.equal(p[radial_order(moved, node_batch, scalars[p])], order)
    assert order.tolist() != list(range(8))
    assert radial_order(pos, node_batch).tolist() == list(range(8))  # a symmetry exchanges them: as they came
