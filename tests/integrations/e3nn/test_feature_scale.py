"""Features have components of unit variance, as e3nn has it, and come out about as large; others are scaled before."""

import pytest
import torch
from tg_equiattn.integrations.e3nn import (
    IrrepsEwaldAttention,
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    TensorProductHyenaOperator,
)

NODES, INSIDE, OUTSIDE = 40, "8x0e+6x1o", "5x0e+7x1o"
LAYERS = {
    "ewald": lambda: IrrepsEwaldAttention(INSIDE, OUTSIDE, width=2.0, avg_num_nodes=NODES / 2),
    "hyena": lambda: IrrepsSE3HyenaOperator(INSIDE, OUTSIDE),
    "radial": lambda: IrrepsSE3HyenaOperator(INSIDE, OUTSIDE, order="radial"),
    "lag": lambda: IrrepsSE3HyenaOperator(INSIDE, OUTSIDE, filter="lag", short_conv=3),
    "model": lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE),
    "attention": lambda: IrrepsVectorSelfAttention(INSIDE, OUTSIDE),
    "tensor": lambda: TensorProductHyenaOperator(INSIDE + "+3x2e", OUTSIDE + "+2x2e"),
    "tensor lag": lambda: TensorProductHyenaOperator(INSIDE, OUTSIDE, filter="lag"),
}


def evaluate(layer, x):
    """The root mean square of each irrep of the output."""
    out = layer(x, 2 * torch.randn(NODES, 3, dtype=x.dtype)).detach()
    return torch.stack([out[:, place].square().mean().sqrt() for place in layer.irreps_out.slices()])


def about_one(found):
    return bool(((found > 0.1) & (found < 10)).all())


@pytest.mark.parametrize("kind", LAYERS)
def test_unit_features_come_out_about_as_large(kind):
    """And, the negative control, large ones do not: layers do not scale for the caller."""
    for seed in range(2):
        torch.manual_seed(seed)
        layer = LAYERS[kind]().double()
        x = torch.randn(NODES, layer.irreps_in.dim, dtype=torch.float64)
        assert about_one(evaluate(layer, x)), evaluate(layer, x)
        assert not about_one(evaluate(layer, 1000 * x) / 1000)
