"""Every bad argument raises a ValueError that names it."""

import functools
import re

import pytest
import torch
from tg_equiattn.integrations.pyg import PixelGraph, RelativeGPSBlock, RelativePerformerConv
from torch_geometric.data import Data

from tg_equiattn.graphs import NeighborList, mean_edge_length
from tg_equiattn.grids import PixelGrid

NODES = 7
EDGES = torch.tensor([[0, 1, 2, 4, 5, 6], [1, 0, 1, 5, 4, 5]])
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])
X = torch.ones(NODES, 12)
POS = torch.tensor([[1.0, 0], [0, 0], [0, 2], [3, 3], [1, 1], [0, 0], [0, 0]]) + 0.25
OFFSET = torch.tensor([[1.0, 0], [-1, 0], [0, 2], [1, 1], [-1, -1], [0, 0]])
GRID, BONDS = PixelGrid((7, 1), 3), {"edge_dim": 5}


def call(position="window", options=None, **arguments):
    """A correct call but for what the arguments replace."""
    options = {"cutoff": 3, "method": "features", **(options or {})}
    conv = RelativePerformerConv(12, 35, 5, position=position, **options)
    on_grid, apart = isinstance(arguments.get("neighbors"), PixelGrid), arguments.get("edge_index", 0) is None
    edges = {} if on_grid or apart else {"edge_offset": OFFSET}
    edges |= {} if on_grid else {"edge_index": EDGES}
    return conv(**{"x": X, "pos": POS, "batch": BATCH, **edges, **arguments})


@pytest.mark.parametrize("position", ["window", "clipped", "sinusoid", None])
def test_the_correct_call(position):
    assert call(position).shape == (NODES, 35)


@pytest.mark.parametrize(
    ("message", "position", "arguments"),
    [
        (r"edge_offset must be real numbers of shape \(6, 2\), .* \(6, 1\)", "window", {"edge_offset": OFFSET[:, :1]}),
        ("edge_offset.* must be below cutoff=3", "window", {"edge_offset": 3 * OFFSET, "pos": None}),
        ("edge_offset.* must be real", "window", {"edge_offset": OFFSET > 0}),
        ("edge_offset.* must be finite", "clipped", {"edge_offset": torch.full((6, 2), torch.inf)}),
        ("edge_attr must be None where edge_index is None", "window", {"edge_index": None, "edge_attr": OFFSET}),
        ("edge_index must be None where neighbors are given", None, {"neighbors": GRID, "edge_index": EDGES}),
        *((f"{name} must be None where neighbors are given", "window",
           {"edge_index": None, "neighbors": NeighborList(EDGES, 7, OFFSET), name: value})
          for name, value in (("edge_index", EDGES), ("edge_attr", OFFSET), ("edge_offset", OFFSET))),
        ("max_num_nodes must be at least 7, the largest graph, got 6", None,
         {"edge_index": None, "batch": None, "max_num_nodes": 6}),
        ("cell must be one for all graphs or one a graph, got 3 cells", "window",
         {"cell": torch.eye(2).expand(3, 2, 2), "batch": None, "edge_index": EDGES[:, :3], "edge_offset": OFFSET[:3]}),
        ("ptr must be None where batch is given", "window", {"ptr": torch.tensor([0, 4, 7])}),
        *(("ptr must", "window", {"batch": None, "ptr": ptr})
          for ptr in (torch.tensor([0, 4, 6]), torch.tensor([0, 5, 4, 7]), torch.tensor([0, 4, 7]).int())),
        (r"x must have shape \(N, 12\), or \(B, N, 12\) for signals on one graph, got \(7,\)", None, {"x": X[:, 0]}),
        ("cell must be None without edge_offset", "window", {"edge_offset": None, "cell": torch.eye(2)}),
        (r"cell must be floating point \(2, 2\) or \(graphs, 2, 2\)", "window", {"cell": torch.eye(3)}),
        ("cell must be one for all graphs or one a graph, got 3 cells", "window",
         {"cell": torch.eye(2).expand(3, 2, 2), "batch": BATCH + 2}),
        ("batch must be a tensor, got list", None, {"batch": [0] * 7}),
        ("batch must be None where grid is given", "window", {"neighbors": GRID}),
        (r"x must be one tensor .* bipartite graphs have two", "window", {"x": (X, X[:5])}),
        (r"x must be one tensor .* got Data: pass its fields", "window", {"x": Data(x=X)}),
        (r"edge_attr must be None without edge_dim, got shape \(6, 2\)", "window", {"edge_attr": OFFSET}),
        ("edge_attr must be given with edge_dim, got None", "window", {"options": BONDS}),
        ("edge_index and edge_attr must be given with edge_dim", "window", {"options": BONDS, "edge_index": None}),
        ("neighbors must be of 7 nodes in 2 dimensions, got 11", "window",
         {"edge_index": None, "neighbors": NeighborList(EDGES, 11, OFFSET)}),
        ("edge_index must not join nodes of different graphs", "window",
         {"options": {"method": "pairs"}, "edge_index": None,
          "neighbors": NeighborList(EDGES[:, :1] + 3, 7, OFFSET[:1])}),
    ],
)  # fmt: skip
def test_bad_calls(message, position, arguments):
    with pytest.raises(ValueError, match=message):
        call(position, **arguments)


conv = functools.partial(RelativePerformerConv, 11, 35, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativePerformerConv((11, 13), 35, 5), r"in_channels must be one number, got \(11, 13\): "),
        (lambda: PixelGraph(3, spacing=(1.0, 1.0, 1.0)).grid(5, 7), "spacing must be one number or 2, one for each"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "start",
    [{}, {"values": "far"}, {"values": "far", "position": None}, {"pos_dim": 3}, {"offset": "distance"},
     {"cutoff": 3.0}, {"offset": "mlp"}, {"pos_dim": 3, "values": "far"}],
)  # fmt: skip
def test_errors_lead_to_a_call_that_runs(start):
    """For positions in space: what an error says to pass is taken as it stands, until no error comes."""
    x, pos = torch.randn(20, 16), 3 * torch.randn(20, 3)
    near = torch.cdist(pos, pos).topk(5, largest=False).indices[:, 1:]
    edge_index, options = torch.stack([near.flatten(), torch.arange(20).repeat_interleave(4)]), dict(start)
    names = {"mean_edge_length": mean_edge_length, "pos": pos, "edge_index": edge_index}
    for _ in range(3):
        try:
            block = RelativeGPSBlock(16, None, 4, attn_kwargs=options)
            out = block(x, edge_index, pos=pos)
            break
        except ValueError as error:
            text = str(error)
            whole = re.search(r"attn_kwargs=(\{.*\})", text)
            single = re.findall(r"(?<!with )(offset)='(distance)'", text.partition("got")[2])
            cutoff = re.search(r"2 \* mean_edge_length\(pos, edge_index\)", text)
            options |= eval(whole[1], names) if whole else dict(single)
            options |= {"cutoff": eval(cutoff[0], names)} if cutoff else {}
    else:
        pytest.fail(f"{text}, after {options}")
    assert out.isfinite().all()


def test_other_forms_of_edges():
    adjacency = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(6), (8, 8))
    with pytest.raises(ValueError, match=r"edge_index must be a 7 x 7 adjacency, got \(8, 8\)"):
        call(edge_index=adjacency)
    assert repr(PixelGraph(3, spacing=2.0)) == "PixelGraph(cutoff=3, periodic=False, spacing=2.0)"


def test_bad_images():
    for data in (Data(), Data(image=[[1.0]]), Data(image=torch.rand(5, 7)), Data(image=torch.rand(3, 0, 7))):
        with pytest.raises(ValueError, match=r"data\.image must be a tensor of shape \(C, H, W\) or \(C, D, H, W\)"):
            PixelGraph(3)(data)
