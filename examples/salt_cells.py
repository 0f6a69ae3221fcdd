"""Cells of rocksalt with energies and forces of GFN1-xTB (tblite), for the quick starts of MACE and NequIP."""

import numpy as np
from ase import Atoms
from ase.build import bulk
from tblite.ase import TBLite


def labelled(seed: int, length: int = 1) -> Atoms:
    """Eight ions, rattled and strained; in cells of several lengths, opposite ions move apart along a wave."""
    random = np.random.default_rng(seed)
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat((1, 1, length))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.02 * random.normal(size=(3, 3))), scale_atoms=True)
    atoms.rattle(0.1, rng=random)
    if length > 1:
        wave = np.cos(2 * np.pi * atoms.get_scaled_positions()[:, 2])
        atoms.positions[:, 2] += 0.15 * np.where(atoms.numbers == 11, wave, -wave)
    atoms.calc = TBLite(method="GFN1-xTB", verbosity=0)
    atoms.info["REF_energy"], atoms.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = None
    return atoms


def training() -> list[Atoms]:
    return [labelled(seed) for seed in range(60)]


def tests() -> list[Atoms]:
    """Cells as in training."""
    return [labelled(seed) for seed in range(100, 110)]


def longer() -> list[Atoms]:
    """Cells four times as long, with a wave."""
    return [labelled(seed, 4) for seed in range(200, 203)]


def error(calculator, systems: list[Atoms]) -> float:
    """Root mean square error of forces, in meV/A."""
    errors = []
    for atoms in systems:
        atoms.calc = calculator
        errors.append(atoms.get_forces() - atoms.arrays["REF_forces"])
    return 1000 * float(np.sqrt(np.square(np.concatenate(errors)).mean()))
