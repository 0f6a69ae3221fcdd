"""Molecules of Lennard-Jones atoms, and the study of global attentions on them."""

import math

import pytest
import torch
from data.lennard_jones import DEPTHS, LENGTHS, SIZES, STIFFNESSES, lennard_jones
from data.lennard_jones import Potential as LennardJones
from scipy.spatial.transform import Rotation


@pytest.fixture(scope="module")
def molecules():
    return lennard_jones(5, 4, 9, seed=1, steps=60)


def test_energies_are_the_sum_over_pairs(molecules):
    """Atom by atom; forces are minus the gradient; turning, shifting and mirroring changes no energy."""
    for species, bonds, pos, energy, forces in zip(*molecules, strict=True):
        there = int((species >= 0).sum())
        places = pos[:there].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for i in range(there):
            for j in range(i):
                r = (places[i] - places[j]).square().sum().sqrt()
                if bonds[i, j] >= 0:
                    total = total + STIFFNESSES[bonds[i, j]] * (r - LENGTHS[bonds[i, j]]) ** 2 / 2
                else:
                    size = (SIZES[species[i]] + SIZES[species[j]]) / 2
                    depth = math.sqrt(DEPTHS[species[i]] * DEPTHS[species[j]])
                    total = total + 4 * depth * ((size / r) ** 12 - (size / r) ** 6)
        assert float(energy) == pytest.approx(total.item(), rel=1e-10)
        (slope,) = torch.autograd.grad(total, places)
        torch.testing.assert_close(forces[:there], -slope, rtol=1e-9, atol=1e-9)
        assert (forces[there:] == 0).all()
        assert (pos[there:] == 0).all()
    turn = torch.tensor(Rotation.random(rng=3).as_matrix())
    moved = molecules.positions @ turn.T + 7.0
    potential = LennardJones(molecules.species, molecules.bonds)
    for positions in (moved, -moved):
        torch.testing.assert_close(potential.energies(positions), molecules.energies, rtol=1e-9, atol=1e-9)
