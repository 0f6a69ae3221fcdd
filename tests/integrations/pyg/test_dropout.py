"""Dropout of weights: near ones one by one, far ones by whole keys."""

import pytest
import torch

KINDS = {
    "features": {"offset": "mlp"},
    "pairs": {"offset": "mlp", "method": "pairs"},
    "None": {"position": None},
    "None pairs": {"position": None, "method": "pairs"},
    "far": {"offset": "mlp", "values": "offset"},
    "far pairs": {"offset": "distance", "values": "offset", "method": "pairs"},
    "far None": {"position": None, "values": "offset"},
}


@pytest.fixture(params=list(KINDS))
def layer(request, make_conv, point_graphs):
    data = point_graphs((7, 1, 5))
    conv = make_conv(dropout=0.3, **KINDS[request.param]).train()
    return conv, {"x": data.x, "edge_index": data.edge_index, "batch": data.batch, "pos": data.pos}


def seeded(conv, given):
    torch.manual_seed(5)
    return conv(**given)


def test_moved_graphs_drop_the_same(layer, error):
    """Outputs in training are exact under translations of each graph, draw by draw."""
    conv, given = layer
    moves = 1e3 * torch.rand(3, 2, dtype=torch.float64)[given["batch"]]
    out = seeded(conv, given)
    assert error(seeded(conv, {**given, "pos": given["pos"] + moves}), out) < 1e-12
    assert error(conv(**given), out) > 1e-3
    assert error(conv.eval()(**given), out) > 1e-3


def copies(given, count):
    """So many times the same graphs in one batch, each of which drops its own."""
    nodes, step = len(given["x"]), torch.arange(count).repeat_interleave(len(given["x"]))
    edges = given["edge_index"].repeat(1, count)
    edges = edges + nodes * torch.arange(count).repeat_interleave(given["edge_index"].shape[1])
    x, pos, batch = given["x"].repeat(count, 1), given["pos"].repeat(count, 1), given["batch"].repeat(count)
    return {"x": x, "pos": pos, "edge_index": edges, "batch": batch + 3 * step}


def test_the_mean_of_draws_is_the_output_without(layer):
    """Within five standard errors, everywhere. Of what is linear in weights: inner products are not."""
    conv, given = layer
    if conv.attention.far_offsets is not None and conv.attention.offset == "distance":
        conv.attention.far_offsets.reset_parameters()  # zero
    with torch.no_grad():
        expected = conv.eval()(**given)
        draws = conv.train()(**copies(given, 900)).unflatten(0, (900, -1))
    limit = 5 * draws.std(0) / 30 + 1e-12
    assert bool(((draws.mean(0) - expected).abs() < limit).all())
    assert float(draws.std(0).amax()) > 1e-2
