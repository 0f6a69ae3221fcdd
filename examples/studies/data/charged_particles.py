"""The charged n-body simulator of Fuchs et al. (2020) and Satorras et al. (2021), vectorised over systems."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

STEPS, EVERY, DT = 5000, 100, 0.001
STRENGTH, LARGEST_FORCE, SPEED = 1.0, 100.0, 0.5


class Trajectories(NamedTuple):
    """Frames of systems: positions and velocities (systems, frames, n, 3), charges (systems, n)."""

    positions: Tensor
    velocities: Tensor
    charges: Tensor


def forces(positions: Tensor, charges: Tensor) -> Tensor:
    """Coulomb forces between all particles of each system, each component of a sum clipped."""
    difference = positions[:, :, None] - positions[:, None]
    distance = difference.square().sum(-1).sqrt()
    distance.diagonal(dim1=1, dim2=2).fill_(1.0)
    size = STRENGTH * charges[:, :, None] * charges[:, None] / distance.pow(3)
    size.diagonal(dim1=1, dim2=2).zero_()
    return (size[..., None] * difference).sum(2).clamp_(-LARGEST_FORCE, LARGEST_FORCE)


def simulate(systems: int, seed: int, particles: int = 5, steps: int = STEPS, progress: bool = True) -> Trajectories:
    """Start systems and let them go: velocity kick first, then drift.

    Unit masses, charges +-1 with equal probability, positions N(0, 1) scaled by (n / 5)^(1/3), velocities of norm 0.5
    in any direction. The first frame is the start; frame f + 1 comes after 100 (f + 1) steps.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = systems, particles, 3
    position = torch.randn(shape, generator=generator, dtype=torch.float64) * (particles / 5) ** (1 / 3)
    velocity = torch.randn(shape, generator=generator, dtype=torch.float64)
    velocity *= SPEED / velocity.norm(dim=-1, keepdim=True)
    charges = torch.randint(2, (systems, particles), generator=generator).double() * 2 - 1
    frames = [(position.clone(), velocity.clone())]
    for step in tqdm(range(1, steps + 1), desc="simulating", leave=False, disable=not progress):
        velocity += DT * forces(position, charges)
        position += DT * velocity
        if step % EVERY == 0:
            frames.append((position.clone(), velocity.clone()))
    positions, velocities = (torch.stack(kind, 1) for kind in zip(*frames, strict=True))
    return Trajectories(positions, velocities, charges)


def cached(systems: int, seed: int, particles: int, steps: int, folder: Path, progress: bool = True) -> Trajectories:
    """``simulate``, or what it gave before."""
    physics = STRENGTH, LARGEST_FORCE, SPEED, DT, EVERY
    key = hashlib.sha256(repr((systems, seed, particles, steps, physics)).encode()).hexdigest()[:12]
    path = folder / f"charged-{systems}-{seed}-{key}.pt"
    if path.exists():
        return Trajectories(**torch.load(path, weights_only=True))
    out = simulate(systems, seed, particles, steps, progress)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(out._asdict(), part := path.with_suffix(".part"))
    part.replace(path)
    return out


def linear_error(start: Tensor, velocity: Tensor, end: Tensor, time: float | None = None) -> tuple[float, float]:
    """Mean squared error of x + t v, and t; the best t where none is given."""
    displacement = end - start
    if time is None:
        time = float((displacement * velocity).sum() / velocity.square().sum())
    return float((displacement - time * velocity).square().mean()), time
