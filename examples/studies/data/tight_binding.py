"""Molecules whose energies and forces are computed: Ko et al.'s systems (2021) by GFN-xTB instead of DFT.

Charge moves over the whole system in both: a carbon chain whose end is protonated, and a cluster of salt that lacks a
sodium. All that is near an atom is the same in both members of a pair, and still its forces are not.
"""

from __future__ import annotations

import numpy as np

from .published_molecules import TRAIN, VALIDATION, Molecule, Parts

BOHR, HARTREE = 0.529177210903, 27.211386245988  # in A and eV
SHORT, LONG, HYDROGEN = 1.21, 1.36, 1.07  # bonds of a chain of carbons, in A
SALT = 2.82  # between neighbours in rock salt


def chain(protonated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Atomic numbers and positions of C10H2, or with two more hydrogens at one end, in place of its own, C10H3+."""
    bonds = [SHORT if n % 2 == 0 else LONG for n in range(9)]
    carbons = np.zeros((10, 3))
    carbons[1:, 0] = np.cumsum(bonds)
    far = carbons[-1] + [HYDROGEN, 0, 0]
    ends = [[-HYDROGEN, 0, 0]]
    if protonated:
        ends = [[-HYDROGEN / 2, side * HYDROGEN * 3**0.5 / 2, 0] for side in (1, -1)]
    return np.array([6] * 10 + [1] * (1 + len(ends))), np.concatenate([carbons, [far], ends])


def salt(lacking: bool) -> tuple[np.ndarray, np.ndarray]:
    """Na9Cl8+: 17 of the 3 x 3 x 2 sites of a block of rock salt, all but a chlorine at a corner; without the sodium at
    the opposite one Na8Cl8+."""
    sites = np.array([(x, y, z) for x in range(3) for y in range(3) for z in range(2)])
    numbers = np.where(sites.sum(1) % 2 == 0, 11, 17)
    kept = (sites != (2, 2, 1)).any(1)
    if lacking:
        kept &= (sites != (0, 0, 0)).any(1)
    return numbers[kept], SALT * sites[kept]


def computed(method: str, numbers: np.ndarray, pos: np.ndarray, charge: int, **info: object) -> Molecule:
    """With tblite's energy and forces."""
    from tblite.interface import Calculator  # which not all need

    calculator = Calculator(method, numbers, pos / BOHR, charge=charge, uhf=(int(numbers.sum()) - charge) % 2)
    calculator.set("verbosity", 0)
    found = calculator.singlepoint()
    energy, slope = found.get("energy") * HARTREE, found.get("gradient") * (HARTREE / BOHR)
    return Molecule(numbers, pos, float(energy), -slope, dict(info))


def pairs_of_systems(name: str, count: int, seed: int) -> Parts:
    """``count`` rattled structures of each member of a pair, six tenths to train on, a tenth to choose the epoch; tests
    on each member.

    Args:
        name: "chains", C10H2 and C10H3+, or "salt", Na8Cl8+ and Na9Cl8+.
    """
    random = np.random.default_rng(seed)
    parts: Parts = {TRAIN: [], VALIDATION: []}
    if name == "chains":
        members = {"C10H2": (*chain(False), 0), "C10H3+": (*chain(True), 1)}
    else:
        members = {"Na8Cl8+": (*salt(True), 1), "Na9Cl8+": (*salt(False), 1)}
    method, rattle = {"chains": ("GFN2-xTB", 0.05), "salt": ("GFN1-xTB", 0.08)}[name]
    for member, (numbers, pos, charge) in members.items():
        moved = pos + rattle * random.normal(size=(count, *pos.shape))
        found = [computed(method, numbers, place, charge, member=member) for place in moved]
        cuts = 6 * count // 10, 7 * count // 10
        parts[TRAIN] += found[: cuts[0]]
        parts[VALIDATION] += found[cuts[0] : cuts[1]]
        parts[member] = found[cuts[1] :]
    return parts
