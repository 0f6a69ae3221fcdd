"""Near pairs: sorted, from grids, and found by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tg_equiattn.graphs import NeighborList, mean_edge_length, neighbor_list
from tg_equiattn.grids import PixelGrid


def as_set(target, source, offsets):
    return {(i, j, *o) for i, j, o in zip(target.tolist(), source.tolist(), offsets.tolist(), strict=True)}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([1, 1.5, 2, 3, 4]), st.booleans())
def test_pixel_grids(shape, distance, periodic):
    grid = PixelGrid(tuple(shape), distance, periodic)
    edge_index, offsets = grid.edges()
    index = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape))
    step = index[None] - index[:, None]
    if periodic:
        sides = torch.tensor(shape)
        step = (step + (sides - 1) // 2) % sides - (sides - 1) // 2
    near = (step.abs().sum(-1) < distance) & ~torch.eye(len(index), dtype=torch.bool)
    i, j = near.nonzero().unbind(1)
    expected = step[i, j]
    if len(shape) > 1:  # (z, row, column) to (x, y, z), rows running down
        expected = expected.flip(-1) * torch.tensor([1, -1, 1][: len(shape)])
    assert as_set(edge_index[1], edge_index[0], offsets) == as_set(i, j, expected)
    assert bool((edge_index[1].diff() >= 0).all())
    if not periodic:
        pos = grid.pos()
        assert torch.equal(pos[edge_index[0]] - pos[edge_index[1]], offsets.to(pos.dtype))


def test_grid_neighbors_are_those_of_every_copy():
    grid = PixelGrid((3, 5), 2)
    (source, target), offsets = grid.edges()
    near = grid.neighbors(2)
    expected = as_set(target, source, offsets) | as_set(target + 15, source + 15, offsets)
    assert as_set(near.target, near.source, near.offsets) == expected
    assert grid.neighbors(2) is near


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**20))
def test_pairs_found_by_position(nodes, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    pos = 7 * torch.randn(nodes, dim, generator=generator).double()  # float32 is not exact enough to tell at the limit
    batch = torch.randint(3, (nodes,), generator=generator).sort().values
    (source, target), _ = neighbor_list(pos, 2.5, batch=batch)
    distance = torch.cdist(pos, pos, p=2)
    near = (distance < 2.5) & (batch[:, None] == batch) & ~torch.eye(nodes, dtype=torch.bool)
    if nodes:  # a position that is not finite has no pairs
        pos[0, 0], near[0], near[:, 0] = torch.nan, False, False
        (source, target), _ = neighbor_list(pos, 2.5, batch=batch)
    assert torch.equal(torch.stack([target, source]), near.nonzero().T)


def test_a_thousand_pairs_a_node_and_no_more():
    pos = torch.rand(1200, 2)
    (source, target), _ = neighbor_list(pos, 0.6)
    near = (torch.cdist(pos, pos, p=2) < 0.6) & ~torch.eye(1200, dtype=torch.bool)
    assert (target * 1200 + source).diff().min() > 0
    assert abs(len(target) - int(near.sum())) <= 10  # cdist rounds otherwise at the limit
    assert len(neighbor_list(pos[:1001], 2)[1]) == 1001 * 1000
    with pytest.raises(ValueError, match="more than 1000 pairs a node at distances below 2 among 1002"):
        neighbor_list(pos[:1002], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pos": torch.rand(6)}, r"pos must have shape \(N, dim\), one row for each node, got \(6,\)"),
        ({"batch": torch.zeros(5, dtype=torch.int64)}, r"batch must be int64 of shape \(6,\), got .*\(5,\)"),
        ({"batch": torch.zeros(6)}, "batch must be int64 .* got torch.float32"),
        ({"cutoff": 0}, "cutoff must be a positive number, got 0"),
    ],
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        neighbor_list(**{"pos": torch.rand(6, 2), "cutoff": 0.5} | options)


def test_pairs_of_a_node_with_itself():
    """Features of a pair of a node with itself are stored apart, unless ``loops`` keeps such pairs among the others."""
    edge_index, features = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2]]), torch.arange(4.0)[:, None]
    pairs = NeighborList(edge_index, 3, features=features)
    assert pairs.features.flatten().tolist() == [1, 0, 2]
    assert pairs.self_features.flatten().tolist() == [0, 0, 3]
    kept = NeighborList(edge_index, 3, features=features, loops=True)
    assert kept.features.flatten().tolist() == [1, 0, 2, 3]
    assert kept.self_features is None


def test_mean_edge_length():
    pos = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])
    edges = torch.tensor([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]])
    assert mean_edge_length(pos, edges) == 3.0
    for bad in (edges[:, :0], edges[:, 4:]):
        with pytest.raises(ValueError, match="edge_index must join nodes at different pos"):
            mean_edge_length(pos, bad)
