"""Molecules of Lennard-Jones atoms with bonds: their graphs, configurations at a temperature, energies and forces.

A molecule is a tree of bonds, mostly a chain, of 20 to 40 atoms of three species. With r_ij the distance of two atoms,

    energy = sum over bonds k (r_ij - r_0)^2 / 2 + sum over all other pairs 4 e_ij ((s_ij / r_ij)^12 - (s_ij / r_ij)^6)

k and r_0 are those of the bond's kind (single, double), s_ij and e_ij mixed from the species' (Lorentz-Berthelot).
Forces are minus the gradient. Every molecule is grown atom by atom, relaxed, and moved by Langevin dynamics.

Units: size and depth of the second species' potential, its mass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIZES = 0.9, 1.0, 1.1  # s of the species
DEPTHS = 0.5, 1.0, 1.5  # e
LENGTHS = 1.0, 0.85  # r_0 of single and double bonds
STIFFNESSES = 60.0, 120.0  # k
PART = 64  # molecules that are moved at a time


class Molecules(NamedTuple):
    """The first axis counts molecules, of at most N atoms; real numbers are float64."""

    species: Tensor  # (B, N), -1 where there is no atom
    bonds: Tensor  # (B, N, N), kind of the bond or -1, symmetric
    positions: Tensor  # (B, N, 3), zero where there is no atom
    energies: Tensor  # (B,)
    forces: Tensor  # (B, N, 3)


class Potential:
    """Energies and forces of molecules with these species and bonds, at positions (B, N, 3)."""

    def __init__(self, species: Tensor, bonds: Tensor) -> None:
        there, bonded = species >= 0, bonds >= 0
        others = there[:, :, None] & there[:, None] & ~bonded & ~torch.eye(species.shape[1], dtype=torch.bool)
        sizes, depths = torch.tensor([SIZES, DEPTHS], dtype=torch.float64)[:, species.clamp(min=0)]
        lengths, stiffnesses = torch.tensor([LENGTHS, STIFFNESSES], dtype=torch.float64)[:, bonds.clamp(min=0)]
        self.species, self.lengths, self.stiffnesses = species, lengths, stiffnesses * bonded
        self.squared_sizes = ((sizes[:, :, None] + sizes[:, None]) / 2).square()
        self.depths = (depths[:, :, None] * depths[:, None]).sqrt() * others
        self.no_pair = ~(bonded | others)

    def squares(self, positions: Tensor) -> Tensor:
        """Of the distances (B, N, N); 1 where there is no pair."""
        own = positions.square().sum(-1)
        square = own[:, :, None] + own[:, None] - 2 * positions @ positions.mT
        return square.masked_fill(self.no_pair, 1.0)

    def energies(self, positions: Tensor) -> Tensor:
        """(B,)"""
        square = self.squares(positions)
        sixth = (self.squared_sizes / square) ** 3
        bonds = self.stiffnesses * (square.sqrt() - self.lengths).square() / 2
        return (4 * self.depths * sixth * (sixth - 1) + bonds).sum((1, 2)) / 2

    def forces(self, positions: Tensor) -> Tensor:
        """(B, N, 3)"""
        square = self.squares(positions)
        sixth = self.squared_sizes / square
        sixth = sixth * sixth * sixth
        slope = 24 * self.depths * sixth * (2 * sixth - 1) / square
        slope = slope + self.stiffnesses * (self.lengths * square.rsqrt() - 1)  # times x_i - x_j
        return slope.sum(-1, keepdim=True) * positions - slope @ positions


def lennard_jones(
    count: int, fewest: int, most: int, seed: int, *, temperature: float = 0.5, steps: int = 300
) -> Molecules:
    """``count`` molecules of ``fewest`` to ``most`` atoms after so many steps of Langevin dynamics."""
    generator = torch.Generator().manual_seed(seed)
    species, bonds = graphs(count, fewest, most, generator)
    parts = []
    for part in torch.arange(count).split(PART):
        potential = Potential(species[part], bonds[part])
        positions = moved(potential, relaxed(potential, grown(bonds[part], generator)), temperature, steps, generator)
        of = potential.energies(positions), potential.forces(positions)
        parts.append(Molecules(species[part], bonds[part], positions, *of))
    return Molecules(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def graphs(count: int, fewest: int, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Species and bonds: trees in which three of four atoms follow the one before, and a third of bonds are double."""
    sizes = torch.randint(fewest, most + 1, (count, 1), generator=generator)
    there = torch.arange(most) < sizes
    species = torch.randint(len(SIZES), (count, most), generator=generator).masked_fill(~there, -1)
    bonds = torch.full((count, most, most), -1)
    row = torch.arange(count)
    for atom in range(1, most):
        before = torch.full((count,), atom - 1)
        anywhere = torch.randint(atom, (count,), generator=generator)
        parent = torch.where(torch.rand(count, generator=generator) < 0.75, before, anywhere)
        kind = (torch.rand(count, generator=generator) < 1 / 3).long()
        kind = torch.where(there[:, atom], kind, -1)
        bonds[row, atom, parent] = bonds[row, parent, atom] = kind
    return species, bonds


def grown(bonds: Tensor, generator: torch.Generator, tries: int = 32) -> Tensor:
    """Positions (B, N, 3): atom after atom at a bond's length from the one it is bonded to, away from all others."""
    count, most = bonds.shape[:2]
    positions = torch.zeros(count, most, 3, dtype=torch.float64)
    row = torch.arange(count)
    for atom in range(1, most):
        parent = bonds[:, atom, :atom].argmax(1)  # of the only bond to an earlier atom
        way = torch.randn(count, tries, 3, dtype=torch.float64, generator=generator)
        places = positions[row, parent][:, None] + way / way.norm(dim=-1, keepdim=True)
        apart = torch.cdist(places, positions[:, :atom]).amin(-1)  # at most 1, as the parent is there
        positions[:, atom] = places[row, apart.argmax(1)]
    return positions * (bonds.amax(1) >= 0)[..., None]


def relaxed(potential: Potential, positions: Tensor, steps: int = 100) -> Tensor:
    """Downhill, by at most 0.05 a step."""
    for _ in range(steps):
        step = 0.002 * potential.forces(positions)
        positions = positions + step * (0.05 / step.norm(dim=-1, keepdim=True).clamp(min=0.05))
    return positions


def moved(
    potential: Potential, positions: Tensor, temperature: float, steps: int, generator: torch.Generator
) -> Tensor:
    """After Langevin dynamics of unit masses and friction, in steps of 0.01 (BAOAB)."""
    dt, there = 0.01, (potential.species >= 0)[..., None]
    kept = torch.tensor(-dt, dtype=torch.float64).exp()
    kicked = (temperature * (1 - kept**2)).sqrt()
    velocities = torch.randn(positions.shape, dtype=torch.float64, generator=generator) * temperature**0.5 * there
    forces = potential.forces(positions)
    for _ in range(steps):
        velocities = velocities + dt / 2 * forces
        noise = torch.randn(positions.shape, dtype=torch.float64, generator=generator) * there
        turned = kept * velocities + kicked * noise
        positions = positions + dt / 2 * (velocities + turned)
        forces = potential.forces(positions)
        velocities = turned + dt / 2 * forces
    return positions
