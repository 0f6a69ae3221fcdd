"""Offsets of all nodes in values, by definition; pairs and random features by the size of each graph; dropout."""

import pytest
import torch
from oracles import performer_double_sum
from space import batch_of, motion
from states import take_weights

from tg_equiattn.nn import PerformerAttention
from tg_equiattn.pairs import Pairs, near_pairs

SIZES, CHANNELS, OUT, HEADS, DIM = (13, 1, 29), 6, 8, 4, 3
KINDS = {
    "mlp": {"offset": "mlp"},
    "distance": {"offset": "distance"},
    "edge features": {"offset": "mlp", "edge_dim": 2},
    "no near pairs": {"offset": None},
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
    edges, _ = near_pairs(pos, 1.3, batch=batch)
    source, target = edges
    features = torch.randn(len(target), 2).double()

    def call(layer, x, pos, parameters=None, **more):
        more |= {"pos": pos, "batch": batch, "batch_size": len(SIZES)}
        if layer.needs_neighbors:
            offsets = pos[source] - pos[target]
            more["neighbors"] = Pairs(edges, len(pos), offsets, features=features)
        return torch.func.functional_call(layer, parameters or {}, (x,), more)

    return torch.randn(len(pos), CHANNELS).double(), pos, batch, call


@pytest.mark.parametrize("kind", ["mlp", "distance", "no near pairs"])
def test_by_definition(kind, make, cloud):
    layer, (x, pos, batch, call) = make(kind), cloud
    edges, _ = near_pairs(pos, 1.3, batch=batch)
    found = call(layer, x, pos, return_vectors=True)
    offsets = pos[edges[0]] - pos[edges[1]]
    expected = performer_double_sum(layer, x, edges, offsets, batch, pos=pos, vectors=True)
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
        if kind == "distance":
            torch.testing.assert_close([turned, along], [out, vectors @ matrix.T], rtol=0, atol=1e-12)
        else:
            assert (turned - out).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_each_graph_by_its_own_size(kind, form, make):
    """With "auto", small graphs by pairs and large ones by features, as each alone: 22 nodes and 23 are told apart."""
    layers = {method: make(kind, edge_dim=None, method=method) for method in ("auto", "pairs", "features")}
    for layer in layers.values():
        take_weights(layer, layers["auto"])
    sizes = (30, 5, 23, 22, 1)
    batch = batch_of(sizes)
    x, pos = torch.randn(len(batch), CHANNELS).double(), 2 * torch.randn(len(batch), DIM).double()
    parts = []
    for graph, size in enumerate(sizes):
        layer = layers["pairs" if size <= 22 else "features"]
        parts.append(layer(x[batch == graph], pos=pos[batch == graph], return_vectors=True))
        other = layers["features" if size <= 22 else "pairs"](x[batch == graph], pos=pos[batch == graph])
        assert size == 1 or (other - parts[-1][0]).abs().max() > 1e-3  # they are different functions
    if form == "ragged":
        found = layers["auto"](x, pos=pos, batch=batch, return_vectors=True)
    else:
        mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        spread = [torch.full((*mask.shape, t.shape[1]), torch.nan).double().index_put((mask,), t) for t in (x, pos)]
        found = [t[mask] for t in layers["auto"](spread[0], pos=spread[1], mask=mask, return_vectors=True)]
    torch.testing.assert_close(list(found), [torch.cat(p) for p in zip(*parts, strict=True)], rtol=0, atol=1e-12)


def test_another_way_than_in_training_is_said_once(make):
    layer = make("no near pairs", method="auto").train()
    call = lambda nodes: layer(torch.ones(nodes, CHANNELS).double(), pos=torch.ones(nodes, DIM).double())  # noqa: E731
    call(20)
    layer.eval()
    call(20)
    with pytest.warns(UserWarning, match="method='auto' takes random features for graphs of this size"):
        call(30)
    call(30)  # warnings are errors in these tests


def test_sizes_that_cannot_be_read_are_refused(make):
    layer = make("no near pairs", method="auto")
    x, pos, batch = torch.randn(40, CHANNELS).double(), torch.randn(40, DIM).double(), torch.arange(40) // 20
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    out = compiled(x, pos=pos, batch=batch, batch_size=2, max_num_nodes=20)
    torch.testing.assert_close(out, layer(x, pos=pos, batch=batch), rtol=0, atol=1e-12)
    with pytest.raises(Exception, match="method must be 'features' or 'pairs', or max_num_nodes at most 22"):
        compiled(x, pos=pos, batch=batch, batch_size=2, max_num_nodes=30)


def test_periodic_offsets_are_refused(make):
    layer, pos = make("mlp"), torch.rand(12, DIM).double()
    edges, offsets = near_pairs(pos, 0.5)
    x = torch.randn(12, CHANNELS).double()
    expected = layer(x, pos=pos, neighbors=Pairs(edges, 12, offsets))
    torch.testing.assert_close(layer(x, pos=pos + 7, neighbors=Pairs(edges, 12, offsets)), expected)
    offsets[3, 1] += 1
    with pytest.raises(ValueError, match="edge_offset must be differences of pos with values='offset'"):
        layer(x, pos=pos, neighbors=Pairs(edges, 12, offsets))
