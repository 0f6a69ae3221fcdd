"""Polar crystals: forces, Born charges and dielectric tensors by DFT, and phonons from forces.

The files are examples of phonopy and phono3py (github.com/phonopy, BSD-3-Clause), whose labels are VASP's with PBEsol.
Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import lzma
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ase import Atoms, units

FILES = {
    "NaCl": "phono3py_params_NaCl.yaml.xz",
    "MgO": "phono3py_params_MgO-222rd-444rd.yaml.xz",
    "AlN": "phonopy_params_mp-661.yaml.xz",  # wurtzite
}
TERAHERTZ = 1e3 * units.fs / (2 * math.pi)  # of the root of eV / (A^2 u)
Forces = Callable[[Sequence[Atoms]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class PolarCrystal:
    """A crystal and its frames, which have ``info["REF_energy"]`` (eV) and ``arrays["REF_forces"]`` (eV/A).

    Args:
        unit: unit cell.
        site: for each atom of ``unit`` the index of its atom in the primitive cell.
        small: supercells of 64 atoms (AlN: 128), with random displacements of 0.03 A.
        large: supercells of 512 atoms (AlN: none), likewise.
        born: Born charges of the atoms of the primitive cell, (sites, 3, 3), in elementary charges.
        dielectric: electronic dielectric tensor, (3, 3).
    """

    unit: Atoms
    site: np.ndarray
    small: list[Atoms]
    large: list[Atoms]
    born: np.ndarray
    dielectric: np.ndarray

    def charges(self) -> dict[str, float]:
        """By element, the charge that gives the right forces: the Born charge over the root of the dielectric constant,
        both averaged over directions."""
        root = math.sqrt(np.trace(self.dielectric) / 3)
        return {
            self.unit.symbols[list(self.site).index(n)]: float(np.trace(born)) / 3 / root
            for n, born in enumerate(self.born)
        }


def load(folder: Path, name: str) -> PolarCrystal:
    """The crystal of this name.

    Raises:
        FileNotFoundError: if its file is not in the folder.
    """
    path = folder / FILES[name]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {name}: an example of phonopy or phono3py, github.com/phonopy")
    with lzma.open(path) as file:
        found = yaml.load(file, Loader=yaml.CSafeLoader)
    unit, primitive = _atoms(found["unit_cell"]), _atoms(found["primitive_cell"])
    steps = (unit.positions[:, None] - primitive.positions) @ np.linalg.inv(primitive.cell)  # whole between images
    image = np.abs(steps - steps.round()).max(2) < 1e-3
    return PolarCrystal(
        unit,
        image.argmax(1),
        _frames(found["supercell"], found["dataset"]),
        _frames(found["phonon_supercell"], found["phonon_dataset"]) if "phonon_dataset" in found else [],
        np.array(found["nac"]["born_effective_charge"]),
        np.array(found["nac"]["dielectric_constant"]),
    )


def _atoms(cell: dict[str, Any]) -> Atoms:
    points = cell["points"]
    places = [point["coordinates"] for point in points]
    masses = [point["mass"] for point in points]
    return Atoms([p["symbol"] for p in points], scaled_positions=places, cell=cell["lattice"], pbc=True, masses=masses)


def _frames(cell: dict[str, Any], labels: dict[str, Any]) -> list[Atoms]:
    frames = []
    energies = labels.get("supercell_energies", [math.nan] * len(labels["forces"]))
    for step, forces, energy in zip(labels["displacements"], labels["forces"], energies, strict=True):
        atoms = _atoms(cell)
        atoms.positions += np.array(step)
        atoms.info["REF_energy"], atoms.arrays["REF_forces"] = energy, np.array(forces)
        frames.append(atoms)
    return frames


def dynamical_matrix(forces: Forces, crystal: PolarCrystal, axis: int, n: int, step: float = 0.01) -> np.ndarray:
    """Dynamical matrix, (3 sites, 3 sites), in eV / (A^2 u), at 1 / n of a reciprocal vector of the unit cell.

    Phonons are frozen: in n unit cells along the axis, all atoms of a site move by ``step`` A times a wave. ``forces``
    gives the forces of many systems.
    """
    atoms = crystal.unit.repeat([n if i == axis else 1 for i in range(3)])
    site, mass = np.tile(crystal.site, n), atoms.get_masses()
    wave = np.exp(2j * math.pi * atoms.get_scaled_positions(wrap=False)[:, axis])
    moved = []
    for s in range(len(crystal.born)):
        for direction in np.eye(3):
            for phase in (wave.real, wave.imag):
                for sign in (1, -1):
                    moved.append(atoms.copy())
                    moved[-1].positions += sign * step * (phase * (site == s))[:, None] * direction
    found = np.array(forces(moved)).reshape(-1, 2, 2, len(atoms), 3)  # site and direction, phase, sign
    slope = (found[:, :, 1] - found[:, :, 0]) / (2 * step)
    response = (slope[:, 0] + 1j * slope[:, 1]) * wave.conj()[:, None] / np.sqrt(mass)[:, None]
    sites = np.eye(len(crystal.born))[site]
    first = (sites * mass[:, None]).sum(0) / sites.sum(0)  # masses of the sites
    matrix = np.einsum("pja, js -> psa", response, sites / sites.sum(0)).reshape(len(found), -1)
    matrix = matrix / np.sqrt(first).repeat(3)[:, None]
    return (matrix + matrix.conj().T) / 2


def polar_mode(matrix: np.ndarray, crystal: PolarCrystal, direction: np.ndarray) -> float:
    """Frequency, in THz, of the mode with the largest dipole along the direction; negative if it is imaginary."""
    squares, modes = np.linalg.eigh(matrix)
    mass = [crystal.unit.get_masses()[list(crystal.site).index(n)] for n in range(len(crystal.born))]
    dipole = (crystal.born @ direction / np.sqrt(mass)[:, None]).reshape(-1)
    square = squares[np.abs(dipole @ modes).argmax()]
    return float(np.copysign(np.sqrt(abs(square)), square)) * TERAHERTZ


def branches(
    matrix: Callable[[int, int], np.ndarray], crystal: PolarCrystal, axes: Sequence[int], parts: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Frequencies of the longitudinal and transverse optical modes at 1 / n of the reciprocal vectors of these axes."""
    found: dict[str, dict[int, float]] = {}
    for axis in axes:
        along = crystal.unit.cell.reciprocal()[axis]
        along = along / np.linalg.norm(along)
        across = crystal.unit.cell[0 if axis == 2 else 2]  # at right angles to it
        for n in parts:
            one = matrix(axis, n)
            for kind, direction in (("LO", along), ("TO", across)):
                found.setdefault(f"{kind}{axis}", {})[n] = polar_mode(one, crystal, direction)
    return found
