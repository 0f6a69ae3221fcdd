"""Graphs and layers for the PyG tests. Sizes are distinct primes, but for 12 channels."""

import pytest
import space
import torch
from performers import EVERY
from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch_geometric.data import Batch, Data

CHANNELS, OUT, HEADS, FEATURES, REACH = 12, 35, 5, 19, 3
RANDOM_PAIRS = 0.3


def _graph(edges, pos):
    x, offset = torch.randn(len(pos), CHANNELS, dtype=torch.float64), pos[edges[0]] - pos[edges[1]]
    return Data(x=x, edge_index=edges, edge_offset=offset, pos=pos, num_nodes=len(pos))


@pytest.fixture
def make_conv(randomise):
    """A float64 layer with random parameters, in eval mode; by features unless told otherwise."""

    def make(position="window", in_channels=CHANNELS, out_channels=OUT, heads=HEADS, **options):
        options = {"num_random_features": FEATURES, "cutoff": REACH, "method": "features", **options}
        conv = RelativePerformerConv(in_channels, out_channels, heads, position=position, **options)
        return randomise(conv, 0.4).double().eval()

    return make


@pytest.fixture(params=list(EVERY))
def any_conv(request, make_conv):
    return make_conv(**EVERY[request.param])


@pytest.fixture
def arbitrary_graphs():
    """Graphs of any edges, self-loops too, whose nodes share few places, so that offsets repeat and vanish."""

    def make(sizes):
        graphs = []
        for n in sizes:
            edges = (torch.rand(n, n) < RANDOM_PAIRS).nonzero().T
            edges = edges[:, torch.randperm(edges.shape[1])]
            graphs.append(_graph(edges, torch.randint(REACH, (n, 2)).double()))
        return Batch.from_data_list(graphs)

    return make


@pytest.fixture
def point_graphs():
    """A batch of graphs whose nodes have different whole positions, joined where nearer than the layers' distance."""

    def make(sizes):
        graphs = []
        for n in sizes:
            side = int((2 * n) ** 0.5) + 1
            place = torch.randperm(side * side)[:n]
            pos = torch.stack([place // side, place % side], 1).double()
            apart = (pos[:, None] - pos).abs().sum(-1)
            edges = ((apart > 0) & (apart < REACH)).nonzero().T.flip(0)
            graphs.append(_graph(edges, pos))
        return Batch.from_data_list(graphs)

    return make


@pytest.fixture
def equal():
    def check(actual, expected, tolerance=1e-12):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture
def error():
    return space.error
