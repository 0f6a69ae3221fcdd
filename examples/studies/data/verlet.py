"""Motion of unit masses in a potential by velocity Verlet, and clouds as motion at a temperature leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Potential = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of positions (B, N, 3): energies (B,) and forces (B, N, 3)."""


class Motion(NamedTuple):
    """Where a motion ends, and its energies from the start on, after every step."""

    positions: Tensor  # (B, N, 3)
    velocities: Tensor  # (B, N, 3)
    potential: Tensor  # (steps + 1, B)
    kinetic: Tensor  # (steps + 1, B)

    @property
    def energy(self) -> Tensor:
        return self.potential + self.kinetic


def velocity_verlet(potential: Potential, positions: Tensor, velocities: Tensor, dt: float, steps: int) -> Motion:
    """Half a kick, a drift, half a kick: symplectic, reversible in time, errors of energy are of second order in dt."""
    energy, force = potential(positions)
    potentials, kinetics = [energy], [velocities.square().sum((1, 2)) / 2]
    for _ in range(steps):
        half = velocities + dt / 2 * force
        positions = positions + dt * half
        energy, force = potential(positions)
        velocities = half + dt / 2 * force
        potentials.append(energy)
        kinetics.append(velocities.square().sum((1, 2)) / 2)
    return Motion(positions, velocities, torch.stack(potentials), torch.stack(kinetics))


def trapped(potential: Potential, stiffness: float) -> Potential:
    """Each point also held to the origin by the energy stiffness |x|^2 / 2."""

    def both(positions: Tensor) -> tuple[Tensor, Tensor]:
        energy, force = potential(positions)
        return energy + stiffness / 2 * positions.square().sum((1, 2)), force - stiffness * positions

    return both


def maxwell(like: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Velocities of a temperature."""
    return math.sqrt(temperature) * torch.randn(like.shape, dtype=like.dtype, generator=generator)


def equilibrated(
    potential: Potential, positions: Tensor, temperature: float, dt: float, steps: int, rounds: int, seed: int
) -> Tensor:
    """Positions after ``rounds`` motions of so many steps, each with velocities drawn anew at the temperature."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        positions = velocity_verlet(
            potential, positions, maxwell(positions, temperature, generator), dt, steps
        ).positions
    return positions
