"""Vector self-attention as layer and model: slow evaluation, symmetries, ragged batches, compilation, errors."""

import pytest
import torch
from clouds import EDGE, SIZES, S, V, check_batch_equals_each_alone, close, dense, gradients, one, sample
from hyena_layers import as_model
from oracles import token_network
from space import error, flipped_sign, motion, move
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tg_equiattn.nn import SE3HyenaOperator, VectorSelfAttention, VectorTransformer
from tg_equiattn.nn.vector import clifford
from tg_equiattn.testing import TOLERANCE

SMALL = {"hidden_scalars": 5, "hidden_vectors": 7}
LOCAL = {"local_context": True, "edge_channels": EDGE}
OPTIONS = {
    "plain": (VectorSelfAttention, {}),
    "widths": (VectorSelfAttention, {"out_scalars": 1, "out_vectors": 5, **SMALL}),
    "local": (VectorSelfAttention, LOCAL),
    "short": (VectorSelfAttention, {"short_conv": 3}),
    "two blocks": (VectorTransformer, {"depth": 2, "options": {"num_blocks": 2}, **SMALL}),
    "pooled local": (VectorTransformer, {"out_scalars": 0, "depth": 1, "pool": "mean", "options": LOCAL, **SMALL}),
}


@pytest.fixture
def make(randomise):
    def make(name, dtype=torch.float64):
        kind, options = OPTIONS[name]
        return randomise(kind(S, V, **options)).to(dtype)

    return make


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_definition(name, n, make, device):
    layer, x = make(name), sample(name, [n])
    del x["batch"]
    inputs = [x[key].requires_grad_() for key in ("scalars", "vectors", "pos")] + list(layer.parameters())
    expected = token_network(layer.module, **x)
    wanted = gradients(expected, inputs)
    out = layer.to(device)(**{key: value.to(device) for key, value in x.items()})
    close([part.cpu() for part in out], expected, 1e-10)
    close([g.cpu() for g in gradients(out, inputs)], [g.cpu() for g in wanted], 1e-7)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivariant(dtype, name, reflect, make, device):
    """To a motion and, at once, a permutation of every sequence's tokens and of the edges."""
    sizes = [31, 1, 17]
    layer, x = make(name, dtype).to(device), sample(name, sizes, dtype, device)
    r, shift = motion(dtype, reflect, device), torch.randn(3, 3, dtype=dtype, device=device)
    p = torch.cat([sum(sizes[:b]) + torch.randperm(n) for b, n in enumerate(sizes)]).to(device)
    p = torch.arange(sum(sizes), device=device) if name == "short" else p
    moved = {**x, "vectors": move(x["vectors"], r), "pos": move(x["pos"], r) + shift[x["batch"]]}
    moved |= {key: moved[key][p] for key in ("scalars", "vectors", "pos", "batch")}
    if "local" in name:
        e = torch.randperm(x["edge_index"].shape[1], device=device)
        moved |= {"edge_index": p.argsort()[x["edge_index"][:, e]], "edge_attr": x["edge_attr"][e]}
    scalars, vectors = layer(**x)
    wanted = (scalars, move(vectors, r)) if layer.module.pool else (scalars[p], move(vectors[p], r))
    assert error(layer(**moved), wanted) <= TOLERANCE[dtype]


def test_broken_equivariance_is_seen(make):
    layer, x, r = make("plain"), sample("plain", [31]), motion()

    def broken(change):
        moved = {**x, "vectors": move(x["vectors"], r), "pos": move(x["pos"], r)}
        a, b = layer(**change(x)), layer(**change(moved))
        return error(b, (a[0], move(a[1], r)))

    assert broken(lambda x: x) <= 1e-10
    short, order = make("short"), torch.randperm(31)
    relabelled = {key: part[order] for key, part in x.items()}
    assert error(short(**relabelled), [part[order] for part in short(**x)]) > 1e-3  # neighbors have an order
    assert broken(lambda x: {**x, "vectors": x["vectors"][..., [1, 0, 2]]}) > 1e-3
    assert broken(lambda x: {**x, "scalars": x["pos"]}) > 1e-3
    with flipped_sign():
        assert broken(lambda x: x) > 1e-3


@pytest.mark.parametrize("name", OPTIONS)
def test_ragged_equals_each_alone(on_device, name, make):
    layer, x = make(name), sample(name, SIZES)
    out = layer(**x)
    parts = [layer(**one(x, b)) for b, n in enumerate(SIZES) if n]
    alone = [torch.cat(part) for part in zip(*parts, strict=True)]
    full = torch.tensor(SIZES) > 0
    close([part[full] for part in out] if layer.module.pool else out, alone)
    close(layer(**x, batch_size=len(SIZES), max_num_nodes=41), out)
    padded, there = dense(x, SIZES, 41, torch.nan)
    got = layer(**padded)
    close(got if layer.module.pool else [part[there] for part in got], out)
    assert layer.module.pool or not any(part[~there].any() for part in got)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["plain", "two blocks", "pooled local"])
def test_nan_stays_in_its_sequence(on_device, name, bad, make):
    sizes = [5, 4, 1, 6]
    layer, x = make(name), sample(name, sizes)
    expected = layer(**x)
    others = torch.arange(4) != 1 if layer.module.pool else x["batch"] != 1
    for key in ("scalars", "vectors", "pos"):
        broken = {**x, key: x[key].clone()}
        broken[key][7, 0] = bad
        padded, there = dense(broken, sizes, 7, 0.0)
        padded = layer(**padded)
        for out in (layer(**broken), padded if layer.module.pool else [part[there] for part in padded]):
            assert not out[1][~others].isfinite().all()
            close([part[others] for part in out], [part[others] for part in expected])


@pytest.mark.parametrize("name", ["plain", "local"])
def test_blocks_of_tokens_change_nothing(name, randomise, monkeypatch):
    """A batch of so many tokens that every MLP takes several blocks of them, which cut its sequences, against each
    sequence alone, in one; attention takes tiles of 512 keys of either."""
    monkeypatch.setattr(clifford, "BLOCK_NUMBERS", 1536)
    kind, options = OPTIONS[name]
    layer, sizes = randomise(kind(S, V, **options), 0.2).double(), [500, 17, 510]
    assert max(sizes) < layer.module.project.tokens_per_block(torch.device("cpu")) < sum(sizes) / 2
    check_batch_equals_each_alone(layer, sample(name, sizes, edges=1), sizes)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("scalar_channels and vector_channels must not both be 0", {"scalar_channels": 0, "vector_channels": 0}),
        ("out_vectors must be reachable", {"hidden_vectors": 0}),
        ("edge_channels must be 0 without local_context", {"edge_channels": 2}),
    ],
)
@pytest.mark.parametrize("kind", [VectorSelfAttention, VectorTransformer])
def test_bad_options(kind, message, options):
    with pytest.raises(ValueError, match=message):
        kind(
            **{"scalar_channels": S, "vector_channels": V}
            | (options if kind is VectorSelfAttention else as_model(options))
        )


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"scalars must be \(B, N, 3\)", {"scalars": torch.ones(2, 5, 4)}),
        (r"vectors must be \(B, N, 2, 3\)", {"vectors": torch.ones(2, 5, V, 2)}),
        (r"lengths must be in \[0, 5\]", {"lengths": torch.tensor([6, 1])}),
        ("batch must be None", {"batch": torch.zeros(10).long()}),
        ("edge_index must be None", {"edge_index": torch.zeros(2, 0).long()}),
    ],
)
def test_bad_input(message, change):
    x = {"scalars": torch.ones(2, 5, S), "vectors": torch.ones(2, 5, V, 3)}
    with pytest.raises(ValueError, match=message):
        VectorSelfAttention(S, V)(**x | change)


class Largest(TorchDispatchMode):
    """Remember the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("cls", [VectorSelfAttention, SE3HyenaOperator])
@pytest.mark.parametrize("lengths", [None, [1901, 2003]])
def test_nothing_of_all_pairs_exists(cls, lengths):
    layer, tokens = cls(2, 3), 2003
    lengths = lengths and torch.tensor(lengths)
    with Largest() as largest:
        out = layer(torch.randn(2, tokens, 2), torch.randn(2, tokens, 3, 3), lengths)
        sum(part.sum() for part in out).backward()
    assert tokens < largest.numel < tokens**2
