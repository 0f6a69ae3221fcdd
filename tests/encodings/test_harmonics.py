"""Solid harmonics, and sin(z) / z."""

import math

import torch

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
