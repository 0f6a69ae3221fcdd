r"""Directions that stand for all: means over the sphere of plane waves, to a promised error."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import checks
from ..kept import ordinary_tensors
from .harmonics import solid_harmonics, spherical_bessel
from .lebedev import DEGREES, lebedev_rule

MAX_DEGREE = 8


def direction_rule(max_phase: float, lmax: int = 0, error: float = 1e-6) -> tuple[Tensor, Tensor]:
    r"""The smallest of Lebedev's rules that averages plane waves to a promised error, as one direction of each pair
    :math:`\pm u`.

    .. math:: \sum_m w_m \cos(\omega\, u_m \cdot r)\, Y_l(u_m) \approx (-1)^{l/2} j_l(\omega |r|)\, Y_l(r / |r|)

    for even l, and the same with sines and :math:`(-1)^{(l-1)/2}` for odd l. The promise is the largest error over all
    phases :math:`\omega |r|` up to ``max_phase`` and over all directions of r, relative to the largest value of
    :math:`j_l Y_l` among them, for every l up to ``lmax``; it was found numerically. Weights are positive and add up to
    1, so beyond ``max_phase`` an error is at most 2 in units of the largest :math:`Y_l`.

    Args:
        max_phase: the largest :math:`\omega |r|`.
        lmax: the highest degree.
        error: the promise.

    Returns:
        Directions ``(M / 2, 3)`` and their weights ``(M / 2,)``, float64 on the CPU; the caller owns neither.

    Raises:
        ValueError: naming the argument, what came and what is allowed; where the largest rule (1,202 points) falls
            short.

    Source: Frank, Chmiela, Müller and Unke, Euclidean Fast Attention (2024), section on Lebedev quadrature.

    Example:
        >>> directions, weights = direction_rule(3.14, lmax=1)
        >>> directions.shape
        torch.Size([43, 3])
    """
    checks.positive_number(max_phase=max_phase, error=error)
    check_degree(lmax=lmax)
    return _direction_rule(float(max_phase), lmax, float(error))


def check_degree(**arguments: int) -> None:
    """ValueError unless every argument is a degree there are rules for."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DEGREE:
            raise ValueError(f"{name} must be an integer in [0, {MAX_DEGREE}], got {value!r}")


@functools.lru_cache(maxsize=64)
def _direction_rule(max_phase: float, lmax: int, error: float) -> tuple[Tensor, Tensor]:
    with ordinary_tensors():
        reached = math.inf
        for degree in DEGREES:
            points, weights = lebedev_rule(degree)
            if degree < max_phase:  # it sees so few waves as nothing
                continue
            reached = min(reached, quadrature_error(points, weights, max_phase, lmax))
            if reached <= error:
                half = _one_of_each_pair(points)
                return points[half], 2 * weights[half]
    raise ValueError(
        f"error must be at least {reached:.1e} for max_frequency={max_phase:g} and lmax={lmax}, which the largest rule "
        f"of directions reaches, got {error:g}: take a smaller max_frequency"
    )


def quadrature_error(points: Tensor, weights: Tensor, max_phase: float, lmax: int) -> float:
    """The largest error of means of plane waves by a rule (M, 3), (M,) of the whole sphere, over phases up to
    ``max_phase``, directions and degrees, relative to the largest exact value of the degree."""
    separations = _sector()
    phases = max_phase * torch.linspace(0.5, 1, 4, dtype=torch.float64)
    harmonics, wanted = solid_harmonics(points, lmax), solid_harmonics(separations, lmax)
    angle = separations @ points.T
    radial = spherical_bessel(phases.square(), lmax)
    dense = max_phase * torch.linspace(0, 1, 65, dtype=torch.float64)
    largest = spherical_bessel(dense.square(), lmax)
    worst = 0.0
    for degree in range(lmax + 1):
        part = slice(degree**2, (degree + 1) ** 2)
        sign = -1 if degree % 4 > 1 else 1
        scale = float((dense**degree * largest[degree]).abs().max()) * math.sqrt(2 * degree + 1)
        for phase, bessel in zip(phases, radial[degree], strict=True):
            waves = (phase * angle).sin() if degree % 2 else (phase * angle).cos()
            exact = sign * phase**degree * bessel * wanted[:, part]
            apart = (waves * weights) @ harmonics[:, part] - exact
            worst = max(worst, float(apart.norm(dim=1).max()) / scale)
    return worst


def _sector(count: int = 120) -> Tensor:
    """Directions (K, 3) that cover the part of the sphere to which the cube's symmetries map all others, with its
    corners."""
    place = torch.arange(count, dtype=torch.float64) + 0.5
    height = 1 - 2 * place / count
    angle = place * math.pi * (3 - math.sqrt(5))
    ring = (1 - height.square()).sqrt()
    spiral = torch.stack([ring * angle.cos(), ring * angle.sin(), height], 1).abs().sort(1).values
    corners = torch.tensor([[0, 0, 1.0], [0, 1, 1], [1, 1, 1]], dtype=torch.float64)
    return torch.cat([spiral, corners / corners.norm(dim=1, keepdim=True)])


def _one_of_each_pair(points: Tensor) -> Tensor:
    """Which of the points u and -u to keep: those whose first coordinate that is not zero is positive."""
    x, y, z = points.unbind(1)
    return (x > 0) | ((x == 0) & ((y > 0) | ((y == 0) & (z > 0))))
