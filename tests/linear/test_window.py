"""Near pairs beside random features, in layers, against the naive double sum."""

import pytest
import torch
from clouds import equal
from oracles import performer_double_sum
from performers import NEAR
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
        options = {"num_random_features": 11, "method": "features", "cutoff": 3, **options}
        layer = randomise(PerformerAttention(CHANNELS, OUT, HEADS, **options), 0.4).double().eval()
        if layer.position == "window":
            torch.nn.init.constant_(layer.positions.far_bias, far)
        return layer

    return build


def features(count):
    return torch.randn(count, CHANNELS, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("far", [FAR, 0.0, -1e3])
@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("grid", [GRID, TORUS], ids=["grid", "torus"])
def test_equals_the_double_sum(on_device, grid, copies, far, make):
    """With weights of the far, one by default, and none."""
    layer, near, x = make(far), grid.neighbors(copies, on_device), features(copies * len(grid))
    batch, edges = torch.arange(copies).repeat_interleave(len(grid)), torch.stack([near.source, near.target])
    expected = performer_double_sum(layer, x, edges, near.offsets, batch)
    inputs = (x, *layer.parameters())
    equal(layer(x, batch=batch, neighbors=near), expected, inputs, 1e-9, 1e-10)


@pytest.mark.filterwarnings("ignore:offset='distance' leaves out")  # of pairs of any length
@pytest.mark.parametrize("kind", NEAR)
def test_graphs_of_other_sizes(on_device, kind, make):
    """Any pairs, some of them given twice, some of a node with itself, which count once. Nodes share places."""
    layer, x, batch = make(FAR, **NEAR[kind]), features(19), batch_of([9, 1, 0, 7, 2])
    pos = (torch.randint(3, (19, 2)) + (0 if layer.needs.whole else torch.rand(19, 2))).double()
    target, source = ((batch[:, None] == batch) & (torch.rand(19, 19) < 0.3)).nonzero().T
    assert bool((target == source).any())
    twice = slice(9 if layer.position == "window" else 0)
    edges = torch.stack([torch.cat([source, source[twice]]), torch.cat([target, target[twice]])])
    offsets = pos[edges[0]] - pos[edges[1]]
    out = layer(x, pos=pos, batch=batch, batch_size=5, neighbors=NeighborList(edges, 19, offsets))
    expected = performer_double_sum(layer, x, edges, offsets, batch, pos=pos)
    equal(out, expected, (x, *layer.parameters()), 1e-9, 1e-10)


def test_offsets_beyond_the_table_have_no_weight_where_values_are_not_read():
    """Compiled, as on CUDA; elsewhere they are refused."""
    layer = PerformerAttention(5, 6, heads=3, cutoff=3, method="features").eval()
    edges, offsets = torch.tensor([[1, 2, 3], [0, 0, 1]]), torch.tensor([[0.0, 1.0], [3.0, 0.0], [torch.nan, 0.0]])

    @torch.compile(fullgraph=True, backend="eager")
    def attend(x, edges, offsets):
        return layer(x, neighbors=NeighborList(edges, 4, offsets))

    x = torch.randn(4, 5)
    expected = layer(x, neighbors=NeighborList(edges[:, :1], 4, offsets[:1]))
    torch.testing.assert_close(attend(x, edges, offsets), expected)
