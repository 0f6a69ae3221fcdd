"""Attention over all pairs of small graphs: what random features estimate."""

import copy

import pytest
import torch


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
