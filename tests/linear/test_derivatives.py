"""Derivatives of linear attention, first and second, at extreme scores."""

import pytest
import torch

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention

CHANNELS, HEADS, OUT = 5, 2, 4
GRID = PixelGrid((3, 4), 3)
POSITIONS = {"linear": None, "window": "window", "clipped": "clipped"}


@pytest.mark.parametrize("norm", [1.0, 100.0])
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("m", [6, 200], ids=["few numbers", "operators"])
def test_extreme_scores_stay_finite(kind, norm, m):
    """In float32, of scores up to ten thousand, by operators and plain compositions; outputs are means of values."""
    options = {"cutoff": 3, "key_channels": 3, "num_random_features": m, "method": "features"}
    layer = PerformerAttention(CHANNELS, OUT, HEADS, position=POSITIONS[kind], **options).eval()
    x = torch.nn.functional.normalize(torch.randn(2, len(GRID), CHANNELS), dim=-1).requires_grad_()
    weights = {
        name: norm * torch.nn.functional.normalize(torch.randn(p.shape), dim=-1)
        for name, p in layer.named_parameters()
    } | {"out.weight": torch.eye(OUT), "out.bias": torch.zeros(OUT)}  # fmt: skip
    weights |= {name: p.detach() for name, p in layer.named_parameters() if "variance" in name}
    inputs = x, {name: p.requires_grad_() for name, p in weights.items()}

    def call(x, weights):
        return torch.func.functional_call(layer, weights, (x,), {"grid": GRID})

    def energy(x, weights):
        return call(x, weights).square().sum()

    def size(grads):
        return grads[0].square().sum() + sum(g.square().sum() for g in grads[1].values())

    leaves = [x, *weights.values()]
    out = call(*inputs)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, materialize_grads=True)
    plain = torch.func.grad(energy, (0, 1))
    curved = torch.func.grad(lambda *each: size(plain(*each)), (0, 1))
    found = [out, *grads, *second]
    for first, others in (plain(*inputs), curved(*inputs)):
        found += [first, *others.values()]
    assert all(t.isfinite().all() for t in found)
    values = torch.nn.functional.linear(x, weights["value.weight"])
    assert out.abs().max() <= values.abs().max() * (1 + 1e-4)
