"""Pairs of ions and molecules that part, with energies and forces by GFN2-xTB (tblite).

Fragments are ions, hydrated or not, and neutral molecules. In training they are 4.2 to 9 A apart, in the tests 9.5 to
14 A. Energies are those of the pair minus the mean energies of its fragments. Ions of the second set are those that
GFN2-xTB leaves whole at all distances; bare Na+ and Cl-, for example, exchange 0.4 e. The sets of lithium and potassium
were held back while the form of charges was chosen.
"""

from __future__ import annotations

import itertools
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
MIXED = {"Na": 1, "NH4": 1, "Cl": -1, "HCOO": -1, "H2O": 0, "CH4": 0, "NH3": 0, "CH3OH": 0, "HCOOH": 0}
IONS = {"NH4": 1, "CH3NH3": 1, "BF4": -1, "ClO4": -1}
LITHIUM = {"Li": 1, "NH4": 1, "F": -1, "HCOO": -1, "H2O": 0, "CH4": 0, "CH3F": 0, "HF": 0}
POTASSIUM = {"K": 1, "CH3NH3": 1, "Br": -1, "CN": -1, "C2H4": 0, "CH3CN": 0, "CO2": 0, "NH3": 0}
WATER = {"H2O": 0, "2 H2O": 0, "3 H2O": 0}
CHARGES = MIXED | IONS | LITHIUM | POTASSIUM | WATER | {"bare Cl": -1}
SETS = {  # first fragments, second fragments, and pairs of the tests
    "pairs": (list(MIXED), list(MIXED), [
        ("Na", "Na"), ("NH4", "NH4"), ("Na", "NH4"), ("HCOO", "HCOO"), ("NH4", "HCOO"), ("Na", "HCOO"), ("NH4", "Cl"),
        ("Na", "Cl"), ("NH4", "CH4"), ("HCOO", "CH3OH"), ("Na", "H2O"), ("H2O", "H2O"), ("CH3OH", "NH3"),
        ("HCOOH", "CH4"),
    ]),
    "ions": (list(IONS), list(IONS), list(itertools.combinations_with_replacement(IONS, 2))),
    "lithium": (list(LITHIUM), list(LITHIUM), [
        ("Li", "Li"), ("NH4", "Li"), ("F", "F"), ("F", "HCOO"), ("Li", "F"), ("NH4", "HCOO"), ("Li", "HCOO"),
        ("NH4", "F"), ("F", "CH3F"), ("Li", "H2O"), ("NH4", "CH3F"), ("HCOO", "HF"), ("H2O", "CH3F"), ("HF", "CH4"),
    ]),
    "potassium": (list(POTASSIUM), list(POTASSIUM), [
        ("K", "K"), ("K", "CH3NH3"), ("Br", "CN"), ("Br", "Br"), ("K", "Br"), ("CH3NH3", "CN"), ("K", "CN"),
        ("CH3NH3", "Br"), ("CN", "CH3CN"), ("K", "NH3"), ("CH3NH3", "CO2"), ("Br", "C2H4"), ("CH3CN", "CO2"),
        ("NH3", "CH3CN"),
    ]),
    "chloride": (["bare Cl"], list(WATER), [("bare Cl", name) for name in WATER]),
}  # fmt: skip


def fragments(names: list[str]) -> dict[str, Atoms]:
    """Relaxed fragments around their centers. Na and Cl have a molecule of water."""
    tetrahedron = np.array([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / 3**0.5
    own = {
        "Na": Atoms("Na") + water(2.3, False), "NH4": Atoms("NH4", 1.02 * tetrahedron),
        "Cl": Atoms("Cl") + water(3.1, True), "bare Cl": Atoms("Cl"), "BF4": Atoms("BF4", 1.4 * tetrahedron),
        "Li": Atoms("Li") + water(1.9, False), "F": Atoms("F") + water(2.6, True),
        "K": Atoms("K") + water(2.7, False), "Br": Atoms("Br") + water(3.3, True),
        "CN": Atoms("CN", [[0, 0, 0], [1.17, 0, 0]]), "HF": Atoms("HF", [[0, 0, 0], [0.93, 0, 0]]),
        "ClO4": Atoms("ClO4", 1.45 * tetrahedron), "2 H2O": ring(2), "3 H2O": ring(3),
        "HCOO": Atoms("HCOO", [[-1.1, 0, 0], [0, 0, 0], [0.6, 1.1, 0], [0.6, -1.1, 0]]),
        "CH3NH3": molecule("C2H6"), "CH3F": molecule("CH3Cl"),
    }  # fmt: skip
    own["CH3NH3"].symbols[1] = "N"
    own["CH3F"].symbols[own["CH3F"].numbers == 17] = "F"
    made = {name: own[name] if name in own else molecule(name) for name in names}
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


def ring(count: int) -> Atoms:
    """Molecules of water of a ring of three, each with a hydrogen towards the next."""
    found = Atoms()
    for angle in range(0, 120 * count, 120):
        one = Atoms("OH2", [[1.62, 0, 0], [0.79, 0.48, 0], [2.1, 0, 0.83]])
        one.rotate(angle, "z")
        found += one
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


def generate(name: str, seed: int = 0) -> dict[str, list[Atoms]]:
    """Frames of a set to train on, to validate and to test."""
    *sides, tests = SETS[name]
    every = list(dict.fromkeys(sides[0] + sides[1]))
    random, made = np.random.default_rng(seed), fragments(every)

    def pair(names: list[str], distance: float, parts: list[Atoms]) -> Atoms | None:
        second = parts[1].copy()
        second.positions[:, 0] += distance
        return labelled(parts[0] + second, names, distance, len(parts[0]))

    near: list[Atoms] = []
    while len(near) < TRAIN + VALIDATION:
        names = [str(random.choice(side)) for side in sides]
        found = pair(names, random.uniform(4.2, 9.0), [moved(made[name], random) for name in names])
        near += [found] if found is not None else []
    alone = [labelled(moved(made[name], random), [name], 0.0, len(made[name])) for name in every for _ in range(SINGLE)]
    far = []
    for names in map(list, tests):
        for line in range(2):
            parts = [moved(made[name], random) for name in names]
            for distance in np.linspace(9.5, 14, 7):
                if (found := pair(names, distance, parts)) is not None:
                    found.info["line"] = line
                    far.append(found)
    single = [atoms for atoms in alone if atoms is not None]
    mean = {name: np.mean([x.info["REF_energy"] for x in single if x.info["pair"] == name]) for name in every}
    for atoms in near + single + far:
        atoms.info["REF_energy"] -= sum(mean[name] for name in atoms.info["pair"].split("-"))
    return {"train": near[:TRAIN] + single, "validation": near[TRAIN:], "test": far}


def load(folder: Path, name: str) -> dict[str, list[Atoms]]:
    """The frames of a set, which are computed once and kept in a folder: two minutes."""
    folder = folder / name
    files = {part: folder / f"{part}.xyz" for part in ("train", "validation", "test")}
    if not all(file.is_file() for file in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for part, frames in generate(name).items():
            ase.io.write(files[part], frames)
    return {part: ase.io.read(file, ":") for part, file in files.items()}
