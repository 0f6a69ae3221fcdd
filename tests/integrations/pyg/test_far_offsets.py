"""Offsets of all nodes in values: far from the origin, turned, of nodes that are near no other."""

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
