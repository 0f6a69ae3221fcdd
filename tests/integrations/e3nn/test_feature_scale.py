"""Features have components of unit variance, as e3nn has it, and come out about as large; others are scaled before."""

import pytest
import torch

NODES, INSIDE, OUTSIDE = 40, "8x0e+6x1o", "5x0e+7x1o"
KINDS = ["ewald", "hyena", "radial", "lag", "model", "attention", "tensor", "tensor lag"]


def evaluate(layer, x):
    """The root mean square of each irrep of the output."""
    out = layer(x, 2 * torch.randn(NODES, 3, dtype=x.dtype)).detach()
    return torch.stack([out[:, place].square().mean().sqrt() for place in layer.irreps_out.slices()])


def about_one(found):
    return bool(((found > 0.1) & (found < 10)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_unit_features_come_out_about_as_large(kind, new_module):
    """And, the negative control, large ones do not: layers do not scale for the caller."""
    for seed in range(2):
        torch.manual_seed(seed)
        more = ("+3x2e", "+2x2e") if kind == "tensor" else ("", "")
        layer = new_module(kind, INSIDE + more[0], OUTSIDE + more[1]).double()
        x = torch.randn(NODES, layer.irreps_in.dim, dtype=torch.float64)
        assert about_one(evaluate(layer, x)), evaluate(layer, x)
        assert not about_one(evaluate(layer, 1000 * x) / 1000)
