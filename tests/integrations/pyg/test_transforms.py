"""PyG's transforms between PixelGraph and a layer: offsets that they have made wrong are refused, and never used."""

import copy

import pytest
import torch
import torch_geometric.transforms as T
from tg_equiattn.integrations.pyg import PixelGraph
from torch_geometric.data import Batch, Data

SHAPE, CHANNELS = (6, 7), 3
TRANSFORMS = {
    "none": lambda: T.Compose([]),
    "Cartesian": lambda: T.Cartesian(norm=False),
    "Center": T.Center,
    "RandomScale": lambda: T.RandomScale((2.0, 2.0)),
    "RandomRotate": lambda: T.RandomRotate((30, 30)),
    "LinearTransformation": lambda: T.LinearTransformation(torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
    "ToUndirected": T.ToUndirected,
    "AddSelfLoops": T.AddSelfLoops,
    "RemoveDuplicatedEdges": T.RemoveDuplicatedEdges,
    "RemoveIsolatedNodes": T.RemoveIsolatedNodes,
    "ToSparseTensor": lambda: T.ToSparseTensor(layout=torch.sparse_csr, remove_edge_index=False),
    "TwoHop": T.TwoHop,
    "VirtualNode": T.VirtualNode,
    "HalfHop": T.HalfHop,
    "Pad": lambda: T.Pad(45, 600),
    "GDC": lambda: T.GDC(sparsification_kwargs={"method": "topk", "k": 5, "dim": 0}),
    "FaceToEdge": lambda: T.Compose([T.Delaunay(), T.FaceToEdge()]),
}
WRONG = {  # they change positions, or edges without their offsets, of a periodic graph
    "RandomScale", "RandomRotate", "LinearTransformation", "ToUndirected", "GDC", "TwoHop", "AddSelfLoops",
    "RemoveDuplicatedEdges", "VirtualNode", "FaceToEdge",
}  # fmt: skip
WITHOUT_POS = {"HalfHop"}  # its new nodes have no positions


def shortest(data):
    """Differences of positions across the border of the torus where that is nearer."""
    period, apart = torch.tensor(SHAPE[::-1]), data.pos[data.edge_index[0]] - data.pos[data.edge_index[1]]
    return apart - period * (apart / period).round()


@pytest.mark.filterwarnings("ignore")  # PyG's own
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_wrong_offsets_are_refused(name, periodic, make_conv):
    """All that a graph has is given to the layer: outputs are those of positions, or there is an error."""
    conv = make_conv(in_channels=CHANNELS, offset="mlp", cutoff=3.0, method="pairs").float()
    data = PixelGraph(cutoff=3, periodic=periodic)(Data(image=torch.rand(CHANNELS, *SHAPE)))
    try:
        data = TRANSFORMS[name]()(copy.copy(data))
    except ImportError as error:
        pytest.skip(str(error))
    x, batch = data.x[:, :CHANNELS], torch.zeros(len(data.x), dtype=torch.long)
    given = {key: data[key] for key in ("pos", "edge_offset", "cell") if key in data}
    if (periodic and name in WRONG) or name in WITHOUT_POS:
        with pytest.raises(ValueError, match="(edge_offset|pos) must" if periodic else "pos must"):
            conv(x, data.edge_index, batch, **given)
        return
    wanted = {"edge_offset": shortest(data)} if periodic else {"pos": data.pos}
    out = conv(x, data.edge_index, batch, **given)
    torch.testing.assert_close(out, conv(x, data.edge_index, batch, **wanted), rtol=1e-4, atol=1e-4)


def test_offsets_may_differ_by_periods_alone(make_conv):
    """In batches, each graph by its own ones; without the cell not at all."""
    conv = make_conv(in_channels=CHANNELS, offset="mlp", cutoff=3.0, method="pairs").float()
    images = [torch.rand(CHANNELS, 6, 7), torch.rand(CHANNELS, 5, 9)]
    transform = PixelGraph(cutoff=3, periodic=True)
    data = Batch.from_data_list([transform(Data(image=image)) for image in images])
    graph = data.x, data.edge_index, data.batch
    wanted = conv(*graph, edge_offset=data.edge_offset)
    given = {"pos": data.pos, "edge_offset": data.edge_offset}
    for cell in (data.cell, data.cell.flatten(0, 1)):
        torch.testing.assert_close(conv(*graph, **given, cell=cell), wanted)
    moved = {
        **given,
        "pos": data.pos + 6 * torch.randint(9, data.pos.shape) * data.cell.diagonal(dim1=1, dim2=2)[data.batch],
    }
    torch.testing.assert_close(conv(*graph, **moved, cell=data.cell), wanted)
    for other in (
        {},
        {"cell": data.cell.flip(0)},
        {"cell": data.cell[0]},
        {"cell": data.cell[:, :1, :1] * torch.eye(2)},
    ):
        with pytest.raises(
            ValueError, match=r"edge_offset must be differences of pos, up to .*; got .* where pos differ by"
        ):
            conv(*graph, **given, **other)


def test_offsets_and_positions_agree(make_conv, point_graphs):
    """Without a period they are equal, up to rounding; layers that do not read offsets take any."""
    data = point_graphs((13, 2, 17))
    graph = data.x, data.edge_index, data.batch
    for position in ("window", "clipped"):
        conv = make_conv(position)
        wanted = conv(*graph, pos=data.pos)
        near = data.edge_offset + 1e-7 * torch.randn_like(data.edge_offset)
        torch.testing.assert_close(conv(*graph, pos=data.pos + 1e4, edge_offset=near), wanted)
        for wrong in (-data.edge_offset, data.edge_offset.flip(1)):
            with pytest.raises(ValueError, match="edge_offset must be differences of pos, up to whole periods"):
                conv(*graph, pos=data.pos, edge_offset=wrong)
