"""Every bad argument raises a ValueError that names it."""

import pytest
import torch
from performers import positional_conv
from tg_equiattn.integrations.pyg import (
    PixelGraph,
    PixelGraphClassifier,
    RelativeGPSBlock,
    RelativePerformerConv,
)
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from tg_equiattn.grids import PixelGrid

NODES = 7
EDGES = torch.tensor([[0, 1, 2, 4, 5, 6], [1, 0, 1, 5, 4, 5]])
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])
X = torch.ones(NODES, 12)
POS = torch.tensor([[1.0, 0], [0, 0], [0, 2], [3, 3], [1, 1], [0, 0], [0, 0]]) + 0.25
OFFSET = torch.tensor([[1.0, 0], [-1, 0], [0, 2], [1, 1], [-1, -1], [0, 0]])
GRID = PixelGrid((7, 1), 3)


def call(position="window", **arguments):
    """A correct call but for what the arguments replace."""
    if position in ("window", None):
        conv = RelativePerformerConv(12, 35, 5, cutoff=3, offset="table" if position else None)
    else:
        conv = positional_conv(12, 35, 5, cutoff=3, position=position)
    on_grid, apart = isinstance(arguments.get("neighbors"), PixelGrid), arguments.get("edge_index", 0) is None
    edges = {} if on_grid or apart else {"edge_offset": OFFSET}
    edges |= {} if on_grid else {"edge_index": EDGES}
    return conv(**{"x": X, "pos": POS, "batch": BATCH, **edges, **arguments})


@pytest.mark.parametrize("position", ["window", "clipped", "sinusoid", None])
def test_the_correct_call(position):
    assert call(position).shape == (NODES, 35)


def sparse(size, layout="coo"):
    adj = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(6), (size, size))
    return adj.to_sparse_csc() if layout == "csc" else adj


@pytest.mark.parametrize(
    ("message", "position", "arguments"),
    [
        ("pos must be given", "sinusoid", {"pos": None}),
        ("pos must be given", "window", {"pos": None, "edge_index": None}),
        ("pos must be given", "clipped", {"pos": None, "edge_index": None}),
        ("pos or edge_offset must be given", "window", {"pos": None, "edge_offset": None}),
        ("pos or edge_offset must be given", "clipped", {"pos": None, "edge_offset": None}),
        ("pos must have shape", "sinusoid", {"pos": POS[:, :1]}),
        ("pos must have shape", "window", {"pos": POS[:, :1], "edge_offset": None}),
        ("pos must have shape", "window", {"pos": POS[:5], "edge_offset": None}),
        ("pos must have shape", "window", {"pos": torch.ones(NODES, 3), "edge_index": None}),
        ("pos must be real", "sinusoid", {"pos": POS > 0}),
        ("batch must be sorted", "window", {"batch": BATCH.flip(0), "edge_index": None}),
        ("batch must be sorted", "clipped", {"batch": BATCH.flip(0), "edge_index": None}),
        ("batch must be sorted", None, {"batch": BATCH.flip(0), "edge_index": None}),
        ("batch must be int64", None, {"batch": BATCH.float()}),
        ("batch must be int64", None, {"batch": BATCH[:5], "edge_index": None}),
        ("batch must be int64", "window", {"batch": BATCH[:5]}),
        ("batch must be int64", "clipped", {"batch": BATCH.view(7, 1)}),
        ("batch must be in", None, {"batch_size": 1}),
        ("batch must be in", None, {"batch": BATCH - 1}),
        ("batch must be given", None, {"batch": None, "batch_size": 2, "edge_index": EDGES[:, :3]}),
        ("batch must be given for several graphs", "window", {"batch": None, "pos": torch.zeros(NODES, 2)}),
        ("batch_size must be", None, {"batch_size": 0}),
        (r"edge_offset must be real numbers of shape \(6, 2\), .* \(6, 1\)", "window", {"edge_offset": OFFSET[:, :1]}),
        (r"edge_offset must be real numbers of shape \(6, 2\), .* \(6,\)", "clipped", {"edge_offset": OFFSET[:, 0]}),
        ("edge_offset must be real numbers of shape", "window", {"edge_offset": OFFSET[:5]}),
        ("edge_offset must be real numbers of shape", "window", {"edge_offset": torch.ones(6, 3)}),
        ("edge_offset must hold whole numbers", "window", {"edge_offset": OFFSET + 0.5, "pos": None}),
        ("edge_offset must hold whole numbers", "clipped", {"edge_offset": OFFSET + 0.5}),
        ("edge_offset must hold whole numbers", "window", {"edge_offset": OFFSET * torch.nan}),
        ("edge_offset.* must be below cutoff=3", "window", {"edge_offset": 3 * OFFSET, "pos": None}),
        ("edge_offset", "window", {"edge_offset": torch.full((6, 2), torch.inf)}),
        ("edge_offset", "window", {"edge_offset": torch.full((6, 2), -(2**63))}),
        ("edge_offset.* must be real", "window", {"edge_offset": OFFSET > 0}),
        ("edge_offset.* must be real", "clipped", {"edge_offset": OFFSET.to(torch.complex64)}),
        ("edge_offset.* must be finite", "clipped", {"edge_offset": torch.full((6, 2), torch.inf)}),
        ("edge_attr must be None where edge_index is None", "window", {"edge_index": None, "edge_attr": OFFSET}),
        ("edge_offset must be None where edge_index is None", None, {"edge_index": None, "edge_offset": OFFSET}),
        (r"edge_attr must be None without edge_dim, got shape \(6, 2\)", "window", {"edge_attr": OFFSET}),
        (r"edge_attr must be None without edge_dim, got list", None, {"edge_attr": OFFSET.tolist()}),
        ("edge_index must be None where neighbors is a grid", None, {"neighbors": GRID, "edge_index": EDGES}),
        ("pos", "window", {"edge_offset": None, "pos": POS * torch.nan}),
        ("pos", "clipped", {"edge_offset": None, "pos": POS * torch.nan}),
        ("pos.* must be below cutoff=3", "window", {"edge_offset": None, "pos": 21 * POS}),
        ("edge_index must join nodes in", "window", {"edge_index": EDGES + 1}),
        ("edge_index must join nodes in", "clipped", {"edge_index": EDGES - 1}),
        ("edge_index must join nodes in", "window", {"edge_index": EDGES + 5, "batch": None}),
        ("edge_index must join nodes in", "clipped", {"edge_index": EDGES - 1, "batch": None}),
        ("edge_index must not join nodes of different graphs", "window", {"batch": torch.arange(NODES) // 6}),
        ("edge_index must not join nodes of different graphs", "clipped", {"batch": torch.arange(NODES)}),
        ("edge_index must be int64", "window", {"edge_index": EDGES.short()}),
        ("edge_index must be int64", None, {"edge_index": EDGES.float()}),
        (r"edge_index must be int64 \(2, E\)", "window", {"edge_index": EDGES.T}),
        (r"edge_index must be int64 \(2, E\)", "window", {"edge_index": EDGES[0]}),
        ("edge_index must be a tensor, got list", None, {"edge_index": EDGES.tolist()}),
        ("edge_index must be a 7 x 7 adjacency", "window", {"edge_index": sparse(11)}),
        ("edge_index must be a 7 x 7 adjacency", "clipped", {"edge_index": sparse(11, "csc")}),
        ("ptr must be None where batch is given", "window", {"ptr": torch.tensor([0, 4, 7])}),
        *(
            ("ptr must", position, {"batch": None, "ptr": ptr})
            for position in ("window", None)
            for ptr in (
                torch.tensor([0, 4, 6]),
                torch.tensor([1, 4, 7]),
                torch.tensor([0, 5, 4, 7]),
                torch.tensor([0, 4, 7]).int(),
                torch.tensor([[0, 4, 7]]),
                torch.tensor([7]),
            )
        ),
        ("input must be torch.float32", "window", {"x": X.double()}),
        ("input must be a floating point tensor", "window", {"x": X.long()}),
        (r"x must be one tensor of shape \(N, 12\)", None, {"x": X[None]}),
        ("x must be one tensor .* got tuple", None, {"x": (X, X)}),
        ("batch must be a tensor, got list", None, {"batch": [0] * 7}),
        (r"edge_offset must be real numbers of shape \(6, 2\), got list", "window", {"edge_offset": OFFSET.tolist()}),
        ("batch must be None where grid is given", "window", {"neighbors": GRID}),
        ("must not join a pair twice", "clipped", {"edge_index": EDGES[:, [0, 0, 1, 3, 4, 5]], "pos": None}),
        (r"\(N, 12\)", None, {"x": X[:, :11]}),
        ("grid must have", "window", {"neighbors": PixelGrid((2, 3), 3), "batch": None}),
        ("grid must have", None, {"neighbors": PixelGrid((7,), 3), "batch": None}),
    ],
)  # fmt: skip
def test_bad_calls(message, position, arguments):
    with pytest.raises(ValueError, match=message):
        call(position, **arguments)


def test_bad_neighbors():
    conv = RelativePerformerConv(12, 35, 5, cutoff=3)
    near = conv.neighbors(EDGES, torch.zeros(11).long(), edge_offset=OFFSET, num_nodes=11)
    with pytest.raises(ValueError, match="neighbors must be of 7 nodes in 2 dimensions, got 11"):
        call(edge_index=None, neighbors=near)


def test_bad_edge_index_object():
    with pytest.raises(ValueError, match="edge_index must join nodes in"):
        call(edge_index=EdgeIndex(EDGES + 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativePerformerConv(11, 35, 4), "heads must divide out_channels=35, got 4"),
        (lambda: RelativePerformerConv(11, 35, 5, aggr="mean"), "aggr must be 'sum', got 'mean'"),
        (lambda: RelativePerformerConv(11, 35, 5, aggr=None), "aggr must be 'sum', got None"),
        (lambda: RelativePerformerConv(11, 35, 5, aggr=["sum"]), "aggr must be 'sum'"),
        (lambda: RelativePerformerConv(11, 35, 5, flow="both"), "flow"),
        (
            lambda: RelativePerformerConv((11, 13), 35, 5),
            r"in_channels must be one number, got \(11, 13\): .* bipartite",
        ),
        (lambda: RelativePerformerConv(11, 35, 5, node_dim=1), "node_dim must be 0"),
        (lambda: positional_conv(11, 35, 5, position="relative"), "position must be one of"),
        (lambda: RelativePerformerConv(11, 35, 5, offset="linear"), "offset must be one of"),
        (lambda: RelativePerformerConv(11, 35, 5, cutoff=0), "cutoff must be"),
        (lambda: RelativePerformerConv(11, 35, 5, offset="mlp"), "cutoff must be given with offset='mlp'"),
        (lambda: RelativePerformerConv(11, 35, 5, num_random_features=0), "num_features must be"),
        (lambda: RelativePerformerConv(11, 35, 5, pos_dim=0), "pos_dim must be"),
        (lambda: RelativePerformerConv(11, 35, 5, redraw_interval=0), "redraw_interval must be"),
        (lambda: RelativePerformerConv(11, 35, 5, dropout=1.0), "dropout must be"),
        (lambda: RelativePerformerConv(0, 35, 5), "in_channels must be"),
        (lambda: RelativePerformerConv(11, 0, 5), "out_channels must be"),
        (lambda: RelativePerformerConv(11, 35, 0), "heads must be"),
        (lambda: RelativeGPSBlock(35, None, 4), "heads must divide out_channels=35, got 4"),
        (lambda: RelativeGPSBlock(35, None, 5, dropout=-0.1), "dropout must be"),
        (lambda: PixelGraphClassifier(1, 10, embedding="conv"), "embedding must be one of"),
        (lambda: PixelGraphClassifier(1, 10, position="relative"), "position must be one of"),
        (lambda: PixelGraphClassifier(1, 10, channels=30, heads=5, position="absolute"), "multiple of 4 .* got 30"),
        (lambda: PixelGraphClassifier(0, 10), "in_channels must be"),
        (lambda: PixelGraphClassifier(1, 0), "num_classes must be"),
        (lambda: PixelGraphClassifier(1, 10, num_layers=0), "num_layers must be"),
        (lambda: PixelGraph(0), "max_distance must be a positive number, got 0"),
        (lambda: PixelGraph(3, periodic="no"), "periodic must be True or False"),
        (lambda: PixelGraph(3, spacing=0.0), "spacing must be a positive number"),
        (
            lambda: PixelGraph(3, spacing=(1.0, 1.0, 1.0)).grid(5, 7),
            "spacing must be one number or 2, one for each axis",
        ),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["max_distance", "num_features", "position", "scale", "bias", "process_group"])
def test_names_that_a_layer_has_not(name):
    """Whatever their value: they are not passed on in silence."""
    for value in (None, 3, "window"):
        with pytest.raises(TypeError, match=name):
            RelativePerformerConv(11, 35, 5, **{name: value})
        with pytest.raises(TypeError, match=name):
            RelativeGPSBlock(35, None, 5, attn_kwargs={name: value})


@pytest.mark.parametrize("name", ["neighbours", "grid", "edge_weight", "offset"])
def test_names_that_a_call_has_not(name):
    for position in ("window", "clipped"):
        with pytest.raises(TypeError, match=name):
            call(position, **{name: GRID})


@pytest.mark.parametrize(
    "data",
    [
        Data(),
        Data(image=None),
        Data(image=[[1.0]]),
        Data(image=torch.rand(5, 7)),
        Data(image=torch.rand(2, 2, 3, 5, 7)),
        Data(image=torch.rand(3, 0, 7)),
        Data(image=torch.rand(0, 5, 7)),
    ],
)
def test_bad_images(data):
    with pytest.raises(ValueError, match=r"data\.image must be a tensor of shape \(C, H, W\) or \(C, D, H, W\)"):
        PixelGraph(3)(data)


def test_classifier_names_missing_positions():
    graph = PixelGraph(3)(Data(image=torch.rand(1, 5, 7)))
    for position in ("window", "absolute"):
        model = PixelGraphClassifier(1, 10, channels=20, num_layers=2, heads=5, position=position, cutoff=3)
        with pytest.raises(ValueError, match="pos must be given"):
            model(graph.x)
    with pytest.raises(ValueError, match="input must have 1 channels, got 3"):
        model(torch.rand(35, 3), pos=graph.pos)


def test_classifier_checks_before_it_computes():
    model = PixelGraphClassifier(1, 10, channels=20, num_layers=1, heads=5, position="absolute")
    graph = PixelGraph(3)(Data(image=torch.rand(1, 5, 7)))
    for x in (graph.x.double(), (255 * graph.x).to(torch.uint8)):
        with pytest.raises(ValueError, match="input must be"):
            model(x, pos=graph.pos)
    for pos in (graph.pos[:5], torch.rand(35, 3)):
        with pytest.raises(ValueError, match="pos must have shape"):
            model(graph.x, pos=pos)
    grid, batch = PixelGrid((5, 7), 3), torch.zeros(35).long()
    for options in ({"neighbors": PixelGrid((2, 9), 3)}, {"neighbors": grid, "batch": batch}):
        with pytest.raises(ValueError, match="neighbors must fill every graph"):
            model(graph.x, **options)
