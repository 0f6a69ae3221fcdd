"""Atoms as ASE has them: a crystal, a slab of it, two molecules apart."""

import numpy as np
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
    """Two molecules of water so far from each other."""
    first, second = molecule("H2O"), molecule("H2O")
    second.positions += [distance, 0, 0]
    return first + second
