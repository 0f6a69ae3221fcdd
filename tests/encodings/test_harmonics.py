"""Solid harmonics, and sin(z) / z."""

import math

import pytest
import torch
from space import motion

from tg_equiattn.encodings.harmonics import solid_harmonics


def harmonics(u):
    """Of unit vectors (..., 3), degrees 0 to 2, as lists of components; the mean of each square is 1."""
    x, y, z = u.unbind(-1)
    root = math.sqrt(15)
    second = [root * x * z, root * x * y, math.sqrt(5) * (y * y - (x * x + z * z) / 2), root * y * z]
    return [[torch.ones_like(x)], [math.sqrt(3) * c for c in (x, y, z)], [*second, root * (z * z - x * x) / 2]]


def test_low_degrees():
    x = torch.randn(7, 3, dtype=torch.float64)
    unit = torch.nn.functional.normalize(x, dim=-1)
    wanted = torch.stack([c for degree in harmonics(unit) for c in degree], -1)
    torch.testing.assert_close(solid_harmonics(unit, 2), wanted)
    powers = x.norm(dim=-1, keepdim=True) ** torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2])
    torch.testing.assert_close(solid_harmonics(x, 2), wanted * powers)


@pytest.mark.parametrize("degree", range(9))
def test_rotations_mix_a_degree_within_itself(degree):
    """By an orthogonal matrix, one for all points; squares sum to a constant; reflections give the degree's sign."""
    x, part = torch.randn(40, 3, dtype=torch.float64), slice(degree**2, (degree + 1) ** 2)
    before, after = (solid_harmonics(y, 8)[:, part] for y in (x, x @ motion().T))
    matrix = torch.linalg.lstsq(before, after).solution
    torch.testing.assert_close(before @ matrix, after, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(2 * degree + 1).double(), rtol=0, atol=1e-9)
    unit = solid_harmonics(torch.nn.functional.normalize(x, dim=-1), 8)[:, part]
    torch.testing.assert_close(unit.square().sum(1), torch.full((40,), 2.0 * degree + 1).double())
    torch.testing.assert_close(solid_harmonics(-x, 8)[:, part], (-1) ** degree * before)
