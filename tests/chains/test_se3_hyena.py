"""SE(3)-Hyena against a slow evaluation of Algorithm 1, its symmetries, memory and refusals; vector self-attention."""

import pytest
import torch
from attention_operands import Largest
from clouds import EDGE, S, V, close, double, gradients, moved, permuted, sample, within
from oracles import token_network
from space import broken_cross_product, error, motion, move

from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator, VectorSelfAttention
from tg_equiattn.testing import TOLERANCE


def without(x, *names):
    return {key: part for key, part in x.items() if key not in names}


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_equals_the_definition(name, n, make, device):
    layer, x = make(name), sample(name, [n])
    inputs = [x[key].requires_grad_() for key in ("scalars", "vectors", "pos") if key in x] + list(layer.parameters())
    order = torch.arange(n)
    if "radial" in name:
        order = (x["pos"] - x["pos"].mean(0)).norm(dim=-1).argsort()
    expected = token_network(layer.module, **without(permuted(x, order), "batch"))
    if not layer.module.pool:
        expected = tuple(part[order.argsort()] for part in expected)
    wanted = gradients(expected, inputs)
    out = layer.to(device)(**{key: value.to(device) for key, value in without(x, "batch").items()})
    close([part.cpu() for part in out], expected, 1e-10)
    tolerance = 1e-7 if "attention" in name else 1e-8
    close([g.cpu() for g in gradients(out, inputs)], [g.cpu() for g in wanted], tolerance)


@pytest.mark.parametrize(("dtype", "reflect"), [(torch.float64, False), (torch.float64, True), (torch.float32, True)])
def test_equivariant(dtype, reflect, name, make, device):
    """To motions and, where the order is none or by radius, permutations; of two tokens scalars decide."""
    sizes = [31, 1, 2, 17]
    layer, x = make(name, dtype).to(device), sample(name, sizes, dtype, device)
    r, shift = motion(dtype, reflect, device), torch.randn(4, 3, dtype=dtype, device=device)
    free = "radial" in name or ("attention" in name and "short" not in name)
    p = (within(sizes) if free else torch.arange(sum(sizes))).to(device)
    (scalars, vectors), both = layer(**x), permuted(moved(x, r, shift), p)
    wanted = (scalars, move(vectors, r)) if layer.module.pool else (scalars[p], move(vectors[p], r))
    assert error(layer(**both), wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["plain", "local", "model", "implicit", "short causal", "attention, short"])
def test_permutations_are_seen_in_input_order(name, make):
    layer, x, p = make(name), sample(name, [31]), torch.randperm(31)
    scalars, vectors = layer(**x)
    assert error(layer(**permuted(x, p)), (scalars[p], vectors[p])) > 1e-3


@pytest.mark.parametrize("name", ["plain", "attention"])
def test_broken_equivariance_is_seen(name, make, monkeypatch):
    layer, x, r = make(name), sample("plain", [31]), motion()
    none, shift = torch.zeros(1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)

    def broken(change, shift=none):
        a, b = layer(**change(x)), layer(**change(moved(x, r, shift)))
        return error(b, (a[0], move(a[1], r)))

    assert broken(lambda x: x, shift) <= 1e-10
    assert broken(lambda x: {**x, "vectors": x["vectors"][..., [1, 0, 2]]}) > 1e-3
    assert broken(lambda x: {**x, "scalars": x["pos"]}) > 1e-3
    with broken_cross_product():
        assert broken(lambda x: x) > 1e-3
    if name == "plain":
        assert broken(lambda x: {**x, "pos": x["pos"][..., [1, 0, 2]]}) > 1e-3
        monkeypatch.setattr(NodeBatch, "centred", lambda self, pos: pos)
        assert broken(lambda x: x) <= 1e-10
        assert broken(lambda x: x, shift) > 1e-3


@pytest.mark.parametrize(
    "name", ["causal", "short causal", "implicit causal", "implicit causal model", "exponential causal"]
)
def test_causal_sees_no_later_token(name, make):
    layer, x = make(name), sample(name, [11])
    out = layer(**x)
    later = {**x, "scalars": x["scalars"].clone(), "vectors": x["vectors"].clone()}
    later["scalars"][6:], later["vectors"][6:] = 3, -2
    changed = layer(**later)
    close([part[:6] for part in changed], [part[:6] for part in out], 1e-10)
    assert error([part[6:] for part in changed], [part[6:] for part in out]) > 1e-2


@pytest.mark.parametrize("name", ["implicit causal", "implicit causal model", "exponential causal model"])
def test_appended_tokens_change_nothing_earlier(name, make):
    """No factor of the length, unlike the filter that is data."""

    def change(layer):
        x = without(sample(name, [23]), "batch")
        first = layer(**{key: part[:13] for key, part in x.items()})
        return error([part[:13] for part in layer(**x)], first)

    assert change(make(name)) <= 1e-12
    assert change(make("causal")) > 1e-6
    assert change(make("implicit")) > 1e-6


def test_a_chain_among_zeros_is_as_alone(make):
    """Wherever it stands, if neighbors reach as many zeros next to the ends; the filter that is data knows places."""

    def among_zeros(layer, x, start):
        scalars, vectors = torch.zeros(31, S).double(), torch.zeros(31, V, 3).double()
        scalars[start : start + 7], vectors[start : start + 7] = x["scalars"], x["vectors"]
        return [part[start : start + 7] for part in layer(scalars, vectors)]

    def changes(name):
        layer, x = make(name), sample(name, [7])
        alone = layer(x["scalars"], x["vectors"])
        wanted = among_zeros(layer, x, 2) if name in ("implicit", "implicit wide") else alone
        assert all(part.abs().max() > 1e-2 for part in wanted)
        assert (error(wanted, alone) > 1e-3) == (name in ("implicit", "implicit wide"))
        return [error(among_zeros(layer, x, start), wanted) for start in (3, 9, 22)]

    for name in ("implicit", "implicit wide", "implicit bare", "implicit causal", "exponential"):
        assert max(changes(name)) <= 1e-12
    assert min(changes("plain")) > 1e-3
    assert min(changes("short causal")) > 1e-3


def test_parameters_as_published():
    for options in ({"hidden_scalars": 16, "hidden_vectors": 128, "num_layers": 3}, {}):
        assert 750_000 < sum(p.numel() for p in SE3Hyena(16, 128, **options).parameters()) < 900_000


SCALARS = [{"out_vectors": 0}, {"out_vectors": 2, "hidden_vectors": 3}]
VECTORS = [*({"hidden_scalars": 0, "short_conv": 3, "filter": f} for f in ("data", "implicit")), {"hidden_scalars": 2}]


@pytest.mark.parametrize(
    ("sizes", "options"), [*(((S, 0), o) for o in SCALARS), *(((0, V), {"out_scalars": 2} | o) for o in VECTORS)]
)
def test_scalars_or_vectors_only(sizes, options, randomise):
    """What is not there may be None, or have no channels."""
    layer, x = randomise(SE3HyenaOperator(*sizes, **options)).double(), sample("plain", [11])
    scalars, vectors = x["scalars"][:, : sizes[0]], x["vectors"][:, : sizes[1]]
    out, grades = layer(scalars, vectors, pos=x["pos"]), layer.module.out_grades
    assert [part.shape for part in out] == [(11, grades.scalars), (11, grades.vectors, 3)]
    close(out, layer(scalars if sizes[0] else None, vectors if sizes[1] else None, pos=x["pos"]), 0)


def test_vectors_from_scalars_need_positions():
    with pytest.raises(ValueError, match=r"^pos must be given"):
        SE3HyenaOperator(S, 0, out_vectors=2, hidden_vectors=3)(torch.ones(11, S), None)


@pytest.mark.parametrize("cls", [VectorSelfAttention, SE3HyenaOperator])
@pytest.mark.parametrize("lengths", [None, [1901, 2003]])
def test_nothing_of_all_pairs_exists(cls, lengths):
    layer, tokens = cls(2, 3), 2003
    with Largest() as largest:
        out = layer(torch.randn(2, tokens, 2), torch.randn(2, tokens, 3, 3), lengths and torch.tensor(lengths))
        sum(part.sum() for part in out).backward()
    assert tokens < largest.count < tokens**2


@pytest.mark.parametrize("kind", [SE3HyenaOperator, SE3Hyena, VectorSelfAttention])
@pytest.mark.parametrize("hidden", [{}, {"hidden_scalars": 5}])
def test_vectors_alone_keep_their_length(kind, hidden):
    """New layers do not jump where a vector passes through zero, and small vectors have small effects."""
    implicit = {"filter": "implicit", "causal": True}
    options = {SE3HyenaOperator: implicit, SE3Hyena: {"attn_kwargs": implicit}, VectorSelfAttention: {}}[kind]
    layer, steps = kind(0, V, out_vectors=V, **options, **hidden).double(), double(17, V, 3)
    steps[10] = 0

    def moved_by(size):
        moved = steps.clone()
        moved[10, 0, 0] = size
        return moved.requires_grad_()

    out = layer(None, moved_by(0))[1]
    assert (layer(None, moved_by(1e-6))[1] - out).abs().max() < 1e-4
    assert (layer(None, moved_by(1))[1] - out).abs().max() > 1e-2
    for size in (0, 1e-6, 1e-3):
        x = moved_by(size)
        assert torch.autograd.grad(layer(None, x)[1][10:].sum(), x)[0].abs().max() < 100


@pytest.mark.parametrize("name", ["plain", "radial local", "pooled", "implicit", "implicit causal model", "attention"])
def test_nothing_and_one_token(name, make):
    layer, x = make(name), sample(name, [1])
    close([part[:1] for part in layer(**x)], layer(**{k: v for k, v in x.items() if k != "batch"}))
    nothing = {key: value[:0] if key != "edge_index" else value[:, :0] for key, value in x.items()}
    for size, b in ((None, 0), (3, 3)):
        scalars, vectors = layer(**nothing, batch_size=size)
        assert scalars.shape[0] == vectors.shape[0] == (b if layer.module.pool else 0)
        assert vectors.shape[1:] == (layer.module.out_grades.vectors, 3)
        (scalars.sum() + vectors.sum()).backward()
    for b, n in ((0, 5), (3, 0), (0, 0)):
        y = {"scalars": torch.ones(b, n, S), "vectors": torch.ones(b, n, V, 3)}
        y |= {"pos": torch.ones(b, n, 3)} if "pos" in x else {}
        y = {key: value.double() for key, value in y.items()} | {k: nothing[k] for k in nothing if "edge" in k}
        for lengths in (None, torch.zeros(b, dtype=torch.int64)):
            scalars, vectors = layer(**y, lengths=lengths)
            assert scalars.shape == ((b,) if layer.module.pool else (b, n)) + (layer.module.out_grades.scalars,)
            assert vectors.shape[:-2] == scalars.shape[:-1]


X = {"scalars": torch.ones(2, 5, S), "vectors": torch.ones(2, 5, V, 3)}
F = {"scalars": torch.ones(6, S), "vectors": torch.ones(6, V, 3), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}
POS, EDGES = {"pos": torch.ones(6, 3)}, {"edge_index": torch.tensor([[0, 1], [1, 2]])}
ATTR = {"edge_attr": torch.ones(2, EDGE)}


@pytest.mark.parametrize(
    ("message", "name", "arguments"),
    [
        (r"scalars must be \(B, N, 3\)", "plain", X | {"scalars": torch.ones(2, 5, 4)}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(2, 5, V, 2)}),
        ("^vectors must be given", "plain", {"scalars": None, "vectors": None}),
        ("^vectors must be torch.float32", "plain", X | {"vectors": X["vectors"].double()}),
        ("batch must be None", "plain", X | {"batch": torch.zeros(10).long()}),
        ("lengths must be None", "plain", F | {"lengths": torch.tensor([3, 3])}),
        ("max_num_nodes must be at least 3", "plain", F | {"batch_size": 2, "max_num_nodes": 2}),
        (r"^pos must be real numbers of shape \(6, 3\)", "plain", F | {"pos": torch.ones(6, 2)}),
        ("^pos must be given with order='radial'", "radial", F),
        (r"index must have shape \(2, 5\)", "plain", X | {"index": torch.arange(10)}),
        ("edge_index must be given", "local", F | POS),
        ("edge_index must be None", "plain", F | EDGES),
        ("edge_attr must have edge_channels=4", "local", F | POS | EDGES),
        ("edge_attr must have edge_channels=0", "local bare", F | POS | EDGES | ATTR),
        (r"edge_attr must be real numbers of shape \(2, 4\)", "local", F | EDGES | {"edge_attr": torch.ones(2, 3)}),
        (r"edge_index must be int64 \(2, E\)", "local", F | ATTR | {"edge_index": torch.ones(2, 2)}),
    ],
)  # fmt: skip
def test_bad_input(message, name, arguments, make):
    with pytest.raises(ValueError, match=message):
        make(name, torch.float32)(**arguments)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("scalar_channels and vector_channels must not both be 0", {"scalar_channels": 0, "vector_channels": 0}),
        ("out_vectors must be reachable", {"hidden_vectors": 0}),
        ("short_conv must be None or an odd number", {"short_conv": 4}),
        ("edge_channels=2 needs local_context", {"edge_channels": 2}),
    ],
)
def test_bad_options(message, options):
    with pytest.raises(ValueError, match=message):
        SE3HyenaOperator(**{"scalar_channels": S, "vector_channels": V} | options)
