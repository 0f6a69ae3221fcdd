"""Motion by velocity Verlet, and the study of whose forces keep the energy."""

import dataclasses
import math

import pytest
import torch
from data.soft_charges import alternating
from data.verlet import trapped, velocity_verlet
from dynamics import PRESETS, Model, exact, learned, measures


def springs(positions):
    """Each point on a spring of stiffness 1: x(t) = x cos t + v sin t."""
    return positions.square().sum((1, 2)) / 2, -positions


def start(*shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, 3, dtype=torch.float64, generator=generator) for _ in range(2)]


def test_velocity_verlet_is_of_second_order_and_reversible():
    positions, velocities = start(2, 3)
    errors, scatter = [], []
    for steps in (40, 80):
        motion = velocity_verlet(springs, positions, velocities, 2 / steps, steps)
        errors.append(float((motion.positions - positions * math.cos(2) - velocities * math.sin(2)).abs().max()))
        scatter.append(float((motion.energy - motion.energy[0]).abs().max()))
        assert motion.potential.shape == motion.kinetic.shape == (steps + 1, 2)
    for coarse, fine in (errors, scatter):
        assert fine > 1e-8
        assert coarse / fine == pytest.approx(4, rel=0.05)
    back = velocity_verlet(springs, motion.positions, -motion.velocities, 2 / steps, steps)
    torch.testing.assert_close(back.positions, positions, rtol=0, atol=1e-12)
    torch.testing.assert_close(-back.velocities, velocities, rtol=0, atol=1e-12)


@pytest.mark.parametrize("operator", ["none", "EwaldAttention", "SE3HyenaOperator", "VectorSelfAttention"])
def test_forces_are_derivatives_of_energies(operator):
    """The exact ones' and those of a model with each operator, in the units they learn in."""
    settings = dataclasses.replace(PRESETS["quick"], operators=(operator,))
    charges, (positions, way) = alternating(2, 6), start(2, 6)
    model = Model(settings).eval().double().requires_grad_(False)
    for potential in (exact(charges, 0.5), learned(model, charges, 0.3)):
        (ahead, _), (behind, _) = (potential(positions + step * way) for step in (1e-5, -1e-5))
        work = -(potential(positions)[1] * way).sum((1, 2))
        assert work.abs().min() > 1e-3
        torch.testing.assert_close((ahead - behind) / 2e-5, work, rtol=1e-5, atol=1e-6)


def by_order_of_radii(positions):
    """Springs whose stiffness rises or falls, in turn, with a point's place in the order of radii."""
    place = positions.square().sum(-1).argsort(1).argsort(1).double()
    place[:, ::2] *= -1
    stiffness = (1 + place / 6)[..., None]
    return (stiffness * positions.square()).sum((1, 2)) / 2, -stiffness * positions


def test_smooth_energies_are_kept_and_others_jump():
    """Fluctuations fall with dt^2; an energy that hangs on the order of radii jumps where two are exchanged."""
    charges, (positions, velocities) = alternating(1, 6), start(1, 6)
    settings = dataclasses.replace(PRESETS["quick"], operators=("none",))
    model = Model(settings).eval().double().requires_grad_(False)
    found = {}
    for name, potential, dt, steps in [
        ("exact", exact(charges, 0.5), 0.02, 100),
        ("model", learned(model, charges, 0.1), 0.005, 30),
        ("ordered", by_order_of_radii, 0.02, 100),
    ]:
        runs = [(dt, steps), (dt / 2, 2 * steps)]
        motions = [velocity_verlet(trapped(potential, 0.3), positions, velocities, *run) for run in runs]
        found[name] = [measures(m.energy, run[0]) for m, run in zip(motions, runs, strict=True)]
    for name in ("exact", "model"):
        coarse, fine = found[name]
        assert coarse["fluctuation"][0] / fine["fluctuation"][0] == pytest.approx(4, rel=0.2), name
        assert found["ordered"][1]["jump"][0] > 30 * fine["jump"][0]
    assert found["ordered"][1]["jump"][0] > 0.5 * found["ordered"][0]["jump"][0]
