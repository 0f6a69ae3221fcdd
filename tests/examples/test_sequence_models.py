"""The non-equivariant Hyena and Transformer: slow evaluation, ragged batches, symmetries they lack, errors."""

import pytest
import torch
import torch.nn.functional as F
from baselines.sequence_models import Hyena, Transformer
from oracles import long_convolution
from space import error, motion, move

S, V = 3, 2
MODELS = {
    "hyena": lambda: Hyena(S, V, 5, 1, channels=7, depth=2, gate_channels=4),
    "causal": lambda: Hyena(S, V, channels=7, depth=1, mode="causal"),
    "pooled": lambda: Hyena(S, V, 0, 1, channels=7, depth=2, pool="mean"),
    "transformer": lambda: Transformer(S, V, 5, 1, channels=7, depth=2),
    "pooled transformer": lambda: Transformer(S, V, 0, 1, channels=7, depth=2, pool="mean"),
}


@pytest.fixture(params=MODELS)
def model(request, randomise):
    return randomise(MODELS[request.param](), 0.4).double()


def sample(b, n):
    shapes = (b, n, S), (b, n, V, 3), (b, n, 3)
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in shapes)


def slow(model, scalars, vectors, pos):
    """One sequence, token by token where tokens meet."""
    x = model.embed(torch.cat([scalars, vectors.flatten(1), pos - pos.mean(0)], -1))
    for layer in model.operators:
        q, k, v = layer.project(x).chunk(3, -1)
        if isinstance(model, Hyena):
            mixed = long_convolution(q[None], k[None], [len(q)], layer.mode)[0]
            mixed = torch.sigmoid(layer.gate(mixed)) * mixed * v
        else:
            mixed = F.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v
        x = x + layer.out(x + mixed)
    return model.out(x.mean(0) if model.pool else x)


def test_equals_slow_evaluation(on_device, model):
    scalars, vectors, pos = sample(2, 11)
    got = model(scalars, vectors, pos=pos)
    for b in range(2):
        wanted = slow(model, scalars[b], vectors[b], pos[b])
        torch.testing.assert_close(torch.cat([got[0][b], got[1][b].flatten(-2)], -1), wanted, rtol=1e-10, atol=1e-12)


def test_ragged_equals_alone_and_nan_stays(on_device, model):
    scalars, vectors, pos = sample(3, 13)
    lengths = torch.tensor([13, 5, 1])
    beyond = torch.arange(13) >= lengths[:, None]
    for x in (scalars, vectors, pos):
        x[beyond] = torch.nan
    got = model(scalars, vectors, lengths, pos=pos)
    for b, n in enumerate(lengths.tolist()):
        alone = model(scalars[b : b + 1, :n], vectors[b : b + 1, :n], pos=pos[b : b + 1, :n])
        for part, wanted in zip(got, alone, strict=True):
            torch.testing.assert_close(
                part[b] if model.pool else part[b, :n], wanted[0], rtol=1e-12, atol=1e-12
            )  # fmt: skip
    sum(part.sum() for part in got).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_translations_but_no_rotations(on_device, model):
    scalars, vectors, pos = sample(2, 11)
    out = model(scalars, vectors, pos=pos)[1]
    assert error(model(scalars, vectors, pos=pos + 3)[1], out) < 1e-10
    r = motion()
    assert error(model(scalars, move(vectors, r), pos=move(pos, r))[1], move(out, r)) > 1e-2


def test_use(on_device, model):
    scalars, vectors, pos = sample(2, 7)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(scalars, vectors, pos=pos), model(scalars, vectors, pos=pos), strict=True):
        torch.testing.assert_close(got, wanted)
    single = [x.float() for x in (scalars, vectors, pos)]
    expected = model.float()(*single[:2], pos=single[2])
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(on_device, dtype):
            half = model(*single[:2], pos=single[2])
        assert error([part.float() for part in half], expected) < 0.1
    before = [p.clone() for p in model.parameters()]
    model.reset_parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_without_scalars_or_vectors():
    assert Hyena(0, 2, channels=5, depth=1)(None, torch.randn(2, 7, 2, 3))[1].shape == (2, 7, 2, 3)
    assert Transformer(3, 0, 0, 1, channels=5, depth=1)(torch.randn(2, 7, 3), None)[1].shape == (2, 7, 1, 3)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("channels must", lambda: Hyena(1, 1, channels=0)),
        ("depth must", lambda: Transformer(1, 1, depth=0)),
        ("mode must", lambda: Hyena(1, 1, mode="linear")),
        ("pool must", lambda: Hyena(1, 1, pool="max")),
        ("scalar_channels must", lambda: Hyena(-1, 1)),
        ("out_scalars and out_vectors must not both", lambda: Transformer(2, 1, 0, 0)),
        ("vectors must be given", lambda: Hyena(1, 1)(None, None)),
        ("scalars must be", lambda: Hyena(1, 1)(None, torch.ones(2, 3, 1, 3))),
        ("vectors must be", lambda: Hyena(1, 1)(torch.ones(2, 3, 1), torch.ones(2, 3, 1, 2))),
        ("scalars must be torch.float32", lambda: Hyena(1, 1)(torch.ones(2, 3, 1).double(), torch.ones(2, 3, 1, 3))),
        ("lengths must", lambda: Hyena(1, 1)(torch.ones(2, 3, 1), torch.ones(2, 3, 1, 3), torch.tensor([4, 1]))),
        ("pos must", lambda: Hyena(1, 1)(torch.ones(2, 3, 1), torch.ones(2, 3, 1, 3), pos=torch.ones(2, 3, 2))),
        ("parameters must be", lambda: Hyena(1, 1).bfloat16()(torch.ones(2, 3, 1), torch.ones(2, 3, 1, 3))),
    ],
)
def test_bad_arguments(message, make):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
