"""Published sets of molecules from the files they come in, extended XYZ and NumPy's; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Parts = dict[str, list["Molecule"]]  # "train", "validation", and tests by name
TRAIN, VALIDATION = "train", "validation"


class Molecule(NamedTuple):
    """One structure: energy in eV, positions in A, forces in eV/A where they are known."""

    numbers: np.ndarray  # (N,), atomic
    pos: np.ndarray  # (N, 3)
    energy: float
    forces: np.ndarray | None
    info: dict[str, Any]
    cell: np.ndarray | None = None  # lattice vectors as rows, in A, of what repeats


SYMBOLS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9, "Na": 11, "Cl": 17, "I": 53}


def read_xyz(path: Path) -> list[Molecule]:
    """All structures of an extended XYZ file with ``species``, ``pos`` and, perhaps, ``forces``.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged.
    """
    lines, found, start = path.read_text().splitlines(), [], 0
    try:
        while start < len(lines) and lines[start].strip():
            count = int(lines[start])
            words = {key: word.strip('"') for key, word in re.findall(r'(\w+)=("[^"]*"|\S+)', lines[start + 1])}
            names, widths = zip(*re.findall(r"(\w+):[SRIL]:(\d+)", words.pop("Properties")), strict=True)
            ends = np.cumsum([0, *map(int, widths)])
            rows = [line.split() for line in lines[start + 2 : start + 2 + count]]
            if len(rows) < count or any(len(row) != ends[-1] for row in rows):
                raise ValueError(f"{count} atoms of {ends[-1]} columns are announced in line {start + 1}")
            columns = {name: [row[a:b] for row in rows] for name, a, b in zip(names, ends[:-1], ends[1:], strict=True)}
            numbers = np.array([SYMBOLS[symbol] for (symbol,) in columns["species"]])
            pos, forces = (np.array(columns[key], float) if key in columns else None for key in ("pos", "forces"))
            cell = np.array(words["Lattice"].split(), float).reshape(3, 3) if words.get("pbc") == "T T T" else None
            found.append(Molecule(numbers, pos, float(words.pop("energy")), forces, words, cell))
            start += 2 + count
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path} must be extended XYZ with species, pos and energy, got a damaged file: {error}"
        ) from None
    return found


def read_npz(path: Path, forces: bool = True) -> list[Molecule]:
    """All structures of an archive of ``atomic_numbers``, ``positions``, ``energy`` and ``forces``."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in ("atomic_numbers", "positions", "energy", "forces")}
    known = arrays["forces"].astype(float)
    return [
        Molecule(z.astype(int), p.astype(float), float(e), f if forces else None, {})
        for z, p, e, f in zip(*list(arrays.values())[:3], known, strict=True)
    ]  # fmt: skip


def parted(molecules: list[Molecule], train: int, held_out: int, seed: int) -> Parts:
    """At random: to train on, to choose the epoch, and the rest to test on."""
    order = np.random.default_rng(seed).permutation(len(molecules))
    cuts = np.split(order, [train, train + held_out])
    return {name: [molecules[n] for n in cut] for name, cut in zip((TRAIN, VALIDATION, "test"), cuts, strict=True)}


def cumulenes(folder: Path) -> Parts:
    """Chains of 3 to 10, 13 and 14 carbons with two hydrogens at each end, turned; tests on 11, 12, 15, 16 too."""
    train, held_out, test = (read_xyz(folder / "gnl" / f"gnl-v0.2-{part}.xyz") for part in ("train", "val", "test"))
    parts: Parts = {TRAIN: train, VALIDATION: held_out, "in domain": [], "11, 12 C": [], "15, 16 C": []}
    for molecule in test:
        kind = molecule.info["config_type"]
        parts["in domain" if kind == "in-domain" else f"{kind[-5:].replace(',', ', ')} C"].append(molecule)
    return parts


def torsion(folder: Path) -> Parts:
    """C9H4, whose end is turned by 90 degrees in a thousand steps."""
    return parted(read_npz(folder / "efa" / "cumulene_profile.npz"), 200, 100, 0)


def substitution(folder: Path) -> Parts:
    """F- and CH3I along the path to CH3F and I-; energies alone."""
    return parted(read_npz(folder / "efa" / "sn2_F_I.npz", forces=False), 150, 50, 0)


def clusters(folder: Path) -> Parts:
    """32 atoms of one kind within 5 A."""
    return parted(read_npz(folder / "efa" / "3D_cluster_32_atoms_radius_5.npz"), 400, 100, 0)


def acetylacetone(folder: Path) -> Parts:
    """Dynamics at 300 K, of which the last tenth chooses the epoch; tests there, at 600 K and along two paths."""
    every = read_xyz(folder / "acac" / "train_300K.xyz")
    names = {"300 K": "MD_300K", "600 K": "MD_600K", "dihedral": "dihedral", "H transfer": "H_transfer"}
    tests = {name: read_xyz(folder / "acac" / f"test_{file}.xyz") for name, file in names.items()}
    return {TRAIN: every[:-50], VALIDATION: every[-50:]} | tests


def dimers(folder: Path, kinds: Sequence[int] = (0, 2, 3, 4, 5, 6)) -> Parts:
    """One pair of molecules of each of six kinds (charged, polar, apolar), at ten distances from 4 to 12 A; tests are
    at 12 to 15 A. Energies of the two molecules are subtracted."""
    train, test = (
        [m for kind in kinds for m in read_xyz(folder / "lode" / f"{part}-id{kind}.xyz")] for part in ("train", "test")
    )
    parts = {TRAIN: train, "farther": test}
    return {name: [_interaction(molecule) for molecule in part] for name, part in parts.items()}


def _interaction(molecule: Molecule) -> Molecule:
    info = molecule.info | {"charge": sum(int(molecule.info[key]) for key in ("chargeA", "chargeB"))}
    info |= {"first": int(info["indexB"]), "pair": info["label"]}
    return molecule._replace(energy=float(info["inter_energy"]), info=info, cell=None)


def water(folder: Path) -> Parts:
    """64 molecules at 300 K, in a cell that repeats."""
    every = read_xyz(folder / "water" / "bec_example.xyz")
    return {TRAIN: every[:16], "test": every[16:]}


SETS: dict[str, tuple[Callable[[Path], Parts], str]] = {
    "cumulenes": (cumulenes, "gnl/ of github.com/LarsSchaaf/Guaranteed-Non-Local-Molecular-Dataset"),
    "C9H4": (torsion, "efa/cumulene_profile.npz of doi.org/10.5281/zenodo.14750286"),
    "SN2": (substitution, "efa/sn2_F_I.npz of doi.org/10.5281/zenodo.14750286"),
    "clusters": (clusters, "efa/3D_cluster_32_atoms_radius_5.npz of doi.org/10.5281/zenodo.14750286"),
    "AcAc": (acetylacetone, "acac/ of github.com/davkovacs/BOTNet-datasets"),
    "dimers": (
        dimers,
        "lode/: charged, polar and apolar dimers of Grisafi and Ceriotti (2019), as fits of LES use them",
    ),
    "CC": (partial(dimers, kinds=(0,)), "lode/, the dimer of two ions"),
    "PP": (partial(dimers, kinds=(5,)), "lode/, the dimer of two polar molecules"),
    "water": (water, "water/bec_example.xyz of github.com/lab-cosmo/lorem-jax"),
}


def load(folder: Path | str, name: str) -> Parts:
    """A set by its name, from the folder that holds those of all sets.

    Raises:
        FileNotFoundError: if a file is missing; says which, and where it comes from.
        ValueError: if one is damaged.
    """
    read, source = SETS[name]
    try:
        return read(Path(folder).expanduser().absolute())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error.filename} is missing. {name}: {source}") from error
