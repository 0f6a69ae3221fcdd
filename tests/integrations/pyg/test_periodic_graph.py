"""Edges across borders: by hand, against all images, and for layers that take them."""

import itertools

import pytest
import torch
from tg_equiattn.integrations.pyg import PeriodicRadiusGraph, RelativeGPSBlock, RelativePerformerConv
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv

from tg_equiattn.graphs import NeighborList

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


def test_open_and_periodic_graphs_in_a_batch():
    """Cells of open directions are zero, and no attribute is of some graphs only. Each graph is as alone."""
    pytest.importorskip("vesin")
    slab = torch.tensor([True, True, False])
    kinds = [{}, {"cell": 4 * torch.eye(3)}, {"cell": 5 * torch.eye(3), "pbc": slab}, {"pbc": torch.zeros(3).bool()}]
    graphs = [PeriodicRadiusGraph(2.0)(Data(x=torch.randn(9, 8), pos=4 * torch.rand(9, 3), **kind)) for kind in kinds]
    data = Batch.from_data_list(graphs)
    assert data.cell.tolist() == [(a * torch.eye(3)).tolist() for a in (0, 4)] + [
        torch.diag(torch.tensor([5.0, 5, 0])).tolist(), torch.zeros(3, 3).tolist()
    ]  # fmt: skip
    assert data.pbc.tolist() == [[False] * 3, [True] * 3, slab.tolist(), [False] * 3]
    conv = GATv2Conv(8, 8, edge_dim=1, add_self_loops=False)
    block = RelativeGPSBlock(8, conv, norm=None, attn="ewald", attn_kwargs={"width": 1.0, "max_width": 2.0})
    performer = RelativePerformerConv(8, 8, pos_dim=3, offset="mlp", cutoff=2.0, method="pairs")

    def outputs(data):
        graph = {"x": data.x, "edge_index": data.edge_index, "batch": data.get("batch"), "pos": data.pos}
        by_content = performer(**graph, edge_offset=data.edge_offset, cell=data.cell)
        by_cell = block(**graph, edge_attr=data.edge_attr, cell=data.cell)
        torch.testing.assert_close(block(**graph, edge_attr=data.edge_attr, cell=data.cell, pbc=data.pbc), by_cell)
        return torch.cat([by_content, by_cell], 1)

    alone = torch.cat([outputs(graph.update({"batch": torch.zeros(9).long()})) for graph in graphs])
    torch.testing.assert_close(outputs(data), alone, atol=1e-4, rtol=1e-4)


def test_subgraphs_keep_their_cell():
    """PyG cuts what has as many rows as there are nodes."""
    pytest.importorskip("vesin")
    pos, cell = 4 * torch.rand(3, 3), 4 * torch.eye(3)
    data = PeriodicRadiusGraph(3.0)(Data(pos=pos, cell=cell, pbc=torch.ones(3).bool()))
    part = data.subgraph(torch.tensor([0, 2]))
    assert part.pos.shape == (2, 3)
    assert torch.equal(part.cell, cell[None])
    assert part.pbc.shape == (1, 3)


@pytest.mark.parametrize("position", ["window", None, "sinusoid"])
def test_positions_of_all_nodes_are_not_those_of_a_periodic_graph(position):
    """Their differences are no offsets across borders: refused, and taken where no edge crosses a border."""
    pytest.importorskip("vesin")
    settings = {} if position == "sinusoid" else {"offset": "distance", "cutoff": 2.0, "values": "far"}
    conv = RelativePerformerConv(8, 8, position=position, pos_dim=3, method="pairs", **settings)
    x, pos, batch = torch.randn(20, 8), 1 + 2 * torch.rand(20, 3), torch.zeros(20).long()
    pos[:2] = torch.tensor([[0.1, 2.0, 2.0], [3.9, 2.0, 2.0]])  # near across the border of the smaller cell
    for crossing, side in ((False, 9.0), (True, 4.0)):
        data = PeriodicRadiusGraph(0.9)(Data(pos=pos, cell=side * torch.eye(3)))
        graph = {"edge_index": data.edge_index, "batch": batch, "pos": pos, "edge_offset": data.edge_offset}
        graph["cell"] = data.cell
        shared = {"neighbors": NeighborList(data.edge_index, 20, data.edge_offset), "batch": batch, "pos": pos}
        calls = [graph] if position == "sinusoid" else [graph, shared]  # which reads no near pairs
        for call in calls:
            if crossing:
                with pytest.raises(ValueError, match=r"edge_offset must be differences of pos with values='offset' or"):
                    conv(x, **call)
            else:
                assert conv(x, **call).isfinite().all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(), r"data\.pos must be a tensor of floating point numbers and shape \(N, 2\) or \(N, 3\), got NoneType"),
        (Data(pos=torch.rand(3, 1)), r"got \(3, 1\)"),
        (Data(pos=torch.rand(3, 3), cell=torch.eye(2)), r"cell must be floating point of shape \(3, 3\)"),
        (Data(pos=torch.rand(3, 2), cell=torch.eye(3)), r"cell must be \(2, 2\), .* where pos has 2 dimensions"),
        (Data(pos=torch.rand(3, 3), pbc=torch.ones(3).bool()), "cell must be given with pbc"),
    ],
)
def test_bad_graphs(data, message):
    with pytest.raises(ValueError, match=message):
        PeriodicRadiusGraph(1.5)(data)


def test_repr():
    assert repr(PeriodicRadiusGraph(1.5)) == "PeriodicRadiusGraph(cutoff=1.5)"
