"""Encodings of directions and distances, smooth at the origin."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..shapes import Float


def solid_harmonics(x: Float[Tensor, "*points 3"], lmax: int, dim: int = -1) -> Float[Tensor, "*points (lmax+1)**2"]:
    r"""Real solid harmonics :math:`|x|^l Y_{lm}(x / |x|)` of all degrees up to ``lmax``, polynomials of x.

    Order and axes are those of e3nn: m runs from -l to l, and y is the polar axis, so that degree 1 is x, y, z times
    the root of 3. The normalization is e3nn's ``"component"``: the mean of :math:`Y_{lm}^2` over the sphere is 1.
    Coordinates are along the axis ``dim`` of x, and harmonics along this axis of the result.

    Example:
        >>> import torch
        >>> solid_harmonics(torch.tensor([1.0, 2.0, 3.0]), 1)
        tensor([1.0000, 1.7321, 3.4641, 5.1962])
    """
    side, pole, front = x.unbind(dim)
    square = x.square().sum(dim) if lmax > 1 else 0.0
    cosine: list[Any] = [1.0, front]  # cos(m azimuth) times the m-th power of the distance from the polar axis
    sine: list[Any] = [0.0, side]
    for m in range(1, lmax):
        cosine.append(front * cosine[m] - side * sine[m])
        sine.append(front * sine[m] + side * cosine[m])
    legendre: dict[tuple[int, int], Any] = {}
    for m in range(lmax + 1):
        legendre[m, m] = float(math.prod(range(2 * m - 1, 0, -2)))
        for degree in range(m + 1, lmax + 1):
            value = (2 * degree - 1) * legendre[degree - 1, m] * pole
            if degree > m + 1:
                value = (value - (degree + m - 1) * legendre[degree - 2, m] * square) / (degree - m)
            legendre[degree, m] = value
    out = [torch.ones_like(pole)]
    for degree in range(1, lmax + 1):
        for m in range(-degree, degree + 1):
            size = abs(m)
            ratio = math.factorial(degree - size) / math.factorial(degree + size)
            norm = math.sqrt((2 * degree + 1) * (2 if m else 1) * ratio)
            out.append(norm * legendre[degree, size] * (sine if m < 0 else cosine)[size])
    return torch.stack(out, dim)
