"""SE(3)-Hyena against a slow evaluation of Algorithm 1, its symmetries, ragged batches, compilation, errors."""

import copy

import pytest
import torch
from clouds import (
    EDGE,
    SIZES,
    S,
    V,
    check_batch_equals_each_alone,
    close,
    dense,
    gradients,
    moved,
    one,
    permuted,
    sample,
    within,
)
from oracles import graded_sequence
from space import error, flipped_sign, motion, move

from tg_equiattn.nn import SE3Hyena, SE3HyenaOperator
from tg_equiattn.sequences import Sequences
from tg_equiattn.testing import TOLERANCE

LOCAL = {"local_context": True, "edge_channels": EDGE}
SMALL = {"hidden_scalars": 5, "hidden_vectors": 7, "gate_channels": 3}
OPTIONS = {
    "plain": (SE3HyenaOperator, {}),
    "causal": (SE3HyenaOperator, {"mode": "causal", "num_blocks": 2}),
    "widths": (SE3HyenaOperator, {"out_scalars": 1, "out_vectors": 5, "mlp_channels": 3, **SMALL}),
    "vectors": (SE3HyenaOperator, {"out_scalars": 0, "hidden_scalars": 0}),
    "local": (SE3HyenaOperator, {**LOCAL, "mlp_channels": 5}),
    "local bare": (SE3HyenaOperator, {"local_context": True}),
    "radial": (SE3HyenaOperator, {"order": "radial"}),
    "model": (SE3Hyena, {"depth": 2, **SMALL}),
    "pooled": (SE3Hyena, {"out_scalars": 1, "out_vectors": 2, "depth": 1, "pool": "mean", "mode": "causal", **SMALL}),
    "radial local": (SE3Hyena, {"depth": 1, "order": "radial", **LOCAL, **SMALL}),
}


@pytest.fixture
def make(randomise):
    def make(name, dtype=torch.float64):
        kind, options = OPTIONS[name]
        return randomise(kind(S, V, **options)).to(dtype)

    return make


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_algorithm_1(name, n, make, device):
    layer, x = make(name), sample(name, [n])
    del x["batch"]
    inputs = [x[key].requires_grad_() for key in ("scalars", "vectors", "pos")] + list(layer.parameters())
    order = torch.arange(n)
    if layer.order == "radial":
        order = (x["pos"] - x["pos"].mean(0)).norm(dim=-1).argsort()
    y = permuted({**x, "batch": order}, order)
    del y["batch"]
    expected = graded_sequence(layer.module, **y)
    if not layer.module.pool:
        expected = tuple(part[order.argsort()] for part in expected)
    wanted = gradients(expected, inputs)
    out = layer.to(device)(**{key: value.to(device) for key, value in x.items()})
    out = tuple(part.cpu() for part in out)
    close(out, expected, 1e-10)
    close([g.cpu() for g in gradients(out, inputs)], [g.cpu() for g in wanted], 1e-8)


def test_without_positions(make):
    for name in ("plain", "model"):
        layer, x = make(name), sample(name, [7])
        close(layer(x["scalars"], x["vectors"]), graded_sequence(layer.module, x["scalars"], x["vectors"]), 1e-10)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, name, reflect, make, device):
    layer, x = make(name, dtype).to(device), sample(name, [31, 1, 17], dtype, device)
    r, shift = motion(dtype, reflect, device), torch.randn(3, 3, dtype=dtype, device=device)
    scalars, vectors = layer(**x)
    assert error(layer(**moved(x, r, shift)), (scalars, move(vectors, r))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["radial", "radial local"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_permutations_with_radial_order(on_device, dtype, name, make):
    """Two tokens lie equally far from their centroid; their scalars decide."""
    sizes = [31, 1, 2, 17]
    layer, x, p, r = make(name, dtype), sample(name, sizes, dtype), within(sizes), motion(dtype, True)
    scalars, vectors = layer(**x)
    assert error(layer(**permuted(x, p)), (scalars[p], vectors[p])) <= TOLERANCE[dtype]
    both = permuted(moved(x, r, torch.randn(4, 3, dtype=dtype)), p)
    assert error(layer(**both), (scalars[p], move(vectors[p], r))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["plain", "local", "model"])
def test_permutations_are_seen_in_input_order(name, make):
    layer, x, p = make(name), sample(name, [31]), torch.randperm(31)
    scalars, vectors = layer(**x)
    assert error(layer(**permuted(x, p)), (scalars[p], vectors[p])) > 1e-3
    del x["batch"], x["pos"]
    if name == "plain":
        with pytest.raises(ValueError, match=r"^pos must be given"):
            make("radial")(**x)


def test_broken_equivariance_is_seen(make, monkeypatch):
    layer, x, r = make("plain"), sample("plain", [31]), motion()
    none, shift = torch.zeros(1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)

    def broken(change, shift=none):
        a, b = layer(**change(x)), layer(**change(moved(x, r, shift)))
        return error(b, (a[0], move(a[1], r)))

    assert broken(lambda x: x, shift) <= 1e-10
    assert broken(lambda x: {**x, "vectors": x["vectors"][..., [1, 0, 2]]}) > 1e-3
    assert broken(lambda x: {**x, "pos": x["pos"][..., [1, 0, 2]]}) > 1e-3
    assert broken(lambda x: {**x, "scalars": x["pos"]}) > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(Sequences, "centred", lambda self, pos: pos)
        assert broken(lambda x: x) <= 1e-10
        assert broken(lambda x: x, shift) > 1e-3
    with flipped_sign():
        assert broken(lambda x: x) > 1e-3


def test_causal_sees_no_later_token(make):
    layer, x = make("causal"), sample("causal", [11])
    del x["pos"]  # their mean is of all tokens
    out = layer(**x)
    later = {**x, "scalars": x["scalars"].clone(), "vectors": x["vectors"].clone()}
    later["scalars"][6:], later["vectors"][6:] = 3, -2
    changed = layer(**later)
    close([part[:6] for part in changed], [part[:6] for part in out], 1e-10)
    assert error([part[6:] for part in changed], [part[6:] for part in out]) > 1e-2


@pytest.mark.parametrize("name", OPTIONS)
def test_ragged_equals_each_alone(on_device, name, make):
    layer, x = make(name), sample(name, SIZES)
    out = layer(**x)
    parts = [layer(**one(x, b)) for b, n in enumerate(SIZES) if n]
    alone = [torch.cat(part) for part in zip(*parts, strict=True)]
    full = torch.tensor(SIZES) > 0
    close([part[full] for part in out] if layer.module.pool else out, alone)
    bounded = layer(**x, batch_size=len(SIZES), max_num_nodes=41)
    close(bounded, out)
    padded, there = dense(x, SIZES, 41, torch.nan)
    if layer.module.pool:
        close(layer(**padded), out)
        return
    for got, wanted in zip(layer(**padded), out, strict=True):
        torch.testing.assert_close(got[there], wanted, rtol=1e-12, atol=1e-12)
        assert not got[~there].any()


@pytest.mark.parametrize("name", ["plain", "pooled"])
@pytest.mark.parametrize("sizes", [[0, 3, 0], [5, 5, 0, 5], [0, 1, 1, 1]])
def test_empty_sequences_among_equal_ones(on_device, sizes, name, make):
    layer, x = make(name), sample(name, sizes)
    out = layer(**x, batch_size=len(sizes))
    parts = [layer(**one(x, b)) for b, n in enumerate(sizes) if n]
    alone = [torch.cat(part) for part in zip(*parts, strict=True)]
    full = torch.tensor(sizes) > 0
    close([part[full] for part in out] if layer.module.pool else out, alone)


def test_an_empty_sequence_pools_to_the_same_whatever_the_padding(make):
    """Also where there are as many tokens as sequences."""
    layer, x = make("pooled"), sample("pooled", [1, 1])
    outs = [layer(**dense(x, [1, 0, 1], longest, 0.0)[0]) for longest in (1, 2, 5)]
    close(outs[0], outs[1])
    close(outs[2], outs[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["plain", "local", "radial", "radial local", "pooled"])
def test_nan_stays_in_its_sequence(on_device, name, bad, make):
    sizes = [5, 4, 1, 6]
    layer, x = make(name), sample(name, sizes)
    expected = layer(**x)
    others = torch.arange(4) != 1 if layer.module.pool else x["batch"] != 1
    for key in ("scalars", "vectors", "pos"):
        broken = {**x, key: x[key].clone()}
        broken[key][7, 0] = bad
        out = layer(**broken)
        assert not out[1].isfinite().all()
        close([part[others] for part in out], [part[others] for part in expected])
        padded, there = dense(broken, sizes, 7, 0.0)
        out = layer(**padded)
        out = out if layer.module.pool else [part[there] for part in out]
        close([part[others] for part in out], [part[others] for part in expected])


@pytest.mark.parametrize("name", ["plain", "radial local", "pooled"])
def test_padding_is_never_read(name, make):
    """NaN in it changes neither outputs nor gradients of parameters, and gets none itself."""
    layer, x = make(name), sample(name, [5, 0, 3])
    results = []
    for fill in (0.0, torch.nan):
        padded, there = dense(x, [5, 0, 3], 7, fill)
        inputs = [padded[key].requires_grad_() for key in ("scalars", "vectors", "pos")]
        out = layer(**padded)
        grads = gradients(out, inputs + list(layer.parameters()))
        assert not any(g[~there].any() for g in grads[:3])
        results.append((*out, *grads))
    close(*results)


@pytest.mark.parametrize("name", ["plain", "local", "radial local"])
def test_blocks_of_tokens_change_nothing(name, randomise):
    """A batch of so many tokens that every MLP takes several blocks of them, which cut its sequences, against each
    sequence alone, in one."""
    kind, options = OPTIONS[name]
    layer, sizes = randomise(kind(S, V, **{**options, "mlp_channels": 128}), 0.2).double(), [500, 17, 510]
    network = layer.module.operators[0] if name == "radial local" else layer.module
    assert max(sizes) < network.project.tokens_per_block(torch.device("cpu")) < sum(sizes) / 2
    check_batch_equals_each_alone(layer, sample(name, sizes, edges=1), sizes)


def test_a_given_order_is_that_of_the_sequence(make):
    layer, x, sizes = make("model"), sample("model", [7, 1, 5]), [7, 1, 5]
    order = within(sizes)
    expected = layer(**permuted(x, order))
    close([part[order] for part in layer(**x, order=order)], expected)
    padded, there = dense(x, sizes, 9, 0.0)
    places = torch.arange(9).repeat(3, 1)
    places[there] = order - torch.tensor([0, 7, 8])[x["batch"]]
    close([part[there][order] for part in layer(**padded, order=places)], expected)
    kind, options = OPTIONS["model"]
    radial = kind(S, V, **options, order="radial").double()
    radial.load_state_dict(layer.state_dict())
    assert error(radial(**x), layer(**x)) > 1e-3
    close(radial(**x, order=order), layer(**x, order=order))


def test_scalars_or_vectors_only(randomise):
    x = sample("plain", [11])
    scalars, vectors = randomise(SE3HyenaOperator(S, 0, out_vectors=0)).double()(x["scalars"], None)
    assert scalars.shape == (11, S)
    assert vectors.shape == (11, 0, 3)
    layer = randomise(SE3HyenaOperator(S, 0, out_vectors=2, hidden_vectors=3)).double()
    assert layer(x["scalars"], None, pos=x["pos"])[1].shape == (11, 2, 3)
    with pytest.raises(ValueError, match=r"^pos must be given"):
        layer(x["scalars"], None)
    layer = randomise(SE3HyenaOperator(0, V, out_scalars=1, hidden_scalars=2)).double()
    assert layer(None, x["vectors"])[0].shape == (11, 1)
    empty = layer(x["scalars"][:, :0], x["vectors"])
    close(empty, layer(None, x["vectors"]), 0)


@pytest.mark.parametrize("name", ["plain", "radial local", "pooled"])
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
        y = {"scalars": torch.ones(b, n, S), "vectors": torch.ones(b, n, V, 3), "pos": torch.ones(b, n, 3)}
        y = {key: value.double() for key, value in y.items()} | {k: nothing[k] for k in nothing if "edge" in k}
        for lengths in (None, torch.zeros(b, dtype=torch.int64)):
            scalars, vectors = layer(**y, lengths=lengths)
            assert scalars.shape == ((b,) if layer.module.pool else (b, n)) + (layer.module.out_grades.scalars,)
            assert vectors.shape[:-2] == scalars.shape[:-1]
    all_empty, _ = dense(x, [1], 3, 0.0)
    all_empty["lengths"] = torch.zeros(1, dtype=torch.int64)
    if "local" in name:
        all_empty |= {"edge_index": nothing["edge_index"], "edge_attr": nothing["edge_attr"]}
    for part in layer(**all_empty):
        assert part.isfinite().all()
        assert layer.module.pool or not part.any()


@pytest.mark.parametrize("name", ["plain", "local"])
def test_gradcheck_twice(name, randomise):
    """First and second derivatives, forces included, on a tiny case."""
    options = {**OPTIONS[name][1], "num_blocks": 1, "gate_channels": 1, "mlp_channels": 1}
    options |= {"edge_channels": 1} if name == "local" else {}
    layer = randomise(SE3HyenaOperator(1, 1, **options)).double()
    edges = {"edge_index": torch.tensor([[0, 2], [1, 0]])} if name == "local" else {}
    batch = torch.tensor([0, 0, 0, 1])
    inputs = [torch.randn(4, *shape, dtype=torch.float64, requires_grad=True) for shape in ((1,), (1, 3), (3,))]
    inputs += [torch.randn(2, 1, dtype=torch.float64, requires_grad=True)] * bool(edges)

    def run(scalars, vectors, positions, edge_attr=None):
        return layer(scalars, vectors, batch=batch, pos=positions, edge_attr=edge_attr, **edges)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_training_on_forces(make):
    """Derivatives of forces by parameters, blocks of tokens included, against finite differences."""
    layer, x = make("radial local"), sample("radial local", [7, 5])

    def loss():
        positions = x["pos"].detach().requires_grad_()
        energy = layer(**{**x, "pos": positions})[0].sum()
        return torch.autograd.grad(energy, positions, create_graph=True)[0].square().sum()

    parameters = [p for p in layer.parameters() if p.numel()]
    grads = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += step * d
        values.append(loss().detach())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope.detach(), rtol=1e-5, atol=1e-6)


class Whole(torch.nn.Module):
    """All arguments in one, as check_copies calls it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(**x)


@pytest.mark.parametrize("name", ["widths", "radial local", "pooled"])
def test_copies(name, make, check_copies):
    kind, options = OPTIONS[name]
    check_copies(lambda: Whole(kind(S, V, **options).double()), Whole(make(name)), sample(name, [7, 3]))


@pytest.mark.parametrize("name", ["plain", "radial local"])
def test_reset_and_repr(name, make):
    layer, x = make(name), sample(name, [7, 3])
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    assert all(not torch.equal(before[key], value) for key, value in layer.state_dict().items())
    assert all(part.isfinite().all() for part in layer(**x))
    assert f"3, 2 -> 3, 2, order='{'radial' if 'radial' in name else 'input'}'" in repr(layer)


def test_parameters_as_published():
    count = sum(p.numel() for p in SE3Hyena(16, 128, hidden_scalars=16, hidden_vectors=128, depth=3).parameters())
    assert 750_000 < count < 900_000
    count = sum(p.numel() for p in SE3Hyena(16, 128).parameters())
    assert 750_000 < count < 900_000


@pytest.mark.parametrize(("name", "flat"), [("radial", False), ("pooled", True)])
def test_compiles_whole(on_device, name, flat, make):
    layer, sizes = make(name, torch.float32), [7, 3]
    x = sample(name, sizes, torch.float32)
    arguments = {**x, "batch_size": 2, "max_num_nodes": 9} if flat else dense(x, sizes, 9, 0.0)[0]
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(**arguments), layer(**arguments)
    close(got, wanted, 1e-4)
    parameters = list(layer.parameters())
    for a, b in zip(gradients(got, parameters), gradients(wanted, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_compiling_needs_the_sizes(make):
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="batch_size and max_num_nodes must be given"):
        torch.compile(make("plain"), fullgraph=True, backend="aot_eager")(**sample("plain", [7, 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "radial local", "pooled"])
def test_mixed_precision(on_device, name, dtype, make):
    layer, x = make(name, torch.float32), sample(name, [7, 3], torch.float32)
    expected = layer(**x)
    with torch.autocast(on_device, dtype):
        out = layer(**x)
        half = layer(**{**x, "scalars": x["scalars"].to(dtype), "vectors": x["vectors"].to(dtype)})
    assert error([part.float() for part in out], expected) < 1e-5 + 5e-2
    assert all(part.isfinite().all() for part in half)


X = {"scalars": torch.ones(2, 5, S), "vectors": torch.ones(2, 5, V, 3)}
F = {"scalars": torch.ones(6, S), "vectors": torch.ones(6, V, 3), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}
POS, EDGES = {"pos": torch.ones(6, 3)}, {"edge_index": torch.tensor([[0, 1], [1, 2]])}
ATTR = {"edge_attr": torch.ones(2, EDGE)}


@pytest.mark.parametrize(
    ("message", "name", "arguments"),
    [
        (r"scalars must be \(B, N, 3\)", "plain", X | {"scalars": torch.ones(2, 5, 4)}),
        (r"scalars must be \(B, N, 3\)", "plain", X | {"scalars": None}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(2, 5, V, 2)}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(2, 5, 3, 3)}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(2, 4, V, 3)}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": None}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(10, V, 3)}),
        ("^vectors must be given", "plain", {"scalars": None, "vectors": None}),
        ("^scalars must be a floating point tensor", "plain", X | {"scalars": X["scalars"].long()}),
        ("^vectors must be a floating point tensor", "plain", X | {"vectors": X["vectors"].int()}),
        ("^vectors must be torch.float32", "plain", X | {"vectors": X["vectors"].double()}),
        ("lengths must be int64", "plain", X | {"lengths": torch.ones(2)}),
        ("lengths must be int64", "plain", X | {"lengths": torch.ones(3).long()}),
        (r"lengths must be in \[0, 5\]", "plain", X | {"lengths": torch.tensor([6, 1])}),
        (r"lengths must be in \[0, 5\]", "plain", X | {"lengths": torch.tensor([1, -1])}),
        ("lengths must be None", "plain", F | {"lengths": torch.tensor([3, 3])}),
        ("batch must be None", "plain", X | {"batch": torch.zeros(10).long()}),
        ("batch must be sorted", "plain", F | {"batch": torch.tensor([0, 0, 1, 0, 1, 1])}),
        ("batch must be int64", "plain", F | {"batch": torch.zeros(6)}),
        ("batch must be int64", "plain", F | {"batch": torch.zeros(5).long()}),
        ("batch must be in", "plain", F | {"batch_size": 1}),
        ("batch must be given", "plain", {**F, "batch": None, "batch_size": 2}),
        ("batch_size must be a positive", "plain", F | {"batch_size": 0}),
        ("max_num_nodes must be at least 3", "plain", F | {"batch_size": 2, "max_num_nodes": 2}),
        (r"^pos must have shape \(6, 3\)", "plain", F | {"pos": torch.ones(6, 2)}),
        (r"^pos must have shape \(2, 5, 3\)", "plain", X | {"pos": torch.ones(10, 3)}),
        (r"^pos must be real", "plain", F | {"pos": torch.ones(6, 3).bool()}),
        ("^pos must be given with order='radial'", "radial", F),
        (r"order must have shape \(2, 5\)", "plain", X | {"order": torch.arange(10)}),
        ("order must be int64 with 6", "plain", F | {"order": torch.arange(6.0)}),
        ("order must be int64 with 6", "plain", F | {"order": torch.arange(5)}),
        ("order must be a permutation", "plain", F | {"order": torch.tensor([0, 1, 1, 3, 4, 5])}),
        ("order must be a permutation", "plain", F | {"order": torch.tensor([0, 1, 3, 2, 4, 5])}),
        ("order must be a permutation", "plain", F | {"order": torch.tensor([-1, 1, 3, 2, 4, 5])}),
        ("edge_index must be given", "local", F | POS),
        ("edge_index must be None", "plain", F | EDGES),
        ("edge_attr must have edge_channels=4", "local", F | POS | EDGES),
        ("edge_attr must have edge_channels=0", "local bare", F | POS | EDGES | ATTR),
        ("edge_attr must have edge_channels=0", "plain", F | ATTR),
        (r"edge_attr must be real numbers of shape \(2, 4\)", "local", F | EDGES | {"edge_attr": torch.ones(2, 3)}),
        (r"edge_attr must be real numbers of shape \(2, 4\)", "local", F | EDGES | {"edge_attr": torch.ones(3, 4)}),
        (r"edge_attr must be real numbers of shape \(2, 4\)", "local", F | EDGES | {"edge_attr": torch.ones(2)}),
        (r"edge_index must be int64 \(2, E\)", "local", F | ATTR | {"edge_index": torch.ones(2, 2)}),
        (r"edge_index must be int64 \(2, E\)", "local", F | ATTR | {"edge_index": torch.ones(3, 2).long()}),
        (r"edge_index must be int64 \(2, E\)", "local", F | ATTR | {"edge_index": torch.ones(2).long()}),
        (r"edge_index must join nodes in \[0, 6\)", "local", F | ATTR | {"edge_index": torch.tensor([[0, 6], [1, 5]])}),
        ("edge_index must join nodes in", "local", F | ATTR | {"edge_index": torch.tensor([[0, -1], [1, 0]])}),
        ("edge_index must join nodes of the same", "local", F | ATTR | {"edge_index": torch.tensor([[0, 2], [1, 3]])}),
        ("edge_index must join tokens that exist", "local", X | EDGES | ATTR | {"lengths": torch.tensor([2, 5])}),
    ],
)  # fmt: skip
def test_bad_input(message, name, arguments):
    kind, options = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        kind(S, V, **options)(**arguments)


def test_half_precision_on_the_cpu_needs_autocast():
    layer = SE3HyenaOperator(S, V).half()
    arguments = {key: value.half() for key, value in X.items()}
    with pytest.raises(ValueError, match="scalars must be float32 or float64"):
        layer(**arguments)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("scalar_channels must be an integer", {"scalar_channels": -1}),
        ("vector_channels must be an integer", {"vector_channels": 2.0}),
        ("scalar_channels and vector_channels must not both be 0", {"scalar_channels": 0, "vector_channels": 0}),
        ("out_scalars and out_vectors must not both be 0", {"out_scalars": 0, "out_vectors": 0}),
        ("hidden_scalars and hidden_vectors must not both be 0", {"hidden_scalars": 0, "hidden_vectors": 0}),
        ("out_vectors must be an integer", {"out_vectors": True}),
        ("out_vectors must be reachable", {"hidden_vectors": 0}),
        ("mlp_channels must be a positive", {"mlp_channels": 0}),
        ("gate_channels must be a positive", {"gate_channels": 0}),
        ("num_blocks must be a positive", {"num_blocks": 0}),
        ("mode must be one of", {"mode": "linear"}),
        ("order must be one of", {"order": "random"}),
        ("order must be one of", {"order": torch.arange(5)}),
        ("edge_channels must be 0 without local_context", {"edge_channels": 2}),
        ("edge_channels must be an integer", {"local_context": True, "edge_channels": -1}),
    ],
)
@pytest.mark.parametrize("kind", [SE3HyenaOperator, SE3Hyena])
def test_bad_options(kind, message, options):
    with pytest.raises(ValueError, match=message):
        kind(**{"scalar_channels": S, "vector_channels": V} | options)


@pytest.mark.parametrize(
    ("message", "options"), [("depth must be a positive", {"depth": 0}), ("pool must be None or", {"pool": "max"})]
)
def test_bad_model_options(message, options):
    with pytest.raises(ValueError, match=message):
        SE3Hyena(S, V, **options)


def test_whole_number_positions_far_away(make):
    layer, x = make("plain", torch.float32), sample("plain", [11], torch.float32)
    pos = (10 * x["pos"]).round().long()
    near, far = (layer(**{**x, "pos": p}) for p in (pos, pos + 10**9))
    for a, b in zip(near, far, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_every_parameter_has_a_gradient_without_edges(randomise):
    layer = randomise(SE3HyenaOperator(S, V, local_context=True, edge_channels=2))
    none = {"edge_index": torch.zeros(2, 0, dtype=torch.int64), "edge_attr": torch.zeros(0, 2)}
    out = layer(torch.randn(5, S), torch.randn(5, V, 3), pos=torch.randn(5, 3), **none)
    sum(part.sum() for part in out).backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("order must be a permutation as a tensor", {"order": "radial"}),
        ("pos must be a tensor", {"pos": [1.0]}),
        ("edge_index must be a tensor", {"edge_index": [[0], [1]], "local": True}),
        ("parameters must be float32 or float64", {"half": True}),
    ],
)
def test_arguments_of_other_types(message, arguments):
    layer = SE3HyenaOperator(S, V, local_context=arguments.pop("local", False))
    layer = layer.bfloat16() if arguments.pop("half", False) else layer
    with pytest.raises(ValueError, match=f"^{message}"), torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(2, 5, S), torch.randn(2, 5, V, 3), **arguments)
