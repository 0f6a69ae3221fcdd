"""Positions of large coordinates, in float64, with features and parameters in float32."""

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
