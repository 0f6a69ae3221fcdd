"""Offsets of all nodes in values, by definition; pairs and random features by the size of each graph; dropout."""

import pytest
import torch
from oracles import performer_double_sum
from space import batch_of, motion

from tg_equiattn.graphs import NeighborList, neighbor_list
from tg_equiattn.nn import PerformerAttention

SIZES, CHANNELS, OUT, HEADS, DIM = (13, 1, 29), 6, 8, 4, 3
KINDS = {
    "mlp": {"offset": "mlp"},
    "distance": {"offset": "distance"},
    "edge features": {"offset": "mlp", "edge_dim": 2},
    "no near pairs": {"position": None},
    "far": {"offset": "mlp", "values": "far"},
    "far distance": {"offset": "distance", "values": "far"},
    "far distance, no near pairs": {"position": None, "offset": "distance", "values": "far"},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make(randomise):
    def build(kind, dtype=torch.float64, **options):
        options = {"pos_dim": DIM, "cutoff": 1.3, "values": "offset", "method": "features", **options}
        layer = PerformerAttention(CHANNELS, OUT, HEADS, num_random_features=11, **{**KINDS[kind], **options})
        return randomise(layer, 0.4).to(dtype).eval()

    return build


@pytest.fixture
def cloud():
    """Nodes of three graphs, two of them at one place, and a call of a layer at positions."""
    batch = batch_of(SIZES)
    pos = 1.5 * torch.randn(sum(SIZES), DIM).double()
    pos[3] = pos[5]
    edges, _ = neighbor_list(pos, 1.3, batch=batch)
    source, target = edges

    def call(layer, x, pos, parameters=None, **more):
        more |= {"pos": pos, "batch": batch, "batch_size": len(SIZES)}
        if layer.needs.neighbors:
            offsets = pos[source] - pos[target]
            more["neighbors"] = NeighborList(edges, len(pos), offsets, features=edges.T.double().sin())
        return torch.func.functional_call(layer, parameters or {}, (x,), more)

    return torch.randn(len(pos), CHANNELS).double(), pos, batch, call


def test_by_definition(kind, make, cloud):
    layer, (x, pos, batch, call) = make(kind), cloud
    edges, _ = neighbor_list(pos, 1.3, batch=batch)
    found = call(layer, x, pos, return_vectors=True)
    offsets = pos[edges[0]] - pos[edges[1]]
    features = edges.T.double().sin() if kind == "edge features" else None
    expected = performer_double_sum(layer, x, edges, offsets, batch, features, pos, vectors=True)
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=1e-11)
    assert found[1].abs().max() > 1e-2


def test_a_new_layer_is_the_one_without(make, cloud):
    layer, (x, pos, batch, call) = make("no near pairs"), cloud
    layer.reset_parameters()
    out = call(layer, x, pos)
    torch.testing.assert_close(out, layer(x, pos=0 * pos, batch=batch), rtol=0, atol=1e-12)
    assert (torch.autograd.grad(out.sum(), layer.far_offsets.map.weight)[0].abs() > 1e-6).all()


def test_rotations(kind, make, cloud):
    """Outputs stay and vectors turn along where offsets are seen by their distance; others see the turn."""
    layer, (x, pos, _, call) = make(kind), cloud
    for matrix in (motion(), motion(reflect=True)):
        out, vectors = call(layer, x, pos, return_vectors=True)
        turned, along = call(layer, x, pos @ matrix.T, return_vectors=True)
        if "distance" in kind:
            torch.testing.assert_close([turned, along], [out, vectors @ matrix.T], rtol=0, atol=1e-12)
        else:
            assert (turned - out).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["mlp", "far"])
def test_periodic_offsets_are_refused(kind, make):
    layer, pos = make(kind), torch.rand(12, DIM).double()
    edges, offsets = neighbor_list(pos, 0.5)
    x = torch.randn(12, CHANNELS).double()
    expected = layer(x, pos=pos, neighbors=NeighborList(edges, 12, offsets))
    torch.testing.assert_close(layer(x, pos=pos + 7, neighbors=NeighborList(edges, 12, offsets)), expected)
    offsets[3, 1] += 1
    with pytest.raises(ValueError, match="edge_offset must be differences of pos with values='offset'"):
        layer(x, pos=pos, neighbors=NeighborList(edges, 12, offsets))
