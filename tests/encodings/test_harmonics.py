"""Solid harmonics, and sin(z) / z."""

import math
from fractions import Fraction

import pytest
import torch
from space import motion

from tg_equiattn.encodings.harmonics import sinc, solid_harmonics


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


def exact_sinc(square):
    """sin(z) / z in rational numbers."""
    term, total, k = Fraction(1), Fraction(0), 0
    while k < 8 or abs(term) > Fraction(1, 10**25):
        total += term
        k += 1
        term *= -square / (2 * k * (2 * k + 1))
    return float(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sinc(dtype):
    squares = [Fraction(n, 8) ** 2 for n in (0, 1, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 60, 160)]
    wanted = torch.tensor([exact_sinc(s) for s in squares], dtype=dtype)
    got = sinc(torch.tensor([float(s) for s in squares], dtype=dtype))
    torch.testing.assert_close(got, wanted, rtol=0, atol=100 * torch.finfo(dtype).eps)


def test_derivatives_of_sinc():
    """At 0 and where the series ends: of sin(z) / z after z^2, (cos(z) - sin(z) / z) / (2 z^2), and once more."""
    square = torch.tensor([0.0, 1e-12, 0.3, 0.999, 1.001, 3.9, 50.0], dtype=torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(sinc(square).sum(), square, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), square)
    torch.testing.assert_close(first[:2], torch.full((2,), -1 / 6, dtype=torch.float64))
    torch.testing.assert_close(second[:2], torch.full((2,), 1 / 60, dtype=torch.float64))
    s = square.detach()[2:]
    z = s.sqrt()
    wanted = (z.cos() - z.sin() / z) / (2 * s)
    torch.testing.assert_close(first[2:], wanted, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(second[2:], -(z.sin() / z) / (4 * s) - 1.5 * wanted / s, rtol=1e-7, atol=1e-12)
