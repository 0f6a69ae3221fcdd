"""Pairs of ions and molecules that part, with energies and forces by GFN2-xTB (tblite).

Fragments are ions, hydrated or not, and neutral molecules. In training they are 4.2 to 9 A apart, in the tests 9.5 to
14 A. Energies are those of the pair minus the mean energies of its fragments.
"""

from __future__ import annotations

from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import CalculationFailed
from ase.optimize import BFGS
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation

TRAIN, VALIDATION, SINGLE = 320, 40, 6  # pairs, pairs, and frames of each fragment alone
RATTLE, NEAREST, OF_PAIR = 0.04, 3.0, 0.05  # A; A; charge in e by which a fragment may differ from a whole number
TESTS = [
    ("Na", "Na"), ("NH4", "NH4"), ("Na", "NH4"), ("HCOO", "HCOO"), ("NH4", "HCOO"), ("Na", "HCOO"), ("NH4", "Cl"),
    ("Na", "Cl"), ("NH4", "CH4"), ("HCOO", "CH3OH"), ("Na", "H2O"), ("H2O", "H2O"), ("CH3OH", "NH3"), ("HCOOH", "CH4"),
]  # fmt: skip
CHARGES = {"Na": 1, "NH4": 1, "Cl": -1, "HCOO": -1, "H2O": 0, "CH4": 0, "NH3": 0, "CH3OH": 0, "HCOOH": 0}


def fragments() -> dict[str, Atoms]:
    """Relaxed fragments around their centers. Na and Cl have a molecule of water."""
    side = 1.02 / 3**0.5
    ammonium = side * np.array([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    made = {
        "Na": Atoms("Na") + water(2.3, False), "NH4": Atoms("NH4", ammonium), "Cl": Atoms("Cl") + water(3.1, True),
        "HCOO": Atoms("HCOO", [[-1.1, 0, 0], [0, 0, 0], [0.6, 1.1, 0], [0.6, -1.1, 0]]),
    }  # fmt: skip
    made |= {name: molecule(name) for name in CHARGES if name not in made}
    for name, atoms in made.items():
        calculate(atoms, CHARGES[name])
        BFGS(atoms, logfile=None).run(fmax=0.05, steps=200)
        atoms.calc = None
        atoms.positions -= atoms.positions.mean(0)
    return made


def water(distance: float, turned: bool) -> Atoms:
    """Water whose oxygen is on the x axis, with its hydrogens on the side of the origin if ``turned``."""
    found = molecule("H2O")
    found.positions -= found.positions[0]
    found.rotate(90, "y")
    found.positions[:, 0] *= -1 if turned else 1
    found.positions[:, 0] += -distance
    return found


def calculate(atoms: Atoms, charge: int) -> None:
    from tblite.ase import TBLite

    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0, charge=charge)


def labelled(atoms: Atoms, names: list[str], distance: float, first: int) -> Atoms | None:
    """The frame with labels; None if fragments touch or have exchanged charge, or if the calculation fails. ``first``
    counts the atoms of the first fragment."""
    if len(names) == 2 and cdist(atoms.positions[:first], atoms.positions[first:]).min() < NEAREST:
        return None
    charge = sum(CHARGES[name] for name in names)
    calculate(atoms, charge)
    try:
        energy, forces, charges = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_charges()
    except CalculationFailed:
        return None
    atoms.calc = None
    if abs(charges[:first].sum() - CHARGES[names[0]]) > OF_PAIR:
        return None
    atoms.info.update(REF_energy=energy, charge=charge, distance=distance, first=first, pair="-".join(names))
    atoms.arrays["REF_forces"] = forces
    return atoms


def moved(atoms: Atoms, random: np.random.Generator) -> Atoms:
    """Rattled and turned."""
    atoms = atoms.copy()
    atoms.positions += RATTLE * random.normal(size=atoms.positions.shape)
    atoms.positions = Rotation.random(random_state=random).apply(atoms.positions)
    return atoms


def generate(seed: int = 0) -> dict[str, list[Atoms]]:
    """Frames to train on, to validate and to test."""
    random, made = np.random.default_rng(seed), fragments()

    def pair(names: list[str], distance: float, parts: list[Atoms]) -> Atoms | None:
        second = parts[1].copy()
        second.positions[:, 0] += distance
        return labelled(parts[0] + second, names, distance, len(parts[0]))

    near: list[Atoms] = []
    while len(near) < TRAIN + VALIDATION:
        names = list(random.choice(list(CHARGES), 2))
        found = pair(names, random.uniform(4.2, 9.0), [moved(made[name], random) for name in names])
        near += [found] if found is not None else []
    alone = [
        labelled(moved(made[name], random), [name], 0.0, len(made[name])) for name in CHARGES for _ in range(SINGLE)
    ]
    far = []
    for names in map(list, TESTS):
        for line in range(2):
            parts = [moved(made[name], random) for name in names]
            for distance in np.linspace(9.5, 14, 7):
                if (found := pair(names, distance, parts)) is not None:
                    found.info["line"] = line
                    far.append(found)
    single = [atoms for atoms in alone if atoms is not None]
    mean = {name: np.mean([x.info["REF_energy"] for x in single if x.info["pair"] == name]) for name in CHARGES}
    for atoms in near + single + far:
        atoms.info["REF_energy"] -= sum(mean[name] for name in atoms.info["pair"].split("-"))
    return {"train": near[:TRAIN] + single, "validation": near[TRAIN:], "test": far}


def load(folder: Path) -> dict[str, list[Atoms]]:
    """The frames, which are computed once and kept in a folder: two minutes."""
    files = {part: folder / f"{part}.xyz" for part in ("train", "validation", "test")}
    if not all(file.is_file() for file in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for part, frames in generate().items():
            ase.io.write(files[part], frames)
    return {part: ase.io.read(file, ":") for part, file in files.items()}
