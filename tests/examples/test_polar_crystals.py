"""Phonons from forces are those of springs; the reader reads what phonopy writes."""

import lzma
import math

import numpy as np
import pytest

pytest.importorskip("ase")
yaml = pytest.importorskip("yaml")

from ase.build import bulk  # noqa: E402
from ase.neighborlist import neighbor_list  # noqa: E402
from data.polar_crystals import FILES, TERAHERTZ, branches, dynamical_matrix, load  # noqa: E402

SIDE, SPRING, CHARGE, DIELECTRIC = 5.6, 2.0, 1.1, 2.5


def springs(systems):
    """Forces of springs between nearest neighbors."""
    found = []
    for atoms in systems:
        i, vectors = neighbor_list("iD", atoms, 0.6 * SIDE)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        forces = np.zeros((len(atoms), 3))
        np.add.at(forces, i, SPRING * (lengths - SIDE / 2) * vectors / lengths)
        found.append(forces)
    return found


def cell_of(atoms):
    points = [
        {"symbol": s, "coordinates": x.tolist(), "mass": float(m)}
        for s, x, m in zip(atoms.symbols, atoms.get_scaled_positions(), atoms.get_masses(), strict=True)
    ]
    return {"lattice": atoms.cell[:].tolist(), "points": points}


@pytest.fixture
def folder(tmp_path):
    """A file of rock salt with springs, as phono3py writes it."""
    unit, primitive = bulk("NaCl", "rocksalt", SIDE, cubic=True), bulk("NaCl", "rocksalt", SIDE)
    random, found = np.random.default_rng(0), {"unit_cell": cell_of(unit), "primitive_cell": cell_of(primitive)}
    for cell, labels, size, count in (("supercell", "dataset", 1, 6), ("phonon_supercell", "phonon_dataset", 2, 1)):
        atoms = unit.repeat(size)
        steps = 0.03 * random.normal(size=(count, len(atoms), 3))
        frames = [atoms.copy() for _ in steps]
        for frame, step in zip(frames, steps, strict=True):
            frame.positions += step
        found[cell] = cell_of(atoms)
        found[labels] = {"displacements": steps.tolist(), "forces": [f.tolist() for f in springs(frames)]}
    found["dataset"]["supercell_energies"] = [-1.0 * n for n in range(6)]
    born = [(q * np.eye(3)).tolist() for q in (CHARGE, -CHARGE)]
    found["nac"] = {"born_effective_charge": born, "dielectric_constant": (DIELECTRIC * np.eye(3)).tolist()}
    with lzma.open(tmp_path / FILES["NaCl"], "wt") as file:
        yaml.safe_dump(found, file)
    return tmp_path


def test_phonons(folder):
    crystal, parts = load(folder, "NaCl"), (2, 3, 12)
    found = branches(lambda axis, n: dynamical_matrix(springs, crystal, axis, n), crystal, (2,), parts)
    masses = crystal.unit.get_masses()[[0, -1]]
    inverse, product = (1 / masses).sum(), masses.prod()
    for n in parts:
        longitudinal = inverse + math.sqrt(inverse**2 - 4 * math.sin(math.pi / n) ** 2 / product)
        assert found["LO2"][n] == pytest.approx(TERAHERTZ * math.sqrt(SPRING * longitudinal), rel=1e-4)
        assert found["TO2"][n] == pytest.approx(TERAHERTZ * math.sqrt(2 * SPRING * inverse), rel=1e-4)
