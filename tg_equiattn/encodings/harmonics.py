r"""Encodings of directions and distances: solid harmonics and spherical Bessel functions, smooth at the origin."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def solid_harmonics(x: Tensor, lmax: int) -> Tensor:
    r"""Real solid harmonics :math:`|x|^l Y_{lm}(x / |x|)` of all degrees up to ``lmax``, polynomials of x.

    In e3nn's order and convention (m from -l to l, y the polar axis, so that degree 1 is x, y, z times the root of 3)
    and with its ``normalization="component"``: the mean of :math:`Y_{lm}^2` over the sphere is 1.

    Shapes:
        ``(..., 3)`` -> ``(..., (lmax + 1)**2)``.

    Example:
        >>> import torch
        >>> solid_harmonics(torch.tensor([1.0, 2.0, 3.0]), 1)
        tensor([1.0000, 1.7321, 3.4641, 5.1962])
    """
    side, pole, front = x.unbind(-1)
    square = x.square().sum(-1)
    cosine, sine = [torch.ones_like(pole)], [torch.zeros_like(pole)]  # of m times the azimuth, times a power of radius
    for m in range(lmax):
        cosine.append(front * cosine[m] - side * sine[m])
        sine.append(front * sine[m] + side * cosine[m])
    legendre: dict[tuple[int, int], Tensor] = {}
    for m in range(lmax + 1):
        legendre[m, m] = torch.full_like(pole, math.prod(range(2 * m - 1, 0, -2)))
        for degree in range(m + 1, lmax + 1):
            value = (2 * degree - 1) * pole * legendre[degree - 1, m]
            if degree > m + 1:
                value = value - (degree + m - 1) * square * legendre[degree - 2, m]
            legendre[degree, m] = value / (degree - m)
    out = []
    for degree in range(lmax + 1):
        for m in range(-degree, degree + 1):
            size = abs(m)
            ratio = math.factorial(degree - size) / math.factorial(degree + size)
            norm = math.sqrt((2 * degree + 1) * (2 if m else 1) * ratio)
            out.append(norm * legendre[degree, size] * (sine if m < 0 else cosine)[size])
    return torch.stack(out, -1)


def spherical_bessel(square: Tensor, lmax: int) -> list[Tensor]:
    r""":math:`j_l(z) / z^l` for every degree up to ``lmax``, as a function of :math:`z^2`: analytic, at 0 too.

    So :math:`j_l(\omega r)\, Y_l = \omega^l \cdot j_l(z) / z^l` times a solid harmonic, with derivatives of any order
    where two points meet.
    """
    edge = (1 + lmax / 2) ** 2  # above it z is large enough for the recursion upwards
    small = square < edge
    z = torch.where(small, 1.0, square).sqrt()
    inverse = 1 / z.square()
    far = [z.sin() / z]
    if lmax:
        far.append((far[0] - z.cos()) * inverse)
    for degree in range(1, lmax):
        far.append(((2 * degree + 1) * far[degree] - far[degree - 1]) * inverse)
    near = torch.where(small, square, 0.0)
    return [torch.where(small, _series(near, degree, edge), value) for degree, value in enumerate(far)]


def _series(square: Tensor, degree: int, edge: float) -> Tensor:
    """j_l(z) / z^l by its power series, exact to rounding for z^2 up to ``edge``."""
    coefficients = [1 / math.prod(range(2 * degree + 1, 0, -2))]
    while abs(coefficients[-1]) * edge ** (len(coefficients) - 1) > 1e-18 * coefficients[0]:
        k = len(coefficients)
        coefficients.append(-coefficients[-1] / (2 * k * (2 * degree + 2 * k + 1)))
    out = torch.full_like(square, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        out = out * square + coefficient
    return out
