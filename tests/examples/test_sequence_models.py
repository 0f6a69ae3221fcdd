"""The non-equivariant Hyena and Transformer against a slow evaluation."""

import pytest
import torch
import torch.nn.functional as F
from baselines.sequence_models import Hyena, Transformer
from oracles import long_convolution, taps

S, V = 3, 2
MODELS = {
    "hyena": lambda: Hyena(S, V, 5, 1, channels=7, num_layers=2),
    "pooled": lambda: Hyena(S, V, 0, 1, channels=7, num_layers=2, pool="mean"),
    "published": lambda: Hyena(S, V, 5, 1, channels=7, num_layers=1, norm="forward"),
    "neighbors": lambda: Hyena(S, V, 5, 1, channels=7, num_layers=1, short_conv=3),
    "transformer": lambda: Transformer(S, V, 5, 1, channels=7, num_layers=2),
    "pooled transformer": lambda: Transformer(S, V, 0, 1, channels=7, num_layers=2, pool="mean", short_conv=3),
}


@pytest.fixture(params=MODELS)
def model(request, randomise):
    return randomise(MODELS[request.param](), 0.4).double()


def sample(b, n):
    shapes = (b, n, S), (b, n, V, 3), (b, n, 3)
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in shapes)


def slow(model, scalars, vectors, pos):
    model = model.module
    x = model.embed(torch.cat([scalars, vectors.flatten(1), pos - pos.mean(0)], -1))
    for layer in model.operators:
        projected = layer.project(x)
        if layer.short_conv is not None:
            projected = taps(projected, layer.short_conv.weight)
        q, k, v = projected.chunk(3, -1)
        if hasattr(layer, "gate"):
            mixed = long_convolution(q[None], k[None], [len(q)], "circular", norm=layer.norm)[0]
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
