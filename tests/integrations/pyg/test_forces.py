"""Forces and virials are derivatives of the energy, of open and of periodic graphs, wherever offsets come from."""

import pytest
import torch
from tg_equiattn.integrations.pyg import PeriodicRadiusGraph, RelativeGPSBlock
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv

NODES, SIDE, STEP = 13, 4.0, 1e-5
NEAR = {"pos_dim": 3, "cutoff": 2.0, "method": "pairs"}
ATTENTION = {
    "distance": {"offset": "distance", **NEAR},
    "mlp": {"offset": "mlp", **NEAR},
}
CELL = SIDE * torch.eye(3, dtype=torch.float64) + 0.3 * torch.tensor([[0, 1, -1], [1, 0, 2], [0.5, -1, 0]]).double()
transform = PeriodicRadiusGraph(2.0)


@pytest.fixture
def block(request, randomise):
    conv = GATv2Conv(8, 8, edge_dim=1, add_self_loops=False)
    made = RelativeGPSBlock(8, conv, 2, norm=None, attn_kwargs=ATTENTION[request.param])
    return randomise(made, 0.4).double().eval()


def graph(pos, cell):
    if cell is not None:
        pytest.importorskip("vesin")
    return transform(Data(pos=pos, cell=cell) if cell is not None else Data(pos=pos))


def is_the_slope(energy, *at, other=None):
    """Derivatives by autograd along random directions are differences of the energy, or of another function that should
    have the same values; and they are not zero."""
    other = other or energy
    along = [torch.randn_like(x) for x in at]
    free = [x.clone().requires_grad_() for x in at]
    slopes = torch.autograd.grad(energy(*free), free)
    with torch.no_grad():
        for n, (slope, way) in enumerate(zip(slopes, along, strict=True)):
            ends = [other(*(x + sign * STEP * way if m == n else x for m, x in enumerate(at))) for sign in (1, -1)]
            difference = (ends[0] - ends[1]) / (2 * STEP)
            torch.testing.assert_close((slope * way).sum(), difference, rtol=1e-6, atol=1e-6)
            assert abs(difference) > 1e-3


def moved(pos, strain, cell):
    one = torch.eye(3).double() + strain
    return pos @ one, cell if cell is None else cell @ one


@pytest.mark.parametrize("cell", [None, CELL], ids=["open", "periodic"])
@pytest.mark.parametrize("block", ATTENTION, indirect=True)
def test_through_the_transform(block, cell):
    x = torch.randn(NODES, 8).double()

    def energy(pos, strain):
        data = graph(*moved(pos, strain, cell))
        given = {"edge_offset": data.edge_offset, "edge_attr": data.edge_attr, "pos": data.pos}
        return block(x, data.edge_index, **given, **({} if cell is None else {"cell": data.cell})).sin().sum()

    is_the_slope(energy, SIDE * torch.rand(NODES, 3).double(), torch.zeros(3, 3).double())


@pytest.mark.parametrize("cell", [None, CELL], ids=["open", "periodic"])
@pytest.mark.parametrize("offset", ["distance", "mlp"])
def test_of_offsets_that_are_constant(offset, cell, make_conv):
    """Made before, as in a data set, they say which images are near; positions and cell are differentiated."""
    conv, x = make_conv(offset=offset, **NEAR), torch.randn(NODES, 12).double()
    pos = SIDE * torch.rand(NODES, 3).double()
    data = graph(pos, cell)

    def energy(pos, strain):
        at, box = moved(pos, strain, cell)
        made = (data.pos[data.edge_index[0]] - data.pos[data.edge_index[1]]).detach()
        near = at[data.edge_index[0]] - at[data.edge_index[1]]
        offsets = data.edge_offset + (near - made).detach() + _shift(data, box)
        more = {} if box is None else {"cell": box}
        return conv(x, data.edge_index, pos=at, edge_offset=offsets, **more).sin().sum()

    is_the_slope(energy, pos, torch.zeros(3, 3).double())


def _shift(data, box):
    """The change of lattice vectors by which images are shifted, from those of the data, as a constant."""
    if box is None:
        return 0.0
    source, target = data.edge_index
    steps = (data.edge_offset - data.pos[source] + data.pos[target]) @ torch.linalg.inv(data.cell[0])
    return (steps.round() @ (box - data.cell[0])).detach()


@pytest.mark.parametrize("cell", [None, CELL], ids=["open", "periodic"])
@pytest.mark.parametrize("values", ["content", "offset"])
def test_of_near_pairs_that_are_shared(values, cell, make_conv):
    """Sorted once from positions without gradients. With values="offset" graphs are open."""
    if cell is not None and values == "offset":
        pytest.skip("refused")
    conv, x = make_conv(offset="distance", values=values, **NEAR), torch.randn(NODES, 12).double()
    pos = SIDE * torch.rand(NODES, 3).double()
    more = {} if cell is None else {"cell": cell}

    def near(pos):
        data = graph(pos, cell)
        return conv.neighbors(data.edge_index, pos=pos, edge_offset=data.edge_offset, num_nodes=NODES, **more)

    shared = near(pos)
    batch = torch.zeros(NODES).long()
    is_the_slope(
        lambda at: conv(x, batch=batch, pos=at, neighbors=shared).sin().sum(), pos,
        other=lambda at: conv(x, batch=batch, pos=at, neighbors=near(at)).sin().sum(),
    )  # fmt: skip
