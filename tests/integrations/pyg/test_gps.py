"""RelativeGPSBlock: what GPSConv computes, with other attention; any local layer; edges' features where they belong."""

import pytest
import torch
from attention_operands import Largest
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch_geometric import nn as pyg
from torch_geometric.nn import GINEConv, GPSConv

CHANNELS, HEADS, BONDS = 12, 3, 5


def perceptron():
    return torch.nn.Sequential(
        torch.nn.Linear(CHANNELS, CHANNELS), torch.nn.ReLU(), torch.nn.Linear(CHANNELS, CHANNELS)
    )


LOCAL = {
    "GINEConv": lambda: GINEConv(perceptron(), edge_dim=BONDS),
    "GATv2Conv": lambda: pyg.GATv2Conv(CHANNELS, CHANNELS // HEADS, HEADS, edge_dim=BONDS),
    "GCNConv": lambda: pyg.GCNConv(CHANNELS, CHANNELS),
    "SAGEConv": lambda: pyg.SAGEConv(CHANNELS, CHANNELS),
    "PointTransformerConv": lambda: pyg.PointTransformerConv(CHANNELS, CHANNELS, torch.nn.Linear(2, CHANNELS)),
    "None": lambda: None,
}


@pytest.fixture
def make(randomise):
    def make(local="GINEConv", **options):
        attention = {"num_random_features": 19, "offset": "mlp", "cutoff": 2.5, "method": "features"}
        attention |= options.pop("attention", {})
        block = RelativeGPSBlock(CHANNELS, LOCAL[local](), HEADS, attn_kwargs=attention, **options)
        return randomise(block, 0.4).double().eval()

    return make


@pytest.fixture
def graph(point_graphs):
    data = point_graphs((13, 2, 17))
    bonds = torch.randn(data.edge_index.shape[1], BONDS, dtype=torch.float64)
    return {"x": data.x, "edge_index": data.edge_index, "edge_attr": bonds, "pos": data.pos, "batch": data.batch}


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "graph_norm", None])
def test_equals_gps_conv_around_the_same_parts(norm, make, graph, equal):
    block = make(norm=norm)
    host = GPSConv(CHANNELS, block.conv, HEADS, norm=norm).double().eval()
    for name in ("mlp", "norm1", "norm2", "norm3"):
        setattr(host, name, getattr(block, name))
    x, batch = graph["x"], graph["batch"]
    attended = block.attention(x, graph["edge_index"], pos=graph["pos"], batch=batch)

    class Given(torch.nn.MultiheadAttention):
        def forward(self, query, *rest, **more):
            return torch.cat([attended.new_zeros(1), attended.flatten()])[places], None

    mask = torch.nn.functional.one_hot(batch, 3).T.bool()
    longest = int(mask.sum(1).max())
    places = torch.zeros(3, longest, CHANNELS, dtype=torch.long)
    for number in range(3):
        rows = mask[number].nonzero()[:, 0]
        places[number, : len(rows)] = 1 + rows[:, None] * CHANNELS + torch.arange(CHANNELS)
    host.attn = Given(CHANNELS, HEADS)
    equal(block(**graph), host(x, graph["edge_index"], batch, edge_attr=graph["edge_attr"]))


@pytest.mark.parametrize("local", LOCAL)
def test_any_local_layer(local, make, graph, error):
    """Moving a graph changes nothing; edges' features count where they are taken."""
    block = make(local)
    takes = "edge_attr" in block._conv_takes
    given = graph if takes else {**graph, "edge_attr": None}
    out = block(**given)
    assert error(block(**{**given, "pos": given["pos"] + 7.25}), out) < 1e-12
    bent = {**given, "pos": given["pos"] * torch.tensor([1.0, 0.5])}
    assert error(block(**bent), out) > 1e-3
    if takes:
        changed = {**given, "edge_attr": given["edge_attr"] + torch.randn(BONDS)}
        assert error(block(**changed), out) > 1e-3


@pytest.mark.parametrize(
    ("message", "options", "arguments"),
    [
        (r"edge_attr must be None: neither GCNConv\(12, 12\)", {"conv": pyg.GCNConv(12, 12)}, {}),
        ("edge_weight must not be given where conv is None", {"conv": None}, {"edge_attr": None, "edge_weight": 1}),
        ("edge_wieght must not be given: neither this block nor GINEConv", {}, {"edge_wieght": 1}),
        (
            r"edge_index must be given: SAGEConv\(12, 12",
            {"conv": pyg.SAGEConv(12, 12)},
            {"edge_index": None, "edge_attr": None},
        ),
        (
            r"conv must return \(32, 12\), as x is, got \(32, 17\) from SAGEConv",
            {"conv": pyg.SAGEConv(12, 17)},
            {"edge_attr": None},
        ),
        (
            r"x must have shape \(N, 12\), got \(2, 3, 12\); .* make a batch of B graphs",
            {},
            {"x": torch.ones(2, 3, 12)},
        ),
    ],
)
def test_bad_arguments(message, options, arguments, graph):
    options = {"conv": LOCAL["GINEConv"](), "heads": HEADS, "attn_kwargs": {"offset": "mlp", "cutoff": 3.0}, **options}
    with pytest.raises(ValueError, match=message):
        RelativeGPSBlock(CHANNELS, **options).double()(**{**graph, **arguments})


def test_pairs_by_default(graph):
    """Exact, without a warning."""
    block = RelativeGPSBlock(CHANNELS, None, HEADS, attn_kwargs={"offset": "mlp", "cutoff": 2.5}).double()
    assert block.attention.attention.method == "pairs"
    assert block(**{**graph, "edge_attr": None}).isfinite().all()


def test_memory_of_pairs_is_linear():
    """No tensor has a number for each pair of nodes, not in second derivatives either."""
    block = RelativeGPSBlock(CHANNELS, None, HEADS, attn_kwargs={"position": None, "method": "pairs"})
    x = torch.randn(1500, CHANNELS, requires_grad=True)
    with Largest() as largest:
        (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert largest.count < 1500**2


def test_heads_of_ewald_attention_share_kernels():
    """Two of each kind by default. Checkpoints in which every head has its own widths are refused."""
    block = RelativeGPSBlock(CHANNELS, None, HEADS, attn="ewald", attn_kwargs={"width": 1.0})
    layer = block.attention.attention
    assert layer.octaves.shape == (1, 4)
    layer.settings = lambda: {**type(layer).settings(layer), "heads": HEADS}
    other = RelativeGPSBlock(CHANNELS, None, HEADS, attn="ewald", attn_kwargs={"width": 1.0})
    with pytest.raises(ValueError, match=f"with heads={HEADS}, whose heads share kernels, like this one, got {HEADS}"):
        other.load_state_dict(block.state_dict())


@pytest.mark.parametrize("sizes", [(513,), (3, 700, 90)])
def test_features_are_suggested_once_for_large_graphs(sizes):
    """Where pairs are only the default, and where most nodes are in a large graph."""
    message = r"method='features' is much faster for graphs of more than 512 nodes, and these have \d+ on average"
    x, batch = torch.randn(sum(sizes), 4), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    block = RelativeGPSBlock(4, None, attn_kwargs={"position": None})
    block(x[:513], batch=torch.arange(513) // 2)  # warnings are errors in these tests
    with pytest.warns(UserWarning, match=message):
        block(x, batch=batch)
    block(x, batch=batch)
    RelativeGPSBlock(4, None, attn_kwargs={"position": None, "method": "pairs"})(x, batch=batch)
    RelativeGPSBlock(4, None, attn_kwargs={"position": None})(x, batch=torch.arange(len(x)) // 512)


def test_near_pairs_are_shared(make, graph, equal, error):
    """The same pairs once for all blocks, or others than messages pass along."""
    block = make()
    out = block(**graph)
    near = block.neighbors(*(graph[name] for name in ("edge_index", "batch", "edge_attr", "pos")), num_nodes=32)
    equal(block(**graph, neighbors=near), out)
    fewer = block.neighbors(graph["edge_index"][:, ::2], graph["batch"], pos=graph["pos"], num_nodes=32)
    assert error(block(**graph, neighbors=fewer), out) > 1e-3


def test_arguments_beside_near_pairs_that_have_no_effect(make, graph):
    """Attention takes near pairs in place of edges, which are then those of messages alone."""
    alone, around = make("None"), make("SAGEConv", attention={"edge_dim": BONDS})
    edges = {name: graph.pop(name) for name in ("edge_index", "edge_attr")}
    near = around.neighbors(**edges, batch=graph["batch"], pos=graph["pos"], num_nodes=32)
    assert alone(**graph, neighbors=near).isfinite().all()
    assert around(**graph, neighbors=near, edge_index=edges["edge_index"]).isfinite().all()
    offsets = {"edge_index": edges["edge_index"], "edge_offset": torch.zeros(edges["edge_index"].shape[1], 2)}
    for name, block, given in (("edge_index", alone, edges), ("edge_offset", around, offsets)):
        with pytest.raises(ValueError, match=f"{name} must be None where neighbors are given"):
            block(**graph, neighbors=near, **given)
    with pytest.raises(ValueError, match=r"edge_attr must be None: neither SAGEConv.* nor, with neighbors"):
        around(**graph, neighbors=near, **edges)


@pytest.mark.parametrize("attn", ["performer", "ewald", "shared"])
def test_a_batch_index_that_was_not_passed(attn, make, ewald, graph):
    """Edges, or near pairs, tell that there are several graphs. The warning comes once."""
    batch = graph.pop("batch")
    block, given = ewald if attn == "ewald" else make(), graph
    if attn == "shared":
        edges = {name: graph[name] for name in ("edge_index", "edge_attr", "pos")}
        given = {**graph, "neighbors": block.neighbors(**edges, batch=batch, num_nodes=32)}
    with pytest.warns(UserWarning, match="the edges form .* separate blocks, but batch is None"):
        block(**given)
    block(**given)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "graph_norm", "instance_norm", None])
def test_nodes_of_graphs_in_any_order(norm, make, graph, equal):
    block, order = make(norm=norm), torch.randperm(32)
    mixed = {name: x[order] if len(x) == 32 else x for name, x in graph.items()}
    mixed["edge_index"] = order.argsort()[graph["edge_index"]]
    equal(block(**mixed), block(**graph)[order])


@pytest.mark.parametrize("method", ["pairs", "features"])
def test_features_of_edges_without_positions(make, graph, error, method):
    """offset=None: near pairs are the edges, weighed by content, a number for each head and their features."""
    block = make("None", attention={"offset": None, "cutoff": None, "edge_dim": BONDS, "method": method})
    given = {**graph, "pos": None}
    out = block(**given)
    assert error(block(**{**given, "edge_attr": graph["edge_attr"].flip(0)}), out) > 1e-3
    permuted = torch.randperm(graph["edge_index"].shape[1])
    same = {**given, "edge_index": graph["edge_index"][:, permuted], "edge_attr": graph["edge_attr"][permuted]}
    assert error(block(**same), out) < 1e-12


def test_edges_are_needed_without_positions(make, graph):
    block = make("None", attention={"offset": None, "cutoff": None})
    with pytest.raises(ValueError, match=r"edge_index \(or neighbors\) must be given with offset=None"):
        block(graph["x"], batch=graph["batch"])


@pytest.fixture
def ewald(randomise):
    block = RelativeGPSBlock(CHANNELS, LOCAL["GINEConv"](), HEADS, attn="ewald", attn_kwargs={"width": 1.0})
    return randomise(block, 0.4).double().eval()


def test_ewald_attention(ewald, graph, equal, error):
    """In place of attention by content: what its parts compute; messages alone use edges."""
    out = ewald(**graph)
    attended = graph["x"] + ewald.attention(graph["x"], graph["pos"], graph["batch"])
    local = graph["x"] + ewald.conv(graph["x"], graph["edge_index"], graph["edge_attr"])
    both = ewald.norm1(local) + ewald.norm2(attended)
    equal(out, ewald.norm3(both + ewald.mlp(both)))
    cell = 8 * torch.eye(2, dtype=torch.float64)
    repeated = ewald(**graph, cell=cell)
    equal(ewald(**{**graph, "pos": graph["pos"] + 40}, cell=cell, pbc=torch.ones(2).bool()), repeated, 1e-9)
    assert error(repeated, out) > 1e-3
    assert repr(ewald).endswith("heads=3, attn='ewald')")


@pytest.mark.parametrize(
    ("message", "options", "arguments"),
    [
        ("attn must be 'performer' or 'ewald', got 'multihead'", {"attn": "multihead"}, {}),
        (r"attn_kwargs must have a width with attn='ewald', got \{\}", {"attn": "ewald", "attn_kwargs": None}, {}),
        ("edge_offset must be None with attn='ewald', which takes distances from pos and cell", {"attn": "ewald"},
         {"edge_offset": torch.zeros(1, 2)}),
        ("neighbors must be None with attn='ewald'", {"attn": "ewald"}, {"neighbors": 1}),
        ("pbc must be None with attn='performer'", {"attn_kwargs": {}}, {"pbc": torch.ones(2).bool()}),
        (r"pos must have shape \(32, 2\) or \(32, 3\), got NoneType", {"attn": "ewald"}, {"pos": None}),
    ],
)  # fmt: skip
def test_bad_arguments_with_ewald_attention(message, options, arguments, graph):
    options = {"attn_kwargs": {"width": 1.0}, **options}
    with pytest.raises(ValueError, match=message):
        RelativeGPSBlock(CHANNELS, LOCAL["GINEConv"](), HEADS, **options).double()(**{**graph, **arguments})


def test_ewald_attention_has_no_near_pairs(ewald, graph):
    with pytest.raises(ValueError, match=r"attn must be 'performer' for neighbors\(\), got 'ewald'"):
        ewald.neighbors(graph["edge_index"], num_nodes=32)
