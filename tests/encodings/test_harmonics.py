"""Solid harmonics and spherical Bessel functions."""

import math
from fractions import Fraction

import pytest
import torch
from space import motion

from tg_equiattn.encodings.harmonics import solid_harmonics, spherical_bessel


def harmonics(u):
    """Of unit vectors (..., 3), degrees 0 to 2, as lists of components; the mean of each square is 1."""
    x, y, z = u.unbind(-1)
    root = math.sqrt(15)
    second = [root * x * z, root * x * y, math.sqrt(5) * (y * y - (x * x + z * z) / 2), root * y * z]
    return [[torch.ones_like(x)], [math.sqrt(3) * c for c in (x, y, z)], [*second, root * (z * z - x * x) / 2]]


def product_rule(degree):
    """A rule for means over the sphere: Gauss-Legendre in height, evenly spaced angles."""
    n = degree // 2 + 1
    place = torch.arange(1, n, dtype=torch.float64)
    matrix = torch.diag(place / (4 * place**2 - 1).sqrt(), 1)
    height, vectors = torch.linalg.eigh(matrix + matrix.T)
    angle = 2 * math.pi * torch.arange(degree + 1, dtype=torch.float64) / (degree + 1)
    ring = (1 - height**2).sqrt()[:, None]
    grid = torch.stack([ring * angle.cos(), ring * angle.sin(), height[:, None].expand(n, degree + 1)], -1)
    weights = (vectors[0] ** 2)[:, None].expand(n, degree + 1) / (degree + 1)
    return grid.flatten(0, 1), weights.flatten()


def test_low_degrees():
    x = torch.randn(7, 3, dtype=torch.float64)
    unit = torch.nn.functional.normalize(x, dim=-1)
    wanted = torch.stack([c for degree in harmonics(unit) for c in degree], -1)
    torch.testing.assert_close(solid_harmonics(unit, 2), wanted)
    powers = x.norm(dim=-1, keepdim=True) ** torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2])
    torch.testing.assert_close(solid_harmonics(x, 2), wanted * powers)


def test_harmonics_are_orthonormal():
    points, weights = product_rule(17)
    values = solid_harmonics(points, 8)
    torch.testing.assert_close(values.T @ (weights[:, None] * values), torch.eye(81).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("degree", range(9))
def test_rotations_mix_a_degree_within_itself(degree):
    """By an orthogonal matrix, the same at all points; reflections give the sign of the degree."""
    x, part = torch.randn(40, 3, dtype=torch.float64), slice(degree**2, (degree + 1) ** 2)
    before, after = (solid_harmonics(y, 8)[:, part] for y in (x, x @ motion().T))
    matrix = torch.linalg.lstsq(before, after).solution
    torch.testing.assert_close(before @ matrix, after, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(2 * degree + 1).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(solid_harmonics(-x, 8)[:, part], (-1) ** degree * before)


def exact_bessel(square, degree):
    """j_l(z) / z^l in rational numbers."""
    term, total, k = Fraction(1), Fraction(0), 0
    for n in range(1, 2 * degree + 2, 2):
        term /= n
    while k < 8 or abs(term) > Fraction(1, 10**25):
        total += term
        k += 1
        term *= -square / (2 * k * (2 * degree + 2 * k + 1))
    return float(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bessel_functions(dtype):
    squares = [Fraction(n, 8) ** 2 for n in (0, 1, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 60, 160)]
    square = torch.tensor([float(s) for s in squares], dtype=dtype)
    for degree, got in enumerate(spherical_bessel(square, 6)):
        wanted = torch.tensor([exact_bessel(s, degree) for s in squares], dtype=dtype)
        torch.testing.assert_close(got / wanted[0], wanted / wanted[0], rtol=0, atol=100 * torch.finfo(dtype).eps)


def test_derivatives_of_bessel_functions():
    """Each is minus half of the next degree, at 0 and where series and recursion meet, of every order."""
    square = torch.tensor([0.0, 1e-12, 0.3, 1.0, 2.2499, 2.2501, 3.9, 4.1, 50.0], dtype=torch.float64).requires_grad_()
    for degree in range(3):
        values = spherical_bessel(square, 4)
        (first,) = torch.autograd.grad(values[degree].sum(), square, create_graph=True)
        torch.testing.assert_close(first, -values[degree + 1] / 2, rtol=1e-9, atol=1e-13)
        (second,) = torch.autograd.grad(first.sum(), square)
        torch.testing.assert_close(second, values[degree + 2] / 4, rtol=1e-7, atol=1e-12)
