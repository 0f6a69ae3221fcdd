"""Large coordinates, in float64 with float32 features; features of unit variance, as e3nn has it, come out about so."""

import pytest
import torch
from space import batch_of
from tg_equiattn.integrations import e3nn

from tg_equiattn import nn
from tg_equiattn.testing import TOLERANCE

UTM, IRREPS = torch.tensor([5e5, 5e6, 2e2], dtype=torch.float64), ("16x0e+8x1o", "16x0e+8x1o")


def scalars_and_vectors():
    operator, batch = nn.SE3HyenaOperator(16, 8), batch_of([11, 12])
    return lambda x, pos: operator(x[:, :16], x[:, 16:].unflatten(1, (8, 3)), batch=batch, pos=pos)[1]


LAYERS = {
    "hyena": lambda: e3nn.IrrepsSE3HyenaOperator(*IRREPS),
    "attention": lambda: e3nn.IrrepsVectorSelfAttention(*IRREPS),
    "tensor": lambda: e3nn.TensorProductHyenaOperator(*IRREPS, order="radial"),
    "core": scalars_and_vectors,
}


@pytest.mark.parametrize("kind", LAYERS)
def test_far_from_the_origin(kind):
    layer, near, x = LAYERS[kind](), torch.randn(23, 3, dtype=torch.float64), torch.randn(23, 40)
    wanted, far, single = (layer(x, pos=pos).detach() for pos in (near, near + UTM, (near + UTM).float()))
    limit = TOLERANCE[torch.float32] * wanted.abs().max()
    assert (far - wanted).abs().max() <= limit
    assert (single - wanted).abs().max() > 10 * limit  # half a unit is lost


NODES, INSIDE, OUTSIDE = 40, "8x0e+6x1o", "5x0e+7x1o"
KINDS = ["ewald", "hyena", "radial", "implicit", "model", "attention", "tensor", "tensor implicit"]


def evaluate(layer, x):
    pos = None if getattr(layer, "causal", False) else 2 * torch.randn(NODES, 3, dtype=x.dtype)
    out = layer(x, pos).detach()
    return torch.stack([out[:, place].square().mean().sqrt() for place in layer.irreps_out.slices()])


def about_one(found):
    return bool(((found > 0.1) & (found < 10)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_unit_features_come_out_about_as_large(kind, new_module):
    """And, the negative control, large ones do not: layers do not scale for the caller."""
    more = ("+3x2e", "+2x2e") if kind == "tensor" else ("", "")
    layer = new_module(kind, INSIDE + more[0], OUTSIDE + more[1]).double()
    x = torch.randn(NODES, layer.irreps_in.dim, dtype=torch.float64)
    assert about_one(evaluate(layer, x)), evaluate(layer, x)
    assert not about_one(evaluate(layer, 1000 * x) / 1000)
