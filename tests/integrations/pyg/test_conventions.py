"""What PyG's own layers do, and its tests ask of them: lazy sizes, flow, explanations."""

import copy
import io

import pytest
import torch
from space import take_weights
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


MODES = {"mode": "regression", "task_level": "graph", "return_type": "raw"}


def explained(algorithm, layer, graph, **masks):
    model = Model(layer).double().eval()
    model(**graph)
    explainer = Explainer(
        model, algorithm, explanation_type="model", edge_mask_type="object", model_config=MODES, **masks
    )
    return explainer(graph["x"], graph["edge_index"], pos=graph["pos"], batch=graph["batch"])


@pytest.mark.parametrize("method", ["features", "pairs"])
@pytest.mark.parametrize("kind", ["conv", "block"])
def test_explanations(kind, method, make_conv, graph, randomise):
    """GNNExplainer's mask of edges reaches near weights."""
    options = {**WINDOW, "method": method}
    layer = make_conv(**options)
    if kind == "block":
        layer = randomise(RelativeGPSBlock(12, None, 3, attn_kwargs=options)).double().eval()
    before = layer(**graph)
    mask = explained(GNNExplainer(epochs=3), layer, graph, node_mask_type="attributes").edge_mask
    assert mask.shape == (graph["edge_index"].shape[1],)
    assert len(mask.unique()) > 2
    torch.testing.assert_close(layer(**graph), before)  # the mask is gone


MESSAGES = {
    "features": {}, "offsets": {"values": "offset"}, "pairs": {"method": "pairs"},
    "pairs and offsets": {"method": "pairs", "values": "offset"}, "against the flow": {"flow": "target_to_source"},
}  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_give_the_numbers_of_fast_products(name, dropout, make_conv, graph, equal):
    """Where a hook is registered, near weights are messages along the edges as they were given, self-loops too."""
    conv = make_conv(**{**WINDOW, "dropout": dropout, **MESSAGES[name]}).train()
    loops = torch.arange(0, 32, 3).expand(2, -1)
    edges = torch.cat([loops, graph["edge_index"].flip(1)], 1)
    order = torch.randperm(edges.shape[1])
    graph = {**graph, "edge_index": edges[:, order], "x": graph["x"].requires_grad_()}
    state, alphas = torch.get_rng_state(), []
    expected = conv(**graph)
    handle = conv.register_message_forward_hook(lambda module, inputs, out: alphas.append(inputs[-1]["alpha"]))
    torch.set_rng_state(state)
    out = conv(**graph)
    if dropout:  # of other edges, as their order is another one
        assert out.isfinite().all()
    else:
        equal(out, expected)
        parameters = [graph["x"], *conv.parameters()]
        wanted, found = (torch.autograd.grad(y.sin().sum(), parameters, allow_unused=True) for y in (expected, out))
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    (alpha,) = alphas
    assert alpha.shape == (edges.shape[1], conv.heads)
    assert bool((alpha[order < loops.shape[1]] == 0).all())
    assert bool((alpha[order >= loops.shape[1]] > 0).all())
    handle.remove()
    conv(**graph)
    assert len(alphas) == 1


def test_a_masked_edge_is_no_edge(make_conv, graph, equal, error):
    """A mask of zero takes an edge's weight from the near part; with all it is the layer of no edges."""
    conv, count = make_conv(values="offset", **WINDOW), graph["edge_index"].shape[1]
    near = conv.neighbors(graph["edge_index"], graph["batch"], pos=graph["pos"], num_nodes=32)
    for keep in (torch.rand(count) < 0.5, torch.zeros(count, dtype=torch.bool)):
        conv.explain, conv._edge_mask, conv._apply_sigmoid = True, keep.double(), False
        masked = conv(**graph)
        equal(conv(graph["x"], batch=graph["batch"], pos=graph["pos"], neighbors=near), masked)  # shared near pairs
        conv.explain = None
        equal(masked, conv(**{**graph, "edge_index": graph["edge_index"][:, keep]}))
        assert error(masked, conv(**graph)) > 1e-3


def test_attention_explainer_reads_near_weights(make_conv, graph):
    conv = make_conv(**WINDOW)
    found, seen = explained(AttentionExplainer(), conv, graph).edge_mask, []
    conv.register_message_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]["alpha"]))
    conv(**graph)
    torch.testing.assert_close(found, seen[0].amax(1))


def test_explainers_that_the_layer_does_not_serve(make_conv, graph):
    """Other kinds of positions have no weights of edges, and no message holds features of its target."""
    with pytest.raises(ValueError, match="Could not collect any attention coefficients"):
        explained(AttentionExplainer(), make_conv(None), graph)
    algorithm = GraphMaskExplainer(1, epochs=1, log=False)
    with pytest.raises(TypeError, match="must be Tensor"):
        explained(algorithm, make_conv(**WINDOW), graph, node_mask_type="attributes")


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
