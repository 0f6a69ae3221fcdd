"""Near pairs beside random features, in layers, against the naive double sum."""

import pytest
import torch
from clouds import equal
from oracles import performer_double_sum
from space import batch_of

from tg_equiattn.graphs import NeighborList
from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention

CHANNELS, OUT, HEADS, FAR = 4, 21, 3, 0.3
GRID = PixelGrid((5, 7), 3)
TORUS = PixelGrid((5, 7), 3, periodic=True)


@pytest.fixture
def make(randomise):
    def build(far, **options):
        layer = PerformerAttention(CHANNELS, OUT, HEADS, num_random_features=11, method="features", **options)
        randomise(layer, 0.4).double().eval()
        torch.nn.init.constant_(layer.positions.far_bias, far)
        return layer

    return build


def features(count):
    return torch.randn(count, CHANNELS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("far", [FAR, 0.0, -1e3])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("grid", [GRID, TORUS], ids=["grid", "torus"])
def test_equals_the_double_sum(on_device, grid, copies, far, make):
    """With weights of the far, one by default, and none."""
    layer, near, x = make(far, cutoff=3), grid.neighbors(copies, on_device), features(copies * len(grid))
    batch, edges = torch.arange(copies).repeat_interleave(len(grid)), torch.stack([near.source, near.target])
    expected = performer_double_sum(layer, x, edges, near.offsets, batch)
    inputs = (x, *layer.parameters())
    equal(layer(x, batch=batch, neighbors=near), expected, inputs, 1e-9, 1e-10)


def test_graphs_of_other_sizes(on_device, make):
    """Any pairs, some of them given twice, some of a node with itself, which count once."""
    batch, pos = batch_of([13, 1, 0, 17]), torch.randn(31, 2, dtype=torch.float64)
    target, source = ((batch[:, None] == batch) & (torch.rand(31, 31) < 0.3)).nonzero().T
    assert bool((target == source).any())
    edges = torch.stack([torch.cat([source, source[:9]]), torch.cat([target, target[:9]])])
    layer, x, offsets = make(FAR, offset="mlp", cutoff=2.0), features(31), pos[edges[0]] - pos[edges[1]]
    out = layer(x, batch=batch, batch_size=4, neighbors=NeighborList(edges, 31, offsets))
    equal(out, performer_double_sum(layer, x, edges, offsets, batch), (x, *layer.parameters()), 1e-9, 1e-10)
