"""Kernels: the two forms of each are Fourier transforms of each other, within the range they state; how they split."""

import math

import pytest
import torch
from baselines.oscillating_gaussians import OscillatingGaussian
from ewald import Hat

from tg_equiattn.functional import Coulomb, Gaussian
from tg_equiattn.functional.waves.coulomb import ShortRangeCoulomb

BOUNDS = ((0.7, 1.4), (1.1, 2.2), (0.9, 1.8))
HEADS, COUNT, LMAX = 2, 3, 2


def make(kind):
    lows = torch.tensor([low for low, _ in BOUNDS], dtype=torch.float64)
    widths = lows * (1 + torch.rand(HEADS, COUNT, dtype=torch.float64))
    gains, bounds = torch.randn(HEADS, COUNT, LMAX + 1, dtype=torch.float64), BOUNDS
    if kind is OscillatingGaussian:
        largest = (2.0, 3.0, 5.0)
        numbers = torch.tensor(largest, dtype=torch.float64) * torch.rand(HEADS, COUNT, dtype=torch.float64)
        return kind(widths, gains, bounds, numbers, largest)
    if kind is ShortRangeCoulomb:
        return Coulomb(widths, gains, bounds).split(3.0)[0]
    return kind(widths, gains, bounds)


def at_distances(kernel, r):
    """R_l(r) as (lmax + 1, heads, C, r)."""
    return kernel.real_space(r.square()[None, None])[:, 0, :, :, 0]


def at_wavenumbers(kernel, k):
    """The Fourier transform with its amplitudes as (lmax + 1, heads, C, k)."""
    square = k.square()[None]
    coulomb = 4 * math.pi / torch.where(square == 0, 1.0, square)
    each = [kernel.reciprocal(square, coulomb, torch.tensor([c]))[0] for c in range(kernel.count)]
    return torch.stack(each).permute(3, 2, 0, 1)


@pytest.mark.parametrize("kind", [Gaussian, OscillatingGaussian, Hat, ShortRangeCoulomb])
def test_forms_are_transforms_of_each_other(kind):
    """By quadrature in spherical coordinates: the radial part of the transform of R_l Y_l is (-i)^l times the spherical
    Bessel transform of R_l r^l, and Y_l(i k) is i^l k^l Y_l."""
    kernel, step = make(kind), 0.002
    r = (torch.arange(20_000, dtype=torch.float64) + 0.5) * step
    k = torch.tensor([0.3, 0.9, 1.7, 2.6], dtype=torch.float64)
    x = k[:, None] * r
    bessel = [x.sin() / x, x.sin() / x**2 - x.cos() / x, (3 / x**3 - 1 / x) * x.sin() - 3 / x**2 * x.cos()]
    real, wanted = at_distances(kernel, r), at_wavenumbers(kernel, k)
    for degree in range(LMAX + 1):
        weight = 4 * math.pi * step * r ** (2 + degree)
        found = torch.einsum("hcr,kr,r->hck", real[degree], bessel[degree], weight) * (-1) ** degree / k**degree
        torch.testing.assert_close(found, wanted[degree], rtol=1e-5, atol=1e-6)
    if kind is not OscillatingGaussian:  # whose transform at k = 0 is checked by sums over images
        whole = (real[0] * 4 * math.pi * step * r**2).sum(-1)
        torch.testing.assert_close(whole, at_wavenumbers(kernel, torch.zeros(1).double())[0, ..., 0])
