"""Pairs of ions and molecules that part: MACE alone, and with charges that are predicted.

Cations, anions and neutral molecules are in one set, ions alone in a second, and chloride beside water in a third, with
labels by GFN2-xTB (data/ion_pairs.py); the total charge of each frame is given. Tests are pairs farther apart than all
of training: the error of the force between the two fragments, and its slope, the factor of 1 / distance in the energy.
Needs the extras mace and xtb.

Other sets are published ones (data/published_molecules.py), from the folder ``--data``: dimers of charged, polar and
apolar molecules, one dimer of two ions, one of two polar molecules, water, and acetylacetone.

MACE            the potential alone
predicted       add_long_range(charges="predicted"), and a loss of the charge that is shared; the potential alone
                where the data do not say what charges are
predicted+near  the same with exclude_near=False
formal          the potential beside Coulomb's law between the formal charges of the fragments, which models do not know
MACELES         MACE's own class, with latent charges by the package les (CC BY-NC; ``--les`` is the src folder of
                github.com/ChengUCB/les) at its defaults, and the ratio of the weights in its authors' scripts
PET, PET+long   PET of metatrain without and with long_range (needs metatrain and torch-pme, and not MACE)

    python examples/studies/ion_pairs.py --models MACE predicted --seeds 0 1 2
    python examples/studies/ion_pairs.py --data ~/molecules --sets dimers --epochs 200
    python examples/studies/ion_pairs.py --models MACELES --les ~/les/src --sets lithium potassium
    python examples/studies/ion_pairs.py --models PET PET+long --sets lithium potassium --learning-rate 0.001
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from data import published_molecules
from harness import study
from harness.results import Row
from harness.settings import Settings, SettingsError
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, parameters

from tg_equiattn.ewald.charges import COULOMB_CONSTANT

if TYPE_CHECKING:
    from ase import Atoms

ENERGY = 10.0, 1000.0  # weights of squared energies of an atom, and in the last quarter of the epochs, as in MACE
ENERGY_OF_LES = 1.0, 1000.0  # the same of MACELES
SHARED = 10.0  # weight of the squared charge that is shared, in 1 / e²
OWN = {"pairs": "ions and molecules", "ions": "ions that part", "chloride": "chloride beside water",
       "lithium": "lithium and fluorine", "potassium": "potassium and bromine"}  # fmt: skip
Model = Literal["MACE", "predicted", "predicted+near", "formal", "MACELES", "PET", "PET+long"]
KINDS = "like ions", "unlike ions", "an ion and a molecule", "two molecules"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IonPairsStudy(Settings):
    """Settings of this study."""

    STUDY: ClassVar[str] = "ion_pairs"
    SWEEP: ClassVar[tuple[str, ...]] = ("sets", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs", "batch")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data", "les")

    sets: tuple[
        Literal["pairs", "ions", "chloride", "lithium", "potassium", "dimers", "CC", "PP", "water", "AcAc"], ...
    ] = ("pairs",)
    """sets to train on"""
    data: Path | None = None
    """folder of the published files"""
    les: Path | None = None
    """folder that contains the package les, for MACELES"""
    models: tuple[Model, ...] = ("MACE", "predicted")
    """models to train"""
    train: int = 374
    """number of frames to train on"""
    cutoff: float = 4.0
    """of messages, in A"""
    epochs: int = 60
    batch: int = 10
    learning_rate: float = 0.02
    warmup: float = 0.02
    clip: float = 10.0


PRESETS = {
    "quick": IonPairsStudy(train=20, epochs=1),
    "study": IonPairsStudy(seeds=(0, 1, 2), results=study.committed("ion_pairs")),
}


def graphs(frames: Sequence[Atoms], table: Any, cutoff: float) -> list[Any]:
    from mace import data

    keys = data.KeySpecification({"energy": "REF_energy", "total_charge": "charge"}, {"forces": "REF_forces"})
    return [data.AtomicData.from_config(data.config_from_atoms(x, keys), table, cutoff=cutoff) for x in frames]


def build(settings: IonPairsStudy, frames: Sequence[Atoms], table: Any, sample: list[Any]) -> torch.nn.Module:
    from mace import modules
    from mace.modules.extensions import MACELES
    from mace.tools.torch_geometric.dataloader import DataLoader
    from tg_equiattn.integrations.mace import add_long_range, can_predict_charges

    from e3nn import o3  # isort: skip  (0.4.4 loads after mace alone)

    blocks, symbols = modules.interaction_classes, table.zs
    content = np.array([[(atoms.numbers == z).sum() for z in symbols] for atoms in frames])
    energies = np.array([atoms.info["REF_energy"] for atoms in frames])
    (name,) = settings.models
    if name == "MACELES":
        if settings.les is None:
            raise SettingsError("--les must be the folder that contains the package les, got none")
        sys.path.append(str(settings.les.expanduser().absolute()))
    model = (MACELES if name == "MACELES" else modules.ScaleShiftMACE)(
        r_max=settings.cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"], num_elements=len(symbols), correlation=2,
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"], hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"), gate=torch.nn.functional.silu, avg_num_neighbors=8.0, atomic_numbers=symbols,
        atomic_energies=np.linalg.lstsq(content, energies, rcond=None)[0], atomic_inter_shift=0.0,
        atomic_inter_scale=math.sqrt(np.square(np.concatenate([x.arrays["REF_forces"] for x in frames])).mean()),
    )  # fmt: skip
    if not name.startswith("predicted") or not can_predict_charges(sample):
        return model
    return add_long_range(
        model, charges="predicted", exclude_near=name == "predicted", batch=DataLoader(sample, batch_size=48)
    )


def fit(model: torch.nn.Module, loader: Any, settings: IonPairsStudy) -> None:
    """Train."""
    steps = settings.epochs * len(loader)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, amsgrad=True)
    energy = ENERGY_OF_LES if settings.models == ("MACELES",) else ENERGY
    rising = max(1, int(settings.warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / rising) * (1 - 0.97 * n / steps))
    for epoch in range(settings.epochs):
        weight = energy[4 * epoch >= 3 * settings.epochs]
        for batch in loader:
            out = model(batch.to_dict(), training=True)
            loss = weight * ((out["energy"] - batch.energy) / batch.ptr.diff()).square().mean()
            loss = loss + 100 * (out["forces"] - batch.forces).square().mean()
            if "shared_charge" in out:
                loss = loss + SHARED * out["shared_charge"].square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()


def coulomb(atoms: Atoms) -> tuple[float, np.ndarray]:
    """Energy and forces between the formal charges of two fragments. Each is spread over the atoms of its fragment; a
    bare ion with water has it all."""
    from ase.data import atomic_numbers
    from data.ion_pairs import CHARGES

    first = atoms.info.get("first", len(atoms))
    names = str(atoms.info.get("pair", "")).split("-")  # ase reads "F" as False
    charges = [float(CHARGES.get(name, 0)) for name in names]
    if "chargeA" in atoms.info:
        charges = [float(atoms.info[key]) for key in ("chargeA", "chargeB")]
    spread = np.zeros(len(atoms))
    for name, charge, start, end in zip(names, charges, (0, first), (first, len(atoms)), strict=False):
        end = start + 1 if name in atomic_numbers else end
        spread[start:end] = charge / max(1, end - start)
    offsets = atoms.positions[:first, None] - atoms.positions[None, first:]
    distances = np.linalg.norm(offsets, axis=-1)
    energies = COULOMB_CONSTANT * spread[:first, None] * spread[first:] / distances
    pushes = (energies / distances**2)[..., None] * offsets
    return float(energies.sum()), np.concatenate([pushes.sum(1), -pushes.sum(0)])


def without(atoms: Atoms, energy: float, forces: np.ndarray) -> Atoms:
    """The frame whose labels lack an energy and its forces."""
    atoms = atoms.copy()
    atoms.info["REF_energy"] -= energy
    atoms.arrays["REF_forces"] -= forces
    return atoms


def kind_of(pair: str) -> str:
    """The kind of a pair, by the charges of its fragments."""
    from data.ion_pairs import CHARGES

    if "-" not in pair:
        return pair
    first, second = (CHARGES[name] for name in pair.split("-"))
    if not first or not second:
        return "an ion and a molecule" if first or second else "two molecules"
    return "like ions" if first == second else "unlike ions"


def predictions(
    model: torch.nn.Module, loader: Any, known: Sequence[tuple[float, np.ndarray]] | None
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Energies, forces and the root mean square of shared charges. ``known`` has energies and forces of frames that
    are added to the model's."""
    asked = {"compute_shared_charge": True} if getattr(model, "long_range", None) is not None else {}
    found = [model(batch.to_dict(), **asked) for batch in loader]
    energies, forces = (torch.cat([out[key].detach() for out in found]).numpy() for key in ("energy", "forces"))
    energies += 0 if known is None else [energy for energy, _ in known]
    forces += 0 if known is None else np.concatenate([some for _, some in known])
    shared = [out["shared_charge"].detach() for out in found if "shared_charge" in out]
    return energies, forces, rms(torch.cat(shared).numpy()) if shared else None


def errors(
    frames: Sequence[Atoms], energies: np.ndarray, forces: np.ndarray, shared: float | None = None
) -> dict[str, Any]:
    """Root mean squares of errors of energies, in eV, of forces, in meV/A, and what pairs have beside."""
    labels = np.array([x.info["REF_energy"] for x in frames])
    measured = {"energy": rms(energies - labels), "shared": shared}
    if "REF_forces" not in frames[0].arrays:
        return measured
    lacking = np.split(
        forces - np.concatenate([x.arrays["REF_forces"] for x in frames]), np.cumsum([len(x) for x in frames])[:-1]
    )
    pairs = errors_of_pairs(frames, energies, labels, lacking) if "first" in frames[0].info else {}
    return measured | {"force": 1000 * rms(np.concatenate(lacking))} | pairs


def errors_of_pairs(
    frames: Sequence[Atoms], energies: np.ndarray, labels: np.ndarray, lacking: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Root mean squares of errors of net forces on the second fragment, in meV/A, in all and by kind of pair; slopes,
    divided by those of labels."""
    net = np.array([np.linalg.norm(d[x.info["first"] :].sum(0)) for d, x in zip(lacking, frames, strict=True)])
    kinds, slopes = np.array([kind_of(x.info["pair"]) for x in frames]), {}
    for kind in ("like ions", "unlike ions"):
        lines = [(x.info["pair"], x.info.get("line")) for x in frames]
        ratios = []
        for line in dict.fromkeys(line for line, own in zip(lines, kinds, strict=True) if own == kind):
            some = [n for n, other in enumerate(lines) if other == line]
            inverse = [1 / frames[n].info["distance"] for n in some]
            if len(some) > 1:
                ratios.append(np.polyfit(inverse, energies[some], 1)[0] / np.polyfit(inverse, labels[some], 1)[0])
        slopes |= {kind: float(np.mean(ratios))} if ratios else {}
    own = {str(kind): 1000 * rms(net[kinds == kind]) for kind in dict.fromkeys(kinds)}
    return {"net": 1000 * rms(net), "kinds": own, "slopes": slopes}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean())) if x.size else math.nan


def frames_of(settings: IonPairsStudy) -> dict[str, list[Atoms]]:
    """Frames to train on, to validate and to test, with ``REF_energy``, ``REF_forces`` and ``charge``."""
    (name,) = settings.sets
    if name in OWN:
        from data.ion_pairs import load

        return load(settings.output / settings.STUDY, name)
    if settings.data is None:
        raise SettingsError(f"--data must be the folder of the files of {name}, got none")
    return {
        part: [atoms_of(molecule) for molecule in some]
        for part, some in published_molecules.load(settings.data, name).items()
    }


def atoms_of(molecule: published_molecules.Molecule) -> Atoms:
    from ase import Atoms

    atoms = Atoms(molecule.numbers, molecule.pos, cell=molecule.cell, pbc=molecule.cell is not None)
    atoms.info = {"charge": 0} | molecule.info | {"REF_energy": molecule.energy}
    if molecule.forces is not None:
        atoms.arrays["REF_forces"] = molecule.forces
    return atoms


def train(settings: IonPairsStudy) -> Outcome:
    """One model, trained and tested."""
    return (train_pet if settings.models[0].startswith("PET") else train_mace)(settings)


def train_pet(settings: IonPairsStudy) -> Outcome:
    from baselines.pet import PET

    parts = frames_of(settings)
    start, pet = time.process_time(), PET(settings, parts.pop("train")[: settings.train], parts["validation"])
    pet.fit()
    seconds = time.process_time() - start
    return outcome({part: errors(some, *pet.predictions(some)) for part, some in parts.items()}, pet.model, seconds)


def outcome(more: dict[str, Any], model: torch.nn.Module, seconds: float) -> Outcome:
    """Errors by part of the data."""
    test = more[next(part for part in more if part != "validation")]
    metric, name = ("net", "net force error") if "net" in test else ("force", "force error")
    return Outcome(name, test[metric], parameters(model), seconds, more)


def train_mace(settings: IonPairsStudy) -> Outcome:
    from mace import tools
    from mace.tools.torch_geometric.dataloader import DataLoader

    torch.set_default_dtype(torch.float64)
    parts = frames_of(settings)
    table = tools.AtomicNumberTable(sorted({int(z) for x in parts["train"] for z in x.numbers}))
    frames, formal = parts.pop("train")[: settings.train], settings.models == ("formal",)
    every = parts | {"train": frames}
    known = {part: [coulomb(x) for x in some] if formal else None for part, some in every.items()}
    learned = {
        part: [without(x, *y) for x, y in zip(some, known[part], strict=True)] if formal else some
        for part, some in every.items()
    }
    made = {part: graphs(some, table, settings.cutoff) for part, some in learned.items()}
    start = time.process_time()
    model = build(settings, learned["train"], table, made["train"])
    fit(model, DataLoader(made["train"], batch_size=settings.batch, shuffle=True), settings)
    seconds = time.process_time() - start
    model.eval()
    more = {
        part: errors(some, *predictions(model, DataLoader(made[part], batch_size=16), known[part]))
        for part, some in parts.items()
    }
    return outcome(more, model, seconds)


def of_pairs(rows: list[Row]) -> str:
    """Errors of distant pairs."""
    lines = []

    def cell(values: list[float | None], digits: int) -> str:
        return "-" if None in values else mean_and_spread(values, digits)

    for (name, model, rate, epochs), group in grouped(rows, "sets", "models", "learning_rate", "epochs").items():
        tests = [row.more["test"] for row in group]
        cells = [OWN[name], model, str(epochs), str(rate), cell([row.more["validation"]["force"] for row in group], 1)]
        cells += [cell([test["force"] for test in tests], 1)]
        cells += [cell([test["net"] for test in tests], 1), cell([test["energy"] for test in tests], 2)]
        cells += [cell([test["kinds"].get(kind) for test in tests], 1) for kind in KINDS]
        cells += [cell([test["slopes"].get(kind) for test in tests], 2) for kind in ("like ions", "unlike ions")]
        cells += [cell([test["shared"] for test in tests], 3), f"{np.mean([row.seconds for row in group]):.0f}"]
        lines.append(cells)
    header = ["set", "model", "epochs", "rate", "force, near pairs", "force", "net force", "energy, eV", *KINDS,
              "slope, like ions", "slope, unlike ions", "shared charge", "seconds"]  # fmt: skip
    return markdown(header, lines)


def of_sets(rows: list[Row]) -> str:
    """Errors on published sets."""
    lines = []
    for (name, model, rate, epochs), group in grouped(rows, "sets", "models", "learning_rate", "epochs").items():
        for test in group[0].more:
            if test == "validation":
                continue
            energy, force, net = ([row.more[test].get(key) for row in group] for key in ("energy", "force", "net"))
            cells = [mean_and_spread((1000 * x for x in energy), 1)]
            cells += [mean_and_spread(values, 1) if None not in values else "-" for values in (force, net)]
            lines.append(
                [name, test, model, str(epochs), str(rate), *cells, f"{np.mean([row.seconds for row in group]):.0f}"]
            )
    return markdown(["set", "test", "model", "epochs", "rate", "energy, meV", "force", "net force", "seconds"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Errors of distant pairs, and on published sets."""
    pairs, others = ([row for row in rows if (row.setting("sets") in OWN) == own] for own in (True, False))
    return {name: table(some) for name, table, some in (("pairs", of_pairs, pairs), ("sets", of_sets, others)) if some}


if __name__ == "__main__":
    study.main(IonPairsStudy(), PRESETS, __doc__, train, report)
