"""Near pairs off a grid: smooth where a pair comes near, and pairs given twice."""

import copy

import pytest
import torch

REACH = 1.7
pytestmark = pytest.mark.filterwarnings("ignore:offset='distance' leaves out")  # where units are wrong on purpose


@pytest.mark.parametrize(("offset", "values"), [("distance", "content"), ("distance", "offset"), ("mlp", "content")])
def test_distances_are_smooth_where_a_pair_comes_near(offset, values, make_conv):
    """With derivatives; an MLP of the offset jumps. Means of far offsets change by as little as the step."""
    conv = make_conv(pos_dim=3, cutoff=REACH, offset=offset, values=values)
    x = torch.randn(3, 12, dtype=torch.float64)
    places = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0, 0]], dtype=torch.float64)
    along = torch.tensor([0.0, 0, 1], dtype=torch.float64)

    def at(distance):
        pos = places.clone()
        pos[2] = distance * along
        pos.requires_grad_()
        out = conv(x, pos=pos)
        return out.detach(), torch.autograd.grad(out.square().sum(), pos)[0]

    step, limit = (1e-7, 1e-5) if values == "offset" else (1e-3, 1e-9)
    outs = [at(REACH + move) for move in (-step, step)]
    jump = max(float((a - b).abs().max()) for a, b in zip(*outs, strict=True))
    assert jump < limit if offset == "distance" else jump > 1e-3


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
