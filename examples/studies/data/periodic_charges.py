r"""Neutral crystals of soft charges: random skewed cells, repeated in all directions, their energies and forces.

The charges are +1 and -1, as many of each, at independent places in a cell A (rows are lattice vectors), each spread as
a Gaussian of standard deviation s. Two of them at distance r have the energy erf(r / 2 s) / r, times their charges.
Summed over all images in Ewald's way, which is as if a conductor surrounded the crystal, a cell has

    energy = 2 pi / V sum_k exp(-s^2 k^2) / k^2 |sum_j q_j exp(i k.x_j)|^2 - sum_j q_j^2 / (2 s sqrt(pi)),

with V its volume and k all wavevectors that repeat with it but zero; the last is what each charge has with itself
alone. With Gaussians no sum over places is needed. Forces are derivatives: - d energy / d x_i.

Units: lengths as the cells', charges 1, Coulomb's constant 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .soft_charges import alternating

LAST = 5.5  # wavevectors up to this over s: exp(-LAST^2) is 7e-14


class Crystals(NamedTuple):
    """Float64, the first axis counts cells."""

    charges: Tensor  # (B, N)
    positions: Tensor  # (B, N, 3)
    cells: Tensor  # (B, 3, 3)
    energies: Tensor  # (B,), of a cell
    forces: Tensor  # (B, N, 3)


def periodic_charges(count: int, charges: int, side: float, softness: float, seed: int, skew: float = 0.2) -> Crystals:
    """``count`` cells of the volume of a cube of this ``side``, with an even number of ``charges`` in each."""
    generator = torch.Generator().manual_seed(seed)
    signs, cells = alternating(count, charges), random_cells(count, side, skew, generator)
    fractions = torch.rand(count, charges, 3, dtype=torch.float64, generator=generator)
    return crystals_at(signs, fractions @ cells, cells, softness)


def random_cells(count: int, side: float, skew: float, generator: torch.Generator) -> Tensor:
    """Cubes with normal numbers times ``skew`` on all entries, of one volume, none thinner than two thirds of
    ``side``."""
    cells = torch.empty(0, 3, 3, dtype=torch.float64)
    while len(cells) < count:
        tried = skew * torch.randn(count, 3, 3, dtype=torch.float64, generator=generator) + torch.eye(3)
        tried *= side * torch.linalg.det(tried).abs()[:, None, None] ** (-1 / 3)
        cells = torch.cat([cells, tried[widths(tried).amin(1) > 2 / 3 * side]])
    return cells[:count]


def widths(cells: Tensor) -> Tensor:
    """Distances between opposite faces, (B, 3)."""
    return 1 / torch.linalg.inv(cells).norm(dim=1)


def crystals_at(charges: Tensor, positions: Tensor, cells: Tensor, softness: float) -> Crystals:
    """Crystals of these charges (B, N) at these places (B, N, 3) of these cells (B, 3, 3)."""
    found = [ewald(*crystal, softness) for crystal in zip(charges, positions, cells, strict=True)]
    energies, forces = (torch.stack(parts) for parts in zip(*found, strict=True))
    return Crystals(charges, positions, cells, energies, forces)


def ewald(charges: Tensor, positions: Tensor, cell: Tensor, softness: float) -> tuple[Tensor, Tensor]:
    """Energy (), and forces (N, 3), of one cell."""
    inverse, highest = torch.linalg.inv(cell), LAST / softness
    reach = (cell.norm(dim=1) * highest / (2 * math.pi)).int().tolist()  # |n_i| <= |a_i| |k| / 2 pi
    numbers = torch.cartesian_prod(*(torch.arange(-n, n + 1, dtype=torch.float64) for n in reach))
    numbers = numbers[len(numbers) // 2 + 1 :]  # in this order n and -n mirror each other about zero: one of each pair
    waves = 2 * math.pi * numbers @ inverse.T
    square = waves.square().sum(1)
    numbers, waves, square = (x[square < highest**2] for x in (numbers, waves, square))
    weights = 8 * math.pi / torch.linalg.det(cell).abs() * (-(softness**2) * square).exp() / square
    phases = 2 * math.pi * (positions @ inverse) @ numbers.T
    cosine, sine = phases.cos(), phases.sin()
    even, odd = charges @ cosine, charges @ sine
    energy = (weights * (even.square() + odd.square())).sum() / 2
    forces = charges[:, None] * ((weights * (sine * even - cosine * odd)) @ waves)
    return energy - charges.square().sum() / (2 * softness * math.sqrt(math.pi)), forces


def opened(crystals: Crystals, softness: float) -> Crystals:
    """The charges of each cell alone, at the same places, without images: their cells are zero."""
    charges, positions = crystals.charges, crystals.positions.clone().requires_grad_()
    size = charges.shape[1]
    first, second = torch.triu_indices(size, size, 1)
    distance = (positions[:, first] - positions[:, second]).norm(dim=2)
    pairs = charges[:, first] * charges[:, second]
    energies = (pairs * torch.erf(distance / (2 * softness)) / distance).sum(1)
    (slope,) = torch.autograd.grad(energies.sum(), positions)
    return crystals._replace(cells=torch.zeros_like(crystals.cells), energies=energies.detach(), forces=-slope)


def repeated(crystals: Crystals, times: tuple[int, int, int]) -> Crystals:
    """The same crystals in supercells, of so many cells along each lattice vector."""
    charges, positions, cells, energies, forces = crystals
    count = math.prod(times)
    shifts = torch.cartesian_prod(*(torch.arange(n, dtype=cells.dtype) for n in times)) @ cells  # (B, count, 3)
    return Crystals(
        charges.repeat(1, count),
        (shifts[:, :, None] + positions[:, None]).flatten(1, 2),
        cells * torch.tensor(times, dtype=cells.dtype)[:, None],
        energies * count,
        forces.repeat(1, count, 1),
    )


def moved(crystals: Crystals, seed: int) -> Crystals:
    """The same crystals, every atom moved by lattice vectors of its own, up to one along each."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-1, 2, crystals.positions.shape, generator=generator).to(crystals.cells)
    return crystals._replace(positions=crystals.positions + numbers @ crystals.cells)


def in_another_cell(crystals: Crystals) -> Crystals:
    """The same crystals in cells more skewed and left-handed where they were right-handed, with all atoms inside."""
    change = torch.tensor([[0, 1, 0], [1, 1, 0], [0, -1, 1]], dtype=crystals.cells.dtype)
    cells = change @ crystals.cells
    fractions = crystals.positions @ torch.linalg.inv(cells)
    return crystals._replace(positions=(fractions - fractions.floor()) @ cells, cells=cells)
