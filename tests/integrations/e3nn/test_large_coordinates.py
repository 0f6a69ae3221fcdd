"""Positions of large coordinates, in float64, with features and parameters in float32."""

import pytest
import torch
from space import batch_of
from tg_equiattn.integrations import e3nn

from tg_equiattn import nn
from tg_equiattn.testing import TOLERANCE

UTM = torch.tensor([5e5, 5e6, 2e2], dtype=torch.float64)
OPTIONS = {
    "IrrepsSE3HyenaOperator": {},
    "IrrepsVectorSelfAttention": {},
    "TensorProductHyenaOperator": {"order": "radial"},
}


def error(module, near, far, x):
    """Relative to the largest output."""
    wanted = module(x, pos=near)
    return float((module(x, pos=far) - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("kind", OPTIONS)
def test_irreps(kind):
    module = getattr(e3nn, kind)("16x0e+8x1o", "16x0e+8x1o", **OPTIONS[kind])
    pos, x = torch.randn(23, 3, dtype=torch.float64), module.irreps_in.randn(23, -1)
    assert error(module, pos, pos + UTM, x) <= TOLERANCE[torch.float32]
    assert error(module, pos, (pos + UTM).float(), x) > 10 * TOLERANCE[torch.float32]  # half a unit is lost


def test_scalars_and_vectors():
    operator, batch = nn.SE3HyenaOperator(2, 3), batch_of([11, 12])
    pos, scalars, vectors = torch.randn(23, 3, dtype=torch.float64), torch.randn(23, 2), torch.randn(23, 3, 3)
    module = lambda x, pos: operator(*x, batch=batch, pos=pos)[1]  # noqa: E731
    assert error(module, pos, pos + UTM, (scalars, vectors)) <= TOLERANCE[torch.float32]
    assert error(module, pos, (pos + UTM).float(), (scalars, vectors)) > 10 * TOLERANCE[torch.float32]
