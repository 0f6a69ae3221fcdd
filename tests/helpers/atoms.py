"""Atoms as ASE has them: a crystal, a slab of it, two molecules apart; moved, strained and turned."""

import numpy as np
from ase import Atoms
from ase.build import bulk, molecule


def salt(repeat=(1, 1, 1)):
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.set_cell(atoms.cell.array + 0.3 * np.random.default_rng(2).normal(size=(3, 3)), scale_atoms=True)
    return atoms.repeat(repeat)


def slab():
    atoms = salt()
    atoms.pbc = [True, False, True]
    return atoms


def waters(distance):
    first, second = molecule("H2O"), molecule("H2O")
    second.positions += [distance, 0, 0]
    return first + second


def pull(energy):
    """The energy that parts two ions from 12 to 20 A: no path of edges joins them."""
    near, far = (energy(Atoms("NaCl", [[0, 0, 0], [0, 0, distance]])) for distance in (12.0, 20.0))
    return far - near


def differences(function, step=1e-3):
    """The derivative of a function at 0, of fourth order."""
    a, b, c, d = (function(n * step) for n in (-2, -1, 1, 2))
    return (a - 8 * b + 8 * c - d) / (12 * step)


def check_forces_and_stress(energy, atoms, forces, stress):
    """Forces are differences of energies, and so is the stress where one is given."""

    def moved(size):
        near = atoms.copy()
        near.positions[2, 1] += size
        return energy(near)

    assert abs(differences(moved) + forces[2, 1].item()) < 1e-6 * forces.abs().max()
    for i, j in [(0, 0), (0, 1), (2, 1)] if stress is not None else []:

        def strained(size, i=i, j=j):
            near, strain = atoms.copy(), np.zeros((3, 3))
            strain[i, j] += size / 2
            strain[j, i] += size / 2
            near.set_cell(near.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            return energy(near)

        found = differences(strained) / atoms.get_volume()
        assert abs(found - stress[i, j].item()) < 1e-6 * stress.abs().max()


def turned(systems, matrix):
    out = [atoms.copy() for atoms in systems]
    for atoms in out:
        atoms.set_cell(atoms.cell.array @ matrix.T)
        atoms.positions = atoms.positions @ matrix.T
    return out


def check_far(energy, gain):
    """A supercell has as many times the energy; a molecule sees another beyond all messages, unless the gain is 0."""
    assert abs(energy(salt((2, 1, 1))) / energy(salt()) - 2) < 1e-6
    assert abs(energy(waters(12.0)) - energy(waters(13.0))) > 1e-9
    gain.data.zero_()
    assert abs(energy(waters(12.0)) - energy(waters(13.0))) < 1e-12


def check_derivatives(call, positions, parameters, volume=None):
    """Forces, stress, and the gradient of a loss on forces by parameters, along random directions, are differences.

    ``call`` takes displacements (atoms, 3) and a strain (3, 3) and returns the energy, forces and stress, which may be
    differentiated. ``volume=None`` leaves out stress.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    random = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    along, strain, still = random(positions), random(torch.zeros(3, 3, dtype=positions.dtype)), torch.zeros(3, 3)
    strain = strain + strain.mT
    _, forces, stress = call(0 * along, still.to(along))
    close(-(forces * along).sum(), lambda size: call(size * along, still.to(along))[0])
    if volume is not None:
        close((stress * strain).sum() * volume, lambda size: call(0 * along, size * strain)[0])
    directions = [random(x) for x in parameters]
    slopes = torch.autograd.grad((forces * along).sum(), parameters)

    def loss(size):
        with torch.no_grad():
            for x, direction in zip(parameters, directions, strict=True):
                x.add_(direction, alpha=size)
        found = (call(0 * along, still.to(along))[1] * along).sum()
        with torch.no_grad():
            for x, direction in zip(parameters, directions, strict=True):
                x.sub_(direction, alpha=size)
        return found

    close(sum((x * direction).sum() for x, direction in zip(slopes, directions, strict=True)), loss)


def close(slope, function):
    found = differences(lambda size: function(size).item(), 3e-4)
    assert abs(found - slope.item()) < 1e-5 * abs(found)
