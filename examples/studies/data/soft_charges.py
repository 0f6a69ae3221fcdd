"""Neutral clouds of soft point charges in an open box, their potentials, fields, energies and forces.

The charges are +1 and -1, as many of each, at independent places in a cube. At the place of charge i, with
d = sqrt(r_ij^2 + s^2) and s the softness,

    potential_i = sum_j q_j / d,     field_i = sum_j q_j (x_i - x_j) / d^3     (j other than i),
    energy = 1/2 sum_i q_i potential_i,     force_i = q_i field_i = - d energy / d x_i.

Units: lengths as the box, charges 1, Coulomb's constant 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clouds(NamedTuple):
    """Float64, the first axis counts clouds."""

    charges: Tensor  # (B, N)
    positions: Tensor  # (B, N, 3)
    potentials: Tensor  # (B, N)
    fields: Tensor  # (B, N, 3)

    @property
    def energies(self) -> Tensor:
        return (self.charges * self.potentials).sum(1) / 2

    @property
    def forces(self) -> Tensor:
        return self.charges[..., None] * self.fields


def soft_charges(count: int, charges: int, side: float, softness: float, seed: int) -> Clouds:
    """``count`` clouds of an even number of ``charges`` in a cube of this ``side``."""
    generator = torch.Generator().manual_seed(seed)
    positions = side * torch.rand(count, charges, 3, dtype=torch.float64, generator=generator)
    signs = torch.ones(count, charges, dtype=torch.float64)
    signs[:, ::2] = -1
    offset = positions[:, :, None] - positions[:, None]  # x_i - x_j
    inverse = (offset.square().sum(-1) + softness**2).rsqrt() * (1 - torch.eye(charges, dtype=torch.float64))
    potentials = torch.einsum("bij,bj->bi", inverse, signs)
    fields = torch.einsum("bij,bj,bijd->bid", inverse**3, signs, offset)
    return Clouds(signs, positions, potentials, fields)
