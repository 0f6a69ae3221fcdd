"""Offsets of all nodes in values: far from the origin, turned, of nodes that are near no other; and pairs of small
graphs, which random features estimate."""

import copy

import pytest
import torch
from space import motion

SIZES = (13, 1, 29, 2, 17)
KINDS = {
    "table": {},
    "mlp": {"offset": "mlp", "cutoff": 2.1},
    "distance": {"offset": "distance", "cutoff": 1.6},
    "pairs": {"offset": "mlp", "method": "pairs", "cutoff": 2.1},
    "auto": {"offset": "mlp", "method": "auto", "num_random_features": 7, "cutoff": 2.1},
}


@pytest.fixture
def make(make_conv):
    return lambda name, **options: make_conv(**{"values": "offset", **KINDS[name], **options})


@pytest.mark.parametrize("name", ["table", "distance", "pairs", "auto"])
def test_features_in_single_precision(name, make, point_graphs, error):
    """Beside positions of map coordinates in double; in single precision these are not exact."""
    conv, data = make(name).float(), point_graphs(SIZES)
    x, graph = data.x.float(), (data.edge_index, data.batch)
    here = conv(x, *graph, pos=data.pos)
    there = data.pos + torch.tensor([4.5e5, 5e6], dtype=torch.float64)
    out, vectors = conv(x, *graph, pos=there, return_vectors=True)
    assert out.dtype == vectors.dtype == torch.float32
    assert error(out, here) < 1e-5
    if name != "table":
        assert error(conv(x, *graph, pos=(there / 7).float()), conv(x, *graph, pos=there / 7)) > 1e-3


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("method", ["features", "pairs", "auto"])
def test_distances_are_invariant_and_vectors_turn_along(method, reflect, make, error):
    """For any draw of the features; an MLP of the offset sees the motion."""
    x, pos = torch.randn(23, 12, dtype=torch.float64), 2 * torch.rand(23, 3, dtype=torch.float64)
    turn = motion(torch.float64, reflect)
    options = {"pos_dim": 3, "method": method, "num_random_features": 7}
    conv, seen = make("distance", **options), make("mlp", **options)
    for _ in range(2):
        out, vectors = conv(x, pos=pos, return_vectors=True)
        moved, turned = conv(x, pos=pos @ turn.T - 31, return_vectors=True)
        assert error(moved, out) < 1e-12
        assert error(turned, vectors @ turn.T) < 1e-12
        assert error(turned, vectors) > 1e-1
        conv.redraw_features()
    assert error(seen(x, pos=pos @ turn.T), seen(x, pos=pos)) > 1e-3


def test_far_nodes_are_seen(make, error):
    """Moving a node that is near no other changes outputs of all; with values of content it does not."""
    x, pos = torch.randn(11, 12, dtype=torch.float64), torch.rand(11, 2, dtype=torch.float64)
    pos[10] += 100
    other = pos.clone()
    other[10] += torch.tensor([0.0, 50.0])
    for name, values, seen in (("mlp", "offset", True), ("distance", "offset", True), ("mlp", "content", False)):
        conv = make(name, values=values)
        change = (conv(x, pos=pos) - conv(x, pos=other)).detach().abs().amax(1)
        assert bool((change > 1e-3).all()) if seen else bool((change < 1e-12).all())


@pytest.mark.parametrize("options", [{"position": None}, {"offset": "mlp", "values": "offset"}])
def test_features_come_to_it(options, make_conv, point_graphs, error):
    """The error falls as one over the root of their number."""
    data = point_graphs((13, 2, 17))
    given = {"x": data.x / 4, "edge_index": data.edge_index, "pos": data.pos, "batch": data.batch}
    exact = make_conv(method="pairs", **options)
    expected, apart = exact(**given), {}
    for features in (16, 4096):
        conv = make_conv(num_random_features=features, **options)
        conv.load_state_dict(exact.state_dict(), strict=False)
        errors = []
        for _ in range(4):
            conv.redraw_features()
            errors.append(error(conv(**given), expected))
        apart[features] = sum(errors) / 4
    assert 1e-3 < apart[4096] < apart[16] / 6


def test_pairs_of_two_graphs_are_refused(make_conv, point_graphs):
    conv, data = make_conv(method="pairs", offset="mlp"), point_graphs((5, 4))
    near = conv.neighbors(torch.tensor([[0], [7]]), pos=data.pos, num_nodes=9)
    with pytest.raises(ValueError, match="neighbors must not join nodes of different graphs"):
        conv(data.x, batch=data.batch, neighbors=near)


def test_pairs_given_twice(make_conv):
    """In float32 as in float64, whatever their biases."""
    x, pos = torch.randn(4, 12, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 2, 0, 3], [1, 0, 1, 1, 2]])
    conv = make_conv(method="pairs", edge_dim=1, values="offset", offset="mlp")
    torch.nn.init.ones_(conv.attention.positions.edge_bias.weight)
    in_single = copy.deepcopy(conv).float()
    for size in (1.0, 300.0, -300.0):
        bonds = size * torch.tensor([[0.5], [1.0], [0.9], [0.2], [1.0]], dtype=torch.float64)
        assert conv.neighbors(edges, None, bonds, pos, num_nodes=4).repeats
        assert not conv.neighbors(edges[:, 1:], None, bonds[1:], pos, num_nodes=4).repeats
        single = in_single(x.float(), edges, None, bonds.float(), pos.float())
        torch.testing.assert_close(single.double(), conv(x, edges, None, bonds, pos), rtol=1e-3, atol=1e-3)
