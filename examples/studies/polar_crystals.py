"""Phonons of polar crystals: MACE with and without charges, trained on DFT forces in small cells.

NaCl, MgO and wurtzite AlN (data/polar_crystals.py). ``--data`` is the folder of the files; nothing is downloaded. Each
model learns energies and forces of 40 cells of 64 atoms (AlN: 128). It is tested on other cells of this size, on cells
of 512 atoms, and on the longitudinal and transverse optical frequencies at 1/2 to 1/12 of a reciprocal vector. A local
potential does not split the two at small wave vectors.

DFT          phonopy with the forces of the largest cells and Born charges (needs phonopy and symfc)
MACE         the potential alone
torch-pme    MACE learns labels minus a smeared Coulomb energy of fixed charges, added by hand
charges      add_long_range with charges that are held
learned      learn=True from oxidation states, with Born charges of the unit cell as labels
searched     learn="scale" from oxidation states, without Born charges

Charges that are held are the Born charge over the root of the dielectric constant. Models need the extra mace.

    python examples/studies/polar_crystals.py --data ~/polar_crystals --crystals NaCl MgO --models MACE charges
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from data.polar_crystals import branches, dynamical_matrix, load, reference
from harness import study
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, parameters

TRAIN, VALIDATION = 40, 20
AXES = {"NaCl": (2,), "MgO": (2,), "AlN": (2, 0)}  # reciprocal vectors
PARTS = 2, 3, 4, 6, 8, 12
TESTS = {"validation": "validation", "small": "small cells", "large": "512 atoms"}
Model = Literal["DFT", "MACE", "torch-pme", "charges", "searched", "learned"]
RATES = {"NaCl": 0.03, "MgO": 0.06, "AlN": 0.06}  # learning rates with the least errors on validation data
SHOWN = ("LO", 2), ("LO", 4), ("LO", 8), ("LO", 12), ("TO", 12)
PLACES = {"LO2": "LO along c", "TO2": "TO along c", "LO0": "LO in the plane", "TO0": "TO in the plane"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolarCrystalsStudy(Settings):
    """Settings of this study."""

    STUDY: ClassVar[str] = "polar_crystals"
    SWEEP: ClassVar[tuple[str, ...]] = ("crystals", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs", "batch", "cutoff", "layers", "charge", "dielectric")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")

    crystals: tuple[Literal["NaCl", "MgO", "AlN"], ...] = ("NaCl",)
    """NaCl, MgO, AlN"""
    models: tuple[Model, ...] = ("MACE", "charges")
    """models to train, or DFT"""
    data: Path | None = None
    """folder of the files"""
    train: int = TRAIN
    """number of cells to train on"""
    cutoff: float = 5.0
    """of messages, in A"""
    layers: int = 2
    """of messages"""
    width: float = 2.0
    """of the smeared Coulomb kernel, in A"""
    charge: float | None = None
    """absolute value of the charges at the start; None for the model's own"""
    dielectric: bool = True
    """give the dielectric constant of the data"""
    epochs: int = 30
    batch: int = 1
    learning_rate: float = 0.03
    warmup: float = 0.1
    clip: float = 10.0

    def check(self) -> None:
        super().check()
        if not 0 < self.train <= TRAIN:
            raise ValueError(f"--train must be from 1 to {TRAIN}, got {self.train}")


PRESETS = {
    "quick": PolarCrystalsStudy(train=2, epochs=1),
    "study": PolarCrystalsStudy(
        crystals=("NaCl", "MgO"), models=("DFT", "MACE", "torch-pme", "charges"), seeds=(0, 1, 2),
        results=study.committed("polar_crystals"),
    ),
}  # fmt: skip


def train(settings: PolarCrystalsStudy) -> Outcome:
    """One model, trained and tested."""
    (name,), (model,) = settings.crystals, settings.models
    if settings.data is None:
        raise ValueError("--data must be the folder of the files, got none")
    crystal, start = load(settings.data, name), time.process_time()
    if model == "DFT":
        found = branches(reference(crystal), crystal, AXES[name], PARTS)
        more = {"errors": {}, "branches": found, "born": crystal.born.tolist()}
        return Outcome("force error", 0.0, 0, time.process_time() - start, more)
    from baselines.polar_potentials import Potential, rms

    potential = Potential(crystal, settings)
    potential.fit()
    seconds = time.process_time() - start
    tests = {"validation": crystal.small[TRAIN : TRAIN + VALIDATION], "small": crystal.small[TRAIN + VALIDATION :]}
    tests |= {"large": crystal.large} if crystal.large else {}
    errors = {test: 1000 * rms(potential.lacking(frames)) for test, frames in tests.items()}

    def matrix(axis: int, n: int) -> np.ndarray:
        return dynamical_matrix(potential.lacking, crystal, axis, n)

    found = branches(matrix, crystal, AXES[name], PARTS)
    more = {"errors": errors, "branches": found, "born": potential.born()}
    return Outcome("force error", errors["small"], parameters(potential.model), seconds, more)


def only(rows: list[Row], **settings: Any) -> list[Row]:
    """Rows with these settings; others that may differ are the defaults, and ``...`` is any."""
    wanted = {name: PolarCrystalsStudy().identity()[name] for name in PolarCrystalsStudy.SHOWN} | settings
    return [row for row in rows if all(x is ... or row.setting(name) == x for name, x in wanted.items())]


def best(rows: list[Row]) -> list[Row]:
    """Rows with the learning rates of their crystals, and those of DFT."""
    found = []
    for name, rate in RATES.items():
        every = only(rows, crystals=name, models=..., learning_rate=...)
        found += [row for row in every if row.setting("models") == "DFT" or row.setting("learning_rate") == rate]
    return found


def table(rows: list[Row], *names: str) -> str:
    """Errors of forces in meV/A, frequencies in THz and Born charges in e, by these settings."""
    axes = list(dict.fromkeys(kind[2:] for row in rows for kind in row.more["branches"]))
    shown = [(kind + axis, n) for axis in axes for kind, n in SHOWN]
    lines = []
    for key, group in grouped(rows, *names).items():
        cells = ["-" if x is None else str(x) for x in key]
        for test in TESTS:
            found = [row.more["errors"][test] for row in group if test in row.more["errors"]]
            cells.append(mean_and_spread(found, 2) if found else "-")
        cells += [mean_and_spread((row.more["branches"][kind][str(n)] for row in group), 2) for kind, n in shown]
        born = [abs(np.trace(row.more["born"][0])) / 3 for row in group if row.more["born"]]
        cells += [mean_and_spread(born, 3) if born else "-", f"{np.mean([row.seconds for row in group]):.0f}"]
        lines.append(cells)
    header = [f"{PLACES[kind] if len(axes) > 1 else kind[:2]}, 1/{n}" for kind, n in shown]
    return markdown([*names, *TESTS.values(), *header, "Born charge", "seconds"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Tables of phonons, of AlN, of cutoffs and layers of MACE alone, and of how the training was chosen."""
    care, order = ("epochs", "batch", "learning_rate"), {name: n for n, name in enumerate(get_args(Model))}
    rows = sorted(rows, key=lambda row: order[row.setting("models")])
    cubic, others = [[row for row in some if row.setting("crystals") != "AlN"] for some in (best(rows), rows)]
    parts = {
        "phonons": (cubic, ("crystals", "models")),
        "aluminium_nitride": ([row for row in best(rows) if row.setting("crystals") == "AlN"], ("models",)),
        "local": (only(others, models="MACE", cutoff=..., layers=...), ("crystals", "cutoff", "layers")),
        "training": (only(others, **dict.fromkeys(care, ...)), ("crystals", "models", *care)),
    }
    return {name: table(part, *names) for name, (part, names) in parts.items() if part}


if __name__ == "__main__":
    study.main(PolarCrystalsStudy(), PRESETS, __doc__, train, report)
