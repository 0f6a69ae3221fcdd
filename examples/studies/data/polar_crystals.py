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
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ase import Atoms

FILES = {
    "NaCl": "phono3py_params_NaCl.yaml.xz",
    "MgO": "phono3py_params_MgO-222rd-444rd.yaml.xz",
    "AlN": "phonopy_params_mp-661.yaml.xz",  # wurtzite
}
COULOMB = 14.3996454785  # of two elementary charges, in eV A
TERAHERTZ = 15.6333043  # of the root of eV / (A^2 u)
Forces = Callable[["Sequence[Atoms]"], list[np.ndarray]]


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
        return {self.unit.symbols[n]: float(np.trace(self.born[site])) / 3 / root for n, site in enumerate(self.site)}

    def masses(self) -> np.ndarray:
        """Masses of the atoms of the primitive cell."""
        return self.unit.get_masses()[np.unique(self.site, return_index=True)[1]]


def load(folder: Path, name: str) -> PolarCrystal:
    """The crystal of this name.

    Raises:
        FileNotFoundError: if its file is not in the folder.
    """
    import yaml

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
    from ase import Atoms

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
    site, mass = np.tile(crystal.site, n), crystal.masses()
    wave = np.exp(2j * math.pi * atoms.get_scaled_positions(wrap=False)[:, axis])
    moved = []
    for s in range(len(mass)):
        for direction in np.eye(3):
            for phase in (wave.real, wave.imag):
                for sign in (1, -1):
                    moved.append(atoms.copy())
                    moved[-1].positions += sign * step * (phase * (site == s))[:, None] * direction
    found = np.array(forces(moved)).reshape(-1, 2, 2, len(atoms), 3)  # site and direction, phase, sign
    slope = (found[:, :, 1] - found[:, :, 0]) / (2 * step)
    response = (slope[:, 0] + 1j * slope[:, 1]) * wave.conj()[:, None]
    sites = np.eye(len(mass))[site]
    matrix = np.einsum("pja, js -> psa", response, sites / sites.sum(0)).reshape(len(found), -1)
    matrix = matrix / np.sqrt(np.outer(mass, mass)).repeat(3, 0).repeat(3, 1)
    return (matrix + matrix.conj().T) / 2


def polar_mode(matrix: np.ndarray, crystal: PolarCrystal, direction: np.ndarray) -> float:
    """Frequency, in THz, of the mode with the largest dipole along the direction; negative if it is imaginary."""
    squares, modes = np.linalg.eigh(matrix)
    dipole = (crystal.born @ direction / np.sqrt(crystal.masses())[:, None]).reshape(-1)
    square = squares[np.abs(dipole @ modes).argmax()]
    return float(np.copysign(np.sqrt(abs(square)), square)) * TERAHERTZ


def branches(
    matrix: Callable[[int, int], np.ndarray], crystal: PolarCrystal, axes: Sequence[int], parts: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Frequencies of the longitudinal and transverse optical modes at 1 / n of the reciprocal vectors of these axes."""
    found: dict[str, dict[str, float]] = {}
    for axis in axes:
        along = crystal.unit.cell.reciprocal()[axis]
        along = along / np.linalg.norm(along)
        across = crystal.unit.cell[0 if axis == 2 else 2]  # at right angles to it
        for n in parts:
            one = matrix(axis, n)
            for kind, direction in (("LO", along), ("TO", across)):
                found.setdefault(f"{kind}{axis}", {})[str(n)] = polar_mode(one, crystal, direction)
    return found


def reference(crystal: PolarCrystal) -> Callable[[int, int], np.ndarray]:
    """Dynamical matrices by phonopy, from the forces of the largest cells and Born charges."""
    from phonopy import Phonopy
    from phonopy.structure.atoms import PhonopyAtoms

    unit, frames = crystal.unit, crystal.large or crystal.small
    size = np.rint(frames[0].cell.lengths() / unit.cell.lengths()).astype(int)
    places, masses = unit.get_scaled_positions(), unit.get_masses()
    cell = PhonopyAtoms(unit.symbols, cell=unit.cell, scaled_positions=places, masses=masses)
    phonons = Phonopy(cell, supercell_matrix=np.diag(size), primitive_matrix=np.eye(3))
    steps = np.array([atoms.positions for atoms in frames]) - phonons.supercell.positions
    phonons.dataset = {"displacements": steps, "forces": np.array([atoms.arrays["REF_forces"] for atoms in frames])}
    phonons.produce_force_constants(fc_calculator="symfc")
    phonons.nac_params = {"born": crystal.born[crystal.site], "dielectric": crystal.dielectric, "factor": COULOMB}
    sites = np.eye(len(crystal.born))[crystal.site]
    waves = np.kron(sites / np.sqrt(sites.sum(0)), np.eye(3))

    def matrix(axis: int, n: int) -> np.ndarray:
        phonons.dynamical_matrix.run(np.eye(3)[axis] / n)
        return waves.T @ phonons.dynamical_matrix.dynamical_matrix @ waves

    return matrix
