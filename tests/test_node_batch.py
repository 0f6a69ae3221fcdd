"""Graphs of different sizes: mixing in groups against one at a time, rows, means, radial order, blocks of nodes."""

import itertools

import pytest
import torch
from space import batch_of, motion

from tg_equiattn.functional.performer.graph_rows import graph_rows
from tg_equiattn.node_batch import NodeBatch
from tg_equiattn.orders import check_order, radial_order

SIZES = {
    "equal": (5, 5, 5),
    "groups": (1, 33, 5, 0, 2, 7, 1, 40, 6, 0),
    "one": (11,),
    "empty ends": (0, 3, 0),
    "singles": (1, 1, 1, 1),
}


CPU = torch.device("cpu")


def ragged_of(sizes, *bounds, **options):
    return NodeBatch.flat(torch.empty(sum(sizes), 0), batch_of(sizes), *bounds, **options)


def kernel(x, y, rows):
    """Running sums of x over the reversed y of each graph: every node's place and the graph's size matter."""
    n, lengths = x.shape[1], rows.lengths
    own = torch.full((x.shape[0],), n) if lengths is None else lengths
    there = (torch.arange(n) < own[:, None])[..., None, None]
    back = (own[:, None] - 1 - torch.arange(n)).clamp(min=0)[..., None, None].expand_as(y)
    out = x.cumsum(1) * y.gather(1, back) / own.clamp(min=1)[:, None, None, None]
    return out.masked_fill(~there, 0)


def alone(x, y):
    return x.cumsum(0) * y.flip(0) / max(1, x.shape[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_flat_mix_equals_each_alone(sizes, padded):
    x, y = (torch.randn(sum(sizes), 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    node_batch = ragged_of(sizes, len(sizes), max(sizes) + 2 if padded else None)
    assert node_batch.sizes.tolist() == node_batch.known_sizes == list(sizes)
    expected = torch.cat([alone(*p) for p in zip(x.split(sizes), y.split(sizes), strict=True)])
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * direction).sum(), (x, y))
    groups = {n: range(n, len(sizes), 2) for n in range(min(2, len(sizes)))} if padded else None
    rows = node_batch.padded()
    for out in (node_batch.mix(kernel, x, y, groups=groups), rows.unpack(kernel(rows.pack(x), rows.pack(y), rows))):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad((out * direction).sum(), (x, y))
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES.values(), (90, 1, 1, 1, 5)])
@pytest.mark.parametrize("make", [NodeBatch.padded, graph_rows])
def test_rows_hold_every_node_once(sizes, known, make, monkeypatch):
    if not known:
        monkeypatch.setattr("tg_equiattn.node_batch.is_concrete", lambda x: False)
    node_batch = ragged_of(sizes, len(sizes), max(sizes))
    assert (node_batch.known_sizes is None) == (not known and len(sizes) > 1)
    rows, x = make(node_batch), torch.randn(sum(sizes), 2, dtype=torch.float64)
    packed = rows.pack(x)
    torch.testing.assert_close(rows.unpack(packed), x, rtol=0, atol=0)
    sums = torch.stack([part.sum(0) for part in x.split(sizes)])
    graph = torch.arange(len(sizes)) if rows.graph is None else rows.graph
    if sum(sizes):
        torch.testing.assert_close(x.new_zeros(len(sizes), 2).index_add(0, graph, packed.sum(1)), sums)
    torch.testing.assert_close(node_batch.sum(x), sums)
    torch.testing.assert_close(node_batch.spread(sums), sums[batch_of(sizes)])
    if rows.mask is not None:
        assert int(rows.mask.sum()) == sum(sizes)
        assert not packed[~rows.mask].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_means_and_centres(sizes):
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    node_batch = ragged_of(sizes, len(sizes))
    expected = torch.stack([p.mean(0) if p.numel() else torch.zeros(3) for p in x.split(sizes)])
    torch.testing.assert_close(node_batch.mean(x), expected, rtol=1e-12, atol=1e-12)
    centred = torch.cat([p - p.mean(0, keepdim=True) for p in x.split(sizes) if p.numel()])
    torch.testing.assert_close(node_batch.centred(x), centred, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(node_batch.centred((x + 1e4).float()), centred, rtol=0, atol=2e-3)
    (grad,) = torch.autograd.grad(node_batch.centred(x, detach=True).sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_radial_order_sorts_by_distance_in_every_sequence(dtype):
    sizes = (5, 1, 0, 31)
    pos = torch.randn(37, 3, dtype=dtype)
    node_batch = ragged_of(sizes)
    order = radial_order(pos, node_batch)
    check_order(order, node_batch)
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


def test_compiling_needs_the_sizes(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for options in ((), (2,), (None, 3), (2, None, False)):
        with pytest.raises(ValueError, match="batch_size and max_num_nodes must be given"):
            ragged_of((3, 2), *options[:2], whole=options[2:] == ()).padded()
