"""EwaldAttention against the core's layer; its symmetries in space and in a plane; what is refused; within PyG."""

import pytest
import torch
from space import batch_of
from tg_equiattn.integrations.pyg import EwaldAttention, ewald_settings
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GPSConv, SAGEConv, Sequential, global_mean_pool, to_hetero

SIZES = (7, 1, 11)
CELLS = 4 * torch.eye(3, dtype=torch.float64) + 0.3 * torch.tensor([[0, 1, -1], [1, 0, 2], [0.5, -1, 0]]).double()


@pytest.fixture
def make(randomise):
    def make(**options):
        options = {"width": 1.0, "num_gaussians": 2, "num_coulomb": 1, "in_vectors": 2, "out_vectors": 3, **options}
        return randomise(EwaldAttention(5, 7, heads=2, **options), 0.4).double()

    return make


def graph(dim=3, sizes=SIZES, periodic=False):
    """In space a molecule, an atom in a slab, and a crystal; in a plane each open or repeated along both axes."""
    count = sum(sizes)
    x = {
        "x": torch.randn(count, 5), "vectors": torch.randn(count, 2, dim), "pos": 2 * torch.randn(count, dim),
        "batch": batch_of(sizes), "return_vectors": True,
    }  # fmt: skip
    if periodic:
        pbc = [[False] * dim, [True, True, False][:dim], [True] * dim]
        x |= {"cell": (CELLS[:dim, :dim]).repeat(3, 1, 1), "pbc": torch.tensor(pbc)}
    return {name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for name, v in x.items()}


@pytest.mark.parametrize("periodic", [False, True])
def test_equals_the_core(make, equal, periodic):
    """With inner products of vectors, whose map starts at zero."""
    module, x = make(), graph(periodic=periodic)
    given = {name: x[name] for name in ("pos", "batch", "cell", "pbc") if name in x}
    out, vectors = module(**x)
    scalars, wanted = module.attention(x["x"], x["vectors"], **given)
    first, second = torch.triu_indices(3, 3)
    products = (wanted @ wanted.mT)[:, first, second]
    equal(out, scalars + products * (1 + products**2) ** -0.25 @ module.invariants.map.weight.T)
    equal(vectors, wanted)
    new = EwaldAttention(5, 7, width=1.0).double()
    equal(new(x["x"], **given), new.attention(x["x"], None, **given)[0])


@pytest.mark.parametrize("periodic", [False, True])
def test_a_plane_lies_in_space(make, equal, periodic):
    """So its symmetries are those of space."""
    module, x = make(), graph(2, periodic=periodic)
    pad = torch.nn.functional.pad
    space = {**x, "pos": pad(x["pos"], (0, 1)), "vectors": pad(x["vectors"], (0, 1))}
    if periodic:
        space |= {"cell": pad(x["cell"], (0, 1, 0, 1)), "pbc": pad(x["pbc"], (0, 1))}
        equal(module(**{**x, "cell": x["cell"].flatten(0, 1), "pbc": x["pbc"].flatten()}), module(**x))
    out, vectors = module(**x)
    equal((out, pad(vectors, (0, 1))), module(**space))


@pytest.mark.parametrize("dim", [2, 3])
def test_graphs_of_a_batch(make, equal, dim):
    """In any order, by ptr, with cells that differ; one graph is a node, another has none."""
    module, x = make(), graph(dim, (7, 1, 11, 0), periodic=False)
    x["cell"] = CELLS[:dim, :dim] * torch.tensor([1.0, 1.1, 1.3, 1.0])[:, None, None]
    out = module(**x, batch_size=4)
    order = torch.randperm(19)
    mixed = module(**{n: v[order] if n in ("x", "vectors", "pos", "batch") else v for n, v in x.items()}, batch_size=4)
    equal(mixed, tuple(y[order] for y in out))
    equal(module(**{**x, "batch": None}, ptr=torch.tensor([0, 7, 8, 19, 19])), out)


@pytest.mark.parametrize("count", [0, 5])
def test_every_parameter_gets_a_gradient(count):
    module = EwaldAttention(5, 7, width=1.0)
    module(torch.randn(count, 5), torch.randn(count, 3)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


X, POS = torch.ones(4, 5), torch.rand(4, 3)
CELL = torch.eye(2) * 3


@pytest.mark.parametrize(
    ("message", "options", "arguments"),
    [
        ("out_vectors must be 0 with lmax=0 and in_vectors=0, got 8: pass lmax=1", {"lmax": 0}, {}),
        (r"x must be one tensor of shape \(N, 5\), got tuple", {}, {"x": (X, X)}),
        (r"x must have shape \(N, 5\), got \(4, 3\)", {}, {"x": X[:, :3]}),
        (r"pos must have shape \(4, 2\) or \(4, 3\), got \(4, 1\)", {}, {"pos": POS[:, :1]}),
        (r"pos must have shape \(4, 2\) or \(4, 3\), got NoneType", {}, {"pos": None}),
        (r"vectors must be None with in_vectors=0, got \(4, 2, 3\)", {}, {"vectors": torch.ones(4, 2, 3)}),
        (r"vectors must be given, of shape \(N, 2, 3\), got NoneType", {"in_vectors": 2}, {}),
        (r"vectors must have shape \(4, 2, 3\), got \(4, 2, 2\)", {"in_vectors": 2}, {"vectors": torch.ones(4, 2, 2)}),
        ("return_vectors must be False with out_vectors=0", {"out_vectors": 0}, {"return_vectors": True}),
        ("batch must be a tensor, got list", {}, {"batch": [0] * 4}),
        ("ptr must be None where batch is given", {}, {"batch": torch.zeros(4).long(), "ptr": torch.tensor([0, 4])}),
        (r"cell must be \(2, 2\), \(graphs, 2, 2\) or \(2 graphs, 2\) where pos has 2 dimensions, got \(3, 3\)", {},
         {"pos": POS[:, :2], "cell": torch.eye(3)}),
        (r"pbc must be bool \(2,\), .* where pos has 2 dimensions, got \(3,\)", {},
         {"pos": POS[:, :2], "cell": CELL, "pbc": torch.ones(3).bool()}),
        ("pbc must let graphs repeat along three directions, two or none, got one for graph 0", {},
         {"pos": POS[:, :2], "cell": CELL, "pbc": torch.tensor([True, False])}),
    ],
)  # fmt: skip
def test_bad_arguments(message, options, arguments):
    with pytest.raises(ValueError, match=message):
        EwaldAttention(**{"in_channels": 5, "out_channels": 7, "width": 1.0, **options})(
            **{"x": X, "pos": POS, **arguments}
        )


def test_repr():
    assert repr(EwaldAttention(5, 7, width=1.5, heads=2)) == "EwaldAttention(5, 7, heads=2, width=1.5)"
    assert repr(EwaldAttention(5, 7, width=1.5, in_vectors=2)).endswith("heads=1, width=1.5, in_vectors=2)")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.attention = SAGEConv(5, 6), EwaldAttention(-1, 6, width=1.0)  # the size of its first input

    def forward(self, x, edge_index, pos):
        return self.attention(self.conv(x, edge_index), pos)


EDGES = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])


def test_explanations_are_of_the_messages_beside_it():
    model, x, pos = Model(), torch.randn(4, 5), torch.randn(4, 3)
    explainer = Explainer(
        model, GNNExplainer(epochs=2), explanation_type="model", node_mask_type="attributes", edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )  # fmt: skip
    assert explainer(x, EDGES, pos=pos).edge_mask.shape == (4,)


def test_sets_of_nodes_attend_within_themselves():
    """A heterogeneous graph has weights for each kind of nodes."""
    kinds = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]
    model = to_hetero(Model(), kinds)
    x, pos = ({kind: torch.randn(4, n) for kind in kinds[0]} for n in (5, 3))
    out = model(x, dict.fromkeys(kinds[1], EDGES), pos)
    assert out["a"].shape == (4, 6)
    changed = model(x, dict.fromkeys(kinds[1], EDGES), pos | {"b": 2 * pos["b"]})
    torch.testing.assert_close(changed["a"], out["a"])
    assert (changed["b"] - out["b"]).abs().max() > 1e-3


def test_sequential(equal):
    first, second = EwaldAttention(5, 6, width=1.0), EwaldAttention(6, 2, width=2.0)
    model = Sequential("x, pos, batch", [(first, "x, pos, batch -> x"), torch.nn.ReLU(), (second, "x, pos, batch -> x"),
                                         (global_mean_pool, "x, batch -> x")])  # fmt: skip
    x, pos, batch = torch.randn(7, 5), torch.randn(7, 3), batch_of((3, 4))
    wanted = second(first(x, pos, batch).relu(), pos, batch)
    equal(model(x, pos, batch), global_mean_pool(wanted, batch), 0)


def test_as_the_conv_of_gps(equal):
    """It passes over the edges, which tell that the batch index is missing, as GPSConv does not pass it on."""
    layer, edges = EwaldAttention(6, 6, width=1.0).double(), torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 6]])
    gps = GPSConv(6, layer, norm=None, attn_type="performer").double().eval()
    gps.attn = None
    x, pos, batch = torch.randn(7, 6).double(), torch.randn(7, 3).double(), batch_of((3, 4))
    attended = 3 * x + layer(x, pos, batch)
    equal(gps(x, edges, batch, pos=pos, ptr=torch.tensor([0, 3, 7])), attended + gps.mlp(attended))
    with pytest.warns(UserWarning, match="the edges form 2 separate blocks, but batch is None"):
        EwaldAttention(6, 6, width=1.0).double()(x, edges, pos=pos)


def molecule():
    """A chain of atoms."""
    count = int(torch.randint(12, 30, ()))
    steps = torch.nn.functional.normalize(torch.randn(count, 3), dim=1)
    chain = torch.arange(count - 1)
    return Data(pos=1.5 * steps.cumsum(0), edge_index=torch.stack([chain, chain + 1]))


def crystal():
    """Atoms in a cell of its own size, with edges in it."""
    side = 6 + 4 * torch.rand(())
    pos, cell = side * torch.rand(int(0.1 * side**3), 3), side * torch.eye(3) + 0.3 * torch.randn(3, 3)
    edges = ((torch.cdist(pos, pos) < 3) & ~torch.eye(len(pos)).bool()).nonzero().T
    return Data(pos=pos, cell=cell, edge_index=edges, edge_offset=pos[edges[0]] - pos[edges[1]])


def plane():
    """Points with their nearest neighbors."""
    pos = 28 * torch.rand(150, 2)
    near = torch.cdist(pos, pos).topk(9, largest=False).indices[:, 1:]
    return Data(pos=pos, edge_index=torch.stack([near.flatten(), torch.arange(150).repeat_interleave(8)]))


HEADS = pytest.param({"heads": 4, "num_coulomb": 0}, marks=pytest.mark.slow)


@pytest.mark.parametrize("make_graph", [molecule, crystal, plane])
@pytest.mark.parametrize("options", [{}, HEADS], ids=["default", "heads"])
def test_outputs_of_a_new_layer_are_of_unit_size(make_graph, options):
    """With settings that are read from a data set; with 1 or the number of nodes they are not (negative control)."""
    given = ewald_settings([make_graph() for _ in range(20)], **options)
    graphs = [make_graph() for _ in range(8)]

    def size(settings):
        out = []
        for data in graphs:
            torch.manual_seed(len(out))
            layer = EwaldAttention(32, 32, **settings)
            out.append(layer(torch.randn(data.num_nodes, 32), data.pos, cell=data.get("cell")).flatten())
        return float(torch.cat(out).detach().square().mean().sqrt())

    assert 0.5 < size(given) < 2
    assert size(given | {"output_scale": 1.0}) > 3
    assert size(given | {"output_scale": 1000.0}) < 0.3


def test_settings_that_are_read(equal):
    """The mean length of edges, half of the shortest side; what is given stays, and so do random numbers."""
    data = Data(pos=torch.tensor([[0.0, 0], [3.0, 4], [3.0, 5]]), edge_index=torch.tensor([[0, 1], [1, 2]]))
    before = torch.random.get_rng_state()
    found = ewald_settings([data])
    assert found["width"] == 3
    assert found.keys() == {"width", "output_scale"}
    assert torch.equal(torch.random.get_rng_state(), before)
    offsets = torch.tensor([[2.0, 0], [0, 1]])
    periodic = data.clone().update({"cell": 8 * torch.eye(2), "edge_offset": offsets})
    found = ewald_settings([data, periodic], width=1.0, num_coulomb=1)
    assert (found["width"], found["max_width"], found["num_coulomb"]) == (1, 4, 1)
    assert ewald_settings([periodic])["width"] == 1.5
    for wrong, message in (
        ([], "graphs must be a data set with graphs, got none"),
        ([Data(pos=POS)], "graphs must have edge_index"),
        ([Data(edge_index=torch.zeros(2, 1, dtype=torch.long))], "graphs must have pos"),
        ([Data(pos=POS, edge_index=EDGES[:, :0])], "graphs must have edges, whose mean length is the width"),
        ([Data(pos=POS, edge_index=EDGES, cell=torch.eye(3))], "graphs with a cell must have edge_offset, as Periodic"),
    ):
        with pytest.raises(ValueError, match=message):
            ewald_settings(wrong)


def test_sizes_of_the_first_input():
    late, other, pos = EwaldAttention(-1, 7, width=1.0), EwaldAttention(-1, 7, width=1.0), torch.randn(9, 3)
    assert late.in_channels == -1
    out = late(torch.ones(9, 4), pos)
    other.load_state_dict(late.state_dict())
    assert other.in_channels == late.in_channels == 4
    torch.testing.assert_close(other(torch.ones(9, 4), pos), out)
    with pytest.raises(ValueError, match=r"x must have shape \(N, 4\)"):
        other(torch.randn(9, 5), pos)
    late.reset_parameters()
    assert not torch.equal(late.lin.weight, other.lin.weight)
