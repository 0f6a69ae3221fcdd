"""Edges across borders: by hand, against all images, and for layers that take them."""

import itertools

import pytest
import torch
from tg_equiattn.integrations.pyg import PeriodicRadiusGraph, RelativeGPSBlock, RelativePerformerConv
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv

CELL = torch.tensor([[4.0, 0.3, 0.0], [-0.5, 3.0, 0.2], [0.1, 0.0, 5.0]], dtype=torch.float64)


def pairs(data):
    """Targets, sources and offsets in one order."""
    source, target = data.edge_index.tolist()
    return sorted(zip(target, source, data.edge_offset.mul(1e6).round().long().tolist(), strict=True))


def all_images(pos, cell, cutoff, dims):
    found = []
    for shift in itertools.product(*(range(-3, 4) if dim in dims else (0,) for dim in range(len(cell)))):
        offsets = pos + torch.tensor(shift).to(pos) @ cell - pos[:, None]
        near = offsets.norm(dim=2) < cutoff
        if not any(shift):
            near.fill_diagonal_(False)
        found += [(*ij, (1e6 * offsets[ij]).round().long().tolist()) for ij in map(tuple, near.nonzero().tolist())]
    return sorted(found)


def test_a_graph_that_does_not_repeat():
    pos = torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [3.5, 0, 0]])
    for more in ({}, {"cell": torch.zeros(3, 3)}, {"cell": torch.eye(3), "pbc": torch.zeros(3).bool()}):
        data = PeriodicRadiusGraph(1.5)(Data(pos=pos, **more))
        assert pairs(data) == [(0, 1, [1_000_000, 0, 0]), (1, 0, [-1_000_000, 0, 0])]
        assert data.edge_attr.tolist() == [[1.0], [1.0]]


def test_by_hand():
    """Two nodes near a border, each with an image of the other, and a cell that is shorter than the cutoff."""
    pytest.importorskip("vesin")
    data = PeriodicRadiusGraph(1.5)(Data(pos=torch.tensor([[0.5, 1.0], [9.5, 1.0]]), cell=10 * torch.eye(2)))
    assert pairs(data) == [(0, 1, [-1_000_000, 0]), (1, 0, [1_000_000, 0])]
    alone = PeriodicRadiusGraph(1.5)(Data(pos=torch.zeros(1, 2), cell=torch.eye(2)))
    assert alone.edge_index.unique().tolist() == [0]
    assert sorted(alone.edge_attr[:, 0].tolist()) == pytest.approx([1.0] * 4 + [2**0.5] * 4)


@pytest.mark.parametrize(("dim", "dims"), [(3, (0, 1, 2)), (3, (0, 1)), (3, (1, 2)), (2, (0, 1))])
def test_equals_all_images(dim, dims):
    """In crystals, slabs and planes, with nodes outside the cell."""
    pytest.importorskip("vesin")
    pos = 3 * torch.randn(11, dim, dtype=torch.float64)
    cell = CELL[:dim, :dim]
    pbc = torch.tensor([n in dims for n in range(dim)])
    data = PeriodicRadiusGraph(2.5)(Data(pos=pos, cell=cell, pbc=pbc))
    inside = pos - ((pos @ torch.linalg.inv(cell)).floor() * pbc) @ cell
    wrapped = PeriodicRadiusGraph(2.5)(Data(pos=inside, cell=cell[None], pbc=pbc))
    assert pairs(wrapped) == all_images(inside, cell, 2.5, dims)
    assert pairs(wrapped) == pairs(data)
    torch.testing.assert_close(data.edge_attr[:, 0], data.edge_offset.norm(dim=1))


def test_layers_take_the_edges():
    """A convolution their lengths, attention by content their offsets, Ewald attention the cell."""
    pytest.importorskip("vesin")
    transform, sides = PeriodicRadiusGraph(2.0), (4.0, 5.0)
    data = Batch.from_data_list(
        [transform(Data(x=torch.randn(9, 8), pos=side * torch.rand(9, 3), cell=side * torch.eye(3))) for side in sides]
    )
    assert data.cell.shape == (6, 3)
    conv = GATv2Conv(8, 8, edge_dim=1, add_self_loops=False)
    block = RelativeGPSBlock(8, conv, attn="ewald", attn_kwargs={"width": 1.0, "max_width": 2.0}).eval()
    graph = {"x": data.x, "edge_index": data.edge_index, "batch": data.batch, "edge_attr": data.edge_attr}
    out = block(**graph, pos=data.pos, cell=data.cell)
    steps = torch.tensor(sides)[data.batch][:, None] * torch.randint(-2, 3, (18, 3))
    torch.testing.assert_close(block(**graph, pos=data.pos + steps, cell=data.cell), out, atol=1e-4, rtol=1e-4)
    performer = RelativePerformerConv(8, 8, pos_dim=3, offset="mlp", cutoff=2.0, method="pairs")
    graph.pop("edge_attr")
    assert performer(**graph, pos=data.pos, edge_offset=data.edge_offset, cell=data.cell).isfinite().all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(), r"data\.pos must be a tensor of floating point numbers and shape \(N, 2\) or \(N, 3\), got NoneType"),
        (Data(pos=torch.rand(3, 1)), r"got \(3, 1\)"),
        (Data(pos=torch.rand(3, 3), cell=torch.eye(2)), r"cell must be \(3, 3\)"),
        (Data(pos=torch.rand(3, 2), cell=torch.eye(3)), r"cell must be \(2, 2\), .* where pos has 2 dimensions"),
        (Data(pos=torch.rand(3, 3), pbc=torch.ones(3).bool()), "cell must be given with pbc"),
    ],
)
def test_bad_graphs(data, message):
    with pytest.raises(ValueError, match=message):
        PeriodicRadiusGraph(1.5)(data)


def test_repr():
    assert repr(PeriodicRadiusGraph(1.5)) == "PeriodicRadiusGraph(cutoff=1.5)"
