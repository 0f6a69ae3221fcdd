"""What PyG's own layers do, and its tests ask of them: lazy sizes, flow, explanations."""

import copy
import io

import pytest
import torch
from states import take_weights
from tg_equiattn.integrations.pyg import RelativeGPSBlock, RelativePerformerConv
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, GraphMaskExplainer
from torch_geometric.nn import Linear, SAGEConv, global_mean_pool, to_hetero
from torch_geometric.utils import to_torch_csc_tensor

WINDOW = {"offset": "mlp", "cutoff": 2.5, "method": "features"}


@pytest.fixture
def graph(point_graphs):
    data = point_graphs((13, 2, 17))
    return {"x": data.x, "edge_index": data.edge_index, "pos": data.pos, "batch": data.batch}


def test_lazy_in_channels(graph, equal):
    torch.manual_seed(0)
    conv = RelativePerformerConv(-1, 15, heads=3, **WINDOW).double()
    assert repr(conv) == "RelativePerformerConv(-1, 15, heads=3, offset='mlp')"
    other = copy.deepcopy(conv)
    out = conv(**graph)
    assert conv.in_channels == conv.attention.in_channels == graph["x"].shape[1]
    assert repr(conv) == "RelativePerformerConv(12, 15, heads=3, offset='mlp')"
    file = io.BytesIO()
    torch.save(conv.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    equal(other(**graph), out, 0)
    known = RelativePerformerConv(12, 15, heads=3, **WINDOW).double()
    known.load_state_dict(conv.state_dict())
    equal(known(**graph), out, 0)
    other.double()
    assert other.in_channels == 12  # from the checkpoint
    late = RelativePerformerConv(-1, 15, heads=3, **WINDOW)
    with pytest.raises(ValueError, match="float"):  # a refused input says nothing
        late(graph["x"], graph["edge_index"], pos=graph["pos"], batch=graph["batch"])
    assert late.in_channels == -1
    with pytest.raises(ValueError, match="input must be"):
        conv(**{**graph, "x": graph["x"][:, :5]})
    conv.reset_parameters()
    assert float((conv(**graph) - out).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("position", ["window", "clipped"])
def test_flow(position, make_conv, graph, equal):
    """Against the flow, edges are read the other way round; offsets stay those of what is attended to."""
    options = WINDOW if position == "window" else {}
    conv, back = make_conv(position, **options), make_conv(position, flow="target_to_source", **options)
    take_weights(back, conv)
    one_way = graph["edge_index"][:, ::3]
    expected = conv(**{**graph, "edge_index": one_way})
    equal(back(**{**graph, "edge_index": one_way.flip(0)}), expected)
    assert float((back(**{**graph, "edge_index": one_way}) - expected).detach().abs().max()) > 1e-3
    adjacency = to_torch_csc_tensor(one_way, size=(32, 32)).t()
    with pytest.raises(ValueError, match="edge_index must not be an adjacency matrix with flow"):
        back(**{**graph, "edge_index": adjacency})


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, Linear(-1, 1)

    def forward(self, x, edge_index, pos, batch):
        return self.head(global_mean_pool(self.layer(x, edge_index, pos=pos, batch=batch), batch))


@pytest.mark.parametrize("kind", ["conv", "block"])
def test_explanations(kind, make_conv, graph, randomise):
    """GNNExplainer's mask of edges reaches near weights; a layer without near weights refuses to be explained so."""
    layer = make_conv(**WINDOW)
    if kind == "block":
        layer = randomise(RelativeGPSBlock(12, None, 3, attn_kwargs=WINDOW)).double().eval()
    model = Model(layer).double().eval()
    model(**graph)
    before = layer(**graph)
    explainer = Explainer(
        model, GNNExplainer(epochs=3), explanation_type="model", node_mask_type="attributes", edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "graph", "return_type": "raw"},
    )  # fmt: skip
    explanation = explainer(graph["x"], graph["edge_index"], pos=graph["pos"], batch=graph["batch"])
    assert explanation.edge_mask.shape == (graph["edge_index"].shape[1],)
    assert len(explanation.edge_mask.unique()) > 2
    torch.testing.assert_close(layer(**graph), before)  # the mask is gone


def test_a_masked_edge_is_no_edge(make_conv, graph, equal, error):
    """A mask of zero takes an edge's weight from the near part; with all it is the layer of no edges."""
    conv, count = make_conv(values="offset", **WINDOW), graph["edge_index"].shape[1]
    keep = torch.rand(count) < 0.5
    near = conv.neighbors(graph["edge_index"], graph["batch"], pos=graph["pos"], num_nodes=32)
    conv.explain, conv._edge_mask, conv._apply_sigmoid = True, keep.double(), False
    for other in ({"neighbors": near}, {"pos": graph["pos"]}):  # given without the mask, and found
        with pytest.raises(ValueError, match=r"come from this layer's neighbors\(\), .* Set explain = False"):
            conv(graph["x"], batch=graph["batch"], **other)
    masked = conv(**graph)
    with pytest.raises(ValueError, match=r"edges that are explained, got .* were edges rewired\? Set explain = False"):
        conv(**{**graph, "edge_index": graph["edge_index"][:, :-1]})
    conv._edge_mask = keep.double() - 0.1
    with pytest.raises(ValueError, match=r"edge mask must not be negative or NaN, got -0\.1: .*clamp\(min=0\)"):
        conv(**graph)
    conv.explain = None
    equal(masked, conv(**{**graph, "edge_index": graph["edge_index"][:, keep]}))
    assert error(masked, conv(**graph)) > 1e-3


EXPLAINERS = {
    "GraphMaskExplainer": (
        GraphMaskExplainer(1, epochs=1, log=False),
        r"explain must not be True without an edge",
    ),
    "AttentionExplainer": (AttentionExplainer(), r"hooks of messages must not be registered on RelativePerformerConv"),
}


@pytest.mark.parametrize("name", EXPLAINERS)
@pytest.mark.parametrize("position", ["window", None])
def test_explainers_of_messages_are_refused(name, position, make_conv, graph):
    """Attention passes no messages that they could read or replace."""
    algorithm, message = EXPLAINERS[name]
    model = Model(make_conv(position, **(WINDOW if position else {}))).double().eval()
    model.layer.explain = None
    model(**graph)
    masks = {"edge_mask_type": "object"} | ({"node_mask_type": "attributes"} if "Graph" in name else {})
    explainer = Explainer(
        model, algorithm, explanation_type="model", **masks,
        model_config={"mode": "regression", "task_level": "graph", "return_type": "raw"},
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        explainer(graph["x"], graph["edge_index"], pos=graph["pos"], batch=graph["batch"])
    if name == "AttentionExplainer":
        with pytest.raises(ValueError, match="use register_forward_hook"):
            model.layer.register_propagate_forward_pre_hook(print)


class Hetero(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index, pos):
        return self.layer(x, edge_index, pos=pos)


@pytest.mark.parametrize("kind", ["conv", "block"])
def test_two_sets_of_nodes_are_refused(kind, graph):
    """A copy of the layer for each type of edges, as to_hetero makes, would be between two sets."""
    layer = RelativeGPSBlock(12, SAGEConv(12, 12), 3, attn_kwargs=WINDOW)
    layer = layer.attention if kind == "conv" else layer
    sets = ["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]
    both = (dict.fromkeys(sets[0], graph["x"].float()), dict.fromkeys(sets[1], graph["edge_index"]),
            dict.fromkeys(sets[0], graph["pos"].float()))  # fmt: skip
    with pytest.raises(ValueError, match=r"x must be one tensor of shape \(N, 12\), got tuple: .* bipartite graphs"):
        to_hetero(Hetero(layer).eval(), sets)(*both)


def test_signals_on_one_graph(any_conv, point_graphs, equal):
    """As PyG's own convs take them; each signal for itself."""
    data, signals = point_graphs((11,)), torch.randn(5, 11, 12, dtype=torch.float64)
    for edges in (data.edge_index, None):
        out = any_conv(signals, edges, pos=data.pos)
        for signal, expected in zip(signals, out, strict=True):
            equal(any_conv(signal, edges, torch.zeros(11).long(), pos=data.pos), expected)
