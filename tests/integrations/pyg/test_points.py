"""Near pairs off a grid: units, distances, offsets in values, features of edges, pairs given twice."""

import copy

import pytest
import torch
from oracles import performer_double_sum
from space import motion
from states import take_weights

REACH = 1.7
pytestmark = pytest.mark.filterwarnings("ignore:offset='distance' leaves out")  # where units are wrong on purpose


@pytest.fixture
def cloud():
    """Points in space, joined where nearer than the layers' distance and a little beyond."""

    def make(n=13, dim=3, scale=1.0, reach=REACH):
        pos = torch.randn(n, dim, dtype=torch.float64)
        near = (torch.cdist(pos, pos) < 1.2 * reach) & ~torch.eye(n, dtype=torch.bool)
        return {"x": torch.randn(n, 12, dtype=torch.float64), "pos": scale * pos, "edge_index": near.nonzero().T}

    return make


OFFSETS = {
    "mlp": {"offset": "mlp"},
    "distance": {"offset": "distance"},
    "mlp values": {"offset": "mlp", "values": "offset"},
    "distance values": {"offset": "distance", "values": "offset"},
    "distance pairs": {"offset": "distance", "values": "offset", "method": "pairs"},
    "distance far": {"offset": "distance", "values": "far", "method": "pairs"},
}


@pytest.fixture
def make(make_conv):
    return lambda name, **options: make_conv(pos_dim=3, **{"cutoff": REACH, **OFFSETS[name], **options})


@pytest.mark.parametrize("name", OFFSETS)
def test_the_unit_of_positions_is_cutoff(name, make, cloud, equal, error):
    conv, data = make(name), cloud()
    wide = make(name, cutoff=28 * REACH)
    take_weights(wide, conv)
    scaled = {**data, "pos": 28 * data["pos"]}
    expected = conv(**data)
    equal(wide(**scaled), expected)
    assert error(conv(**scaled), expected) > 1e-3
    found, again = (c(d["x"], pos=d["pos"]) for c, d in ((conv, data), (wide, scaled)))  # near pairs from positions
    equal(again, found)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
def test_distances_are_invariant_to_motions(name, reflect, make, cloud, error):
    conv, data, turn = make(name), cloud(), motion(torch.float64, reflect)
    for given in (data, {"x": data["x"], "pos": data["pos"]}):
        moved = {**given, "pos": given["pos"] @ turn.T + 3}
        change = error(conv(**moved), conv(**given))
        assert change < 1e-12 if "distance" in name else change > 1e-3
        if name in ("distance values", "distance pairs", "distance far"):
            vectors, turned = (conv(**g, return_vectors=True)[1] for g in (given, moved))
            assert error(turned, vectors @ turn.T) < 1e-12


@pytest.mark.parametrize("name", ["distance", "distance values", "mlp"])
def test_distances_are_smooth_where_a_pair_comes_near(name, make, error):
    """With derivatives; an MLP of the offset jumps. Means of far offsets change by as little as the step."""
    conv = make(name)
    x = torch.randn(3, 12, dtype=torch.float64)
    places = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0, 0]], dtype=torch.float64)
    along = torch.tensor([0.0, 0, 1], dtype=torch.float64)

    def at(distance):
        pos = places.clone()
        pos[2] = distance * along
        pos.requires_grad_()
        out = conv(x, pos=pos)
        return out.detach(), torch.autograd.grad(out.square().sum(), pos)[0]

    step, limit = (1e-7, 1e-5) if "values" in name else (1e-3, 1e-9)
    outs = [at(REACH + move) for move in (-step, step)]
    jump = max(float((a - b).abs().max()) for a, b in zip(*outs, strict=True))
    assert jump < limit if "distance" in name else jump > 1e-3


@pytest.mark.parametrize("name", OFFSETS)
def test_equals_the_sum_over_all_pairs(name, make, cloud, equal):
    conv, data = make(name, edge_dim=4), cloud()
    loops = torch.tensor([[2, 5, 5], [2, 5, 5]])  # whose features count, and add up
    data["edge_index"] = torch.cat([data["edge_index"], loops], 1)
    features = torch.randn(data["edge_index"].shape[1], 4, dtype=torch.float64)
    source, target = data["edge_index"]
    offsets = data["pos"][source] - data["pos"][target]
    x, pos = data["x"], data["pos"].requires_grad_()
    out = conv(**data, edge_attr=features)
    expected = performer_double_sum(
        conv.attention, x, data["edge_index"], offsets.detach(), torch.zeros(len(x)), features, pos.detach()
    )
    equal(out, expected)
    direction, weights = torch.randn_like(out), list(conv.parameters())
    for a, b in zip(*(torch.autograd.grad((y * direction).sum(), weights) for y in (out, expected)), strict=True):
        equal(a, b, 1e-10)
    assert torch.autograd.grad((conv(**data, edge_attr=features) * direction).sum(), pos)[0].abs().max() > 1e-3


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
