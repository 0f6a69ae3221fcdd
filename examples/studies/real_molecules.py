"""Published sets of molecules, and some of tblite's: energies and forces with and without attention to what is far.

``--data`` is the folder of the published files (data/published_molecules.py says which); nothing is downloaded. Chains
and salt are computed, by tblite (data/tight_binding.py); Lennard-Jones molecules (data/lennard_jones.py) need neither.

cumulenes       MACE   chains of carbons whose ends are turned, longer ones to test on (GNL)
C9H4            e3nn   the profile of a torsion (Frank et al.)
SN2             e3nn   F- and CH3I along a path (Frank et al.)
clusters        e3nn   32 atoms within 5 A (Frank et al.)
AcAc            e3nn   acetylacetone at 300 K, to test at 600 K and along two paths (BOTNet's)
chains, salt    e3nn   pairs of systems whose charge moves over all of them (Ko et al.), by GFN-xTB

"with" has Ewald attention behind the first messages; "without" is the same model, edges, rates and epochs without it.

    python examples/studies/real_molecules.py --data ~/molecules --sets AcAc
    python examples/studies/real_molecules.py --data ~/molecules --sets cumulenes --seeds 0 1      # needs mace-torch
    python examples/studies/real_molecules.py --sets chains                                        # needs tblite
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from baselines.molecular_potentials import Graph, SmallPotential, batch_of, graph_of, mace, neighbours
from baselines.oscillating_gaussians import OscillatingGaussians
from data.lennard_jones import lennard_jones
from data.published_molecules import SETS, TRAIN, VALIDATION, Molecule, Parts, load, parted
from data.tight_binding import pairs_of_systems
from harness import study
from harness.loading import Batches
from harness.results import Row
from harness.settings import Settings, SettingsError
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit
from torch import Tensor, nn

SEED = 45  # of computed data
MACE = ("cumulenes",)
Set = Literal["cumulenes", "C9H4", "SN2", "clusters", "AcAc", "chains", "salt", "Lennard-Jones"]
Model = Literal["without", "with"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealMoleculesStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "real_molecules"
    SWEEP: ClassVar[tuple[str, ...]] = ("sets", "models", "seeds")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*Settings.MAY_BE_ZERO, "after")
    SHOWN: ClassVar[tuple[str, ...]] = (
        "learning_rate", "width", "max_width", "kernels", "after", "batch", "epochs", "irreps",
    )  # fmt: skip
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")

    sets: tuple[Set, ...] = ("Lennard-Jones",)
    """of molecules; settings that are None are then what suits the set"""
    models: tuple[Model, ...] = ("without", "with")
    """with and without attention"""
    data: Path | None = None
    """folder of the published files"""
    train: int | None = None
    """molecules to train on: None for all there are"""
    irreps: str | None = None
    """features of MACE"""
    layers: int | None = None
    """of messages"""
    cutoff: float | None = None
    """of messages, in A"""
    width: float | None = None
    """of attention's narrowest kernel, in A"""
    max_width: float | None = None
    """of its widest"""
    kernels: tuple[int, ...] | None = None
    """numbers of Gaussians, of Coulomb kernels and of oscillating Gaussians"""
    after: int = 0
    """block of MACE behind whose product attention comes; behind the last, 1, all readouts are linear"""
    epochs: int | None = None  # type: ignore[assignment]
    """passes over the training data"""
    batch: int = 8
    learning_rate: float = 0.01
    warmup: float = 0.1
    clip: float = 10.0

    def check(self) -> None:
        super().check()
        if self.after not in (0, 1):
            raise SettingsError(f"--after must be 0 or 1, got {self.after}")
        if self.kernels is not None and (len(self.kernels) != 3 or min(self.kernels) < 0 or not sum(self.kernels)):
            raise SettingsError(
                "--kernels must be numbers of Gaussians, of Coulomb kernels and of oscillating Gaussians, "
                f"got {list(self.kernels)}"
            )

    def runs(self) -> Iterator[RealMoleculesStudy]:
        """With what suits each set where nothing else is said."""
        for run in super().runs():
            own = OWN | SUITED[run.sets[0]]
            yield dataclasses.replace(run, **{name: x for name, x in own.items() if getattr(run, name) is None})


OWN: dict[str, Any] = {
    "irreps": "16x0e + 16x1o", "layers": 2, "cutoff": 4.0, "width": 2.0, "max_width": 8.0, "kernels": (4, 4, 0),
    "epochs": 60,
}  # fmt: skip
SUITED: dict[str, dict[str, Any]] = {
    "cumulenes": {
        "irreps": "16x0e + 16x1o + 16x2e", "cutoff": 3.0, "width": 1.5, "max_width": 12.0, "kernels": (0, 0, 24),
        "epochs": 120,
    },
    "C9H4": {"cutoff": 3.0, "width": 1.5, "max_width": 12.0, "epochs": 150},
    "SN2": {"cutoff": 4.0, "max_width": 16.0, "epochs": 300},
    "clusters": {"cutoff": 3.0, "width": 1.5},
    "AcAc": {"cutoff": 4.0},
    "chains": {"cutoff": 3.0, "width": 1.5, "max_width": 12.0},
    "salt": {"cutoff": 4.0, "epochs": 40},
    "Lennard-Jones": {"cutoff": 2.0, "width": 1.0, "max_width": 8.0, "epochs": 10},
}  # fmt: skip


PRESETS = {
    "quick": RealMoleculesStudy(train=8, epochs=1, batch=4, kernels=(1, 1, 1), warmup=0.0),
    "study": RealMoleculesStudy(sets=("cumulenes",), results=study.committed("real_molecules")),
}


def invented() -> Parts:
    """Lennard-Jones molecules, whose elements are called 1, 2 and 3."""
    every = lennard_jones(80, 5, 8, SEED, steps=60)
    found = []
    for species, pos, energy, forces in zip(every.species, every.positions, every.energies, every.forces, strict=True):
        size = int((species >= 0).sum())
        numbers, pos, forces = ((x[:size]).numpy() for x in (species + 1, pos, forces))
        found.append(Molecule(numbers, pos, float(energy), forces, {}))
    return parted(found, 60, 10, SEED)


def molecules(settings: RealMoleculesStudy) -> Parts:
    """Those of a single run's set."""
    (name,) = settings.sets
    if name in SETS:
        if settings.data is None:
            raise SettingsError(f"--data must be the folder of the files of {name}, got none")
        parts = load(settings.data, name)
    else:
        parts = invented() if name == "Lennard-Jones" else pairs_of_systems(name, 400, SEED)
    return parts | {TRAIN: parts[TRAIN][: settings.train]}


@dataclasses.dataclass(frozen=True)
class Units:
    """In which energies and forces are learned.

    Args:
        elements: that there are.
        atoms: energy of an atom of each, by which energies of the training data are explained best.
        scale: of forces, and, over 1 A, of energies.
    """

    elements: tuple[int, ...]
    atoms: np.ndarray
    scale: float

    @classmethod
    def of(cls, train: list[Molecule]) -> Units:
        elements = tuple(sorted({int(z) for molecule in train for z in molecule.numbers}))
        counts = np.array([[(m.numbers == z).sum() for z in elements] for m in train], float)
        atoms = np.linalg.lstsq(counts, np.array([m.energy for m in train]), rcond=None)[0]
        forces = [m.forces.ravel() for m in train if m.forces is not None]
        return cls(elements, atoms, float(np.sqrt(np.square(np.concatenate(forces)).mean())) if forces else 1.0)

    def graph(self, molecule: Molecule, cutoff: float) -> Graph:
        """With what is to be learned of each atom: the energy of its molecule over the root of their number, its force,
        and whether forces are known."""
        numbers, pos = torch.tensor(molecule.numbers), torch.tensor(molecule.pos)
        counts = (numbers[:, None] == torch.tensor(self.elements)).sum(0).numpy()
        energy = molecule.energy - float(counts @ self.atoms)
        forces = np.zeros_like(molecule.pos) if molecule.forces is None else molecule.forces
        target = np.concatenate([np.full((len(numbers), 1), energy / math.sqrt(len(numbers))), forces], 1) / self.scale
        known = np.ones((len(numbers), 4)) * [1.0, *3 * [float(molecule.forces is not None)]]
        cell = None if molecule.cell is None else torch.tensor(molecule.cell)
        graph = graph_of(numbers, pos, self.elements, cutoff, torch.float32, cell)
        return graph | {"target": torch.tensor(target).float(), "known": torch.tensor(known).float()}


class Potential(nn.Module):
    """A model of energies, with forces as its derivatives.

    Args:
        model: of a batch to ``energy``, in eV.
        scale: in which energies and forces are given.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, graph: Graph) -> Tensor:
        """Energy of an atom's molecule over the root of its number of atoms and force, (T, 4)."""
        with torch.inference_mode(False), torch.enable_grad():
            graph = {name: x.clone() for name, x in graph.items()}
            pos = graph["positions"].requires_grad_()
            energy = self.model(graph, compute_force=False)["energy"] / self.scale
            (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        ptr = graph["ptr"]
        return torch.cat([(energy / (ptr[1:] - ptr[:-1]).sqrt())[graph["batch"], None], -slope], 1)


def predict(model: Potential, graph: Graph) -> tuple[Tensor, Tensor]:
    """What is predicted and what is known, (T, 4)."""
    return model(graph) * graph["known"], graph["target"]


def build(settings: RealMoleculesStudy, graphs: list[Graph], units: Units) -> Potential:
    """The model; attention measures the size of MACE's features on some of the graphs."""
    (name,), far = settings.sets, settings.models == ("with",)
    near, elements = neighbours(graphs), units.elements
    gaussians, coulomb, oscillating = settings.kernels or (4, 4, 0)
    widths: dict[str, Any] = {"width": settings.width, "max_width": settings.max_width}
    kernels = widths | {"num_gaussians": gaussians, "num_coulomb": coulomb}
    if oscillating:
        kernels["kernels"] = OscillatingGaussians(oscillating, **widths)
    if name in MACE:
        shape = settings.irreps, settings.layers, 2
        model = mace(elements, settings.cutoff, *shape, near, units.scale, linear=settings.after == 1).float()
        if far:
            from tg_equiattn.integrations.mace import add_long_range

            some = batch_of(graphs[:: max(1, len(graphs) // 40)])
            add_long_range(model, (settings.after,), batch=some, lmax=0, gain=0.5, **kernels)
    else:
        attention: dict[str, Any] | None = None
        if far:
            attention = kernels | {"output_scale": float(np.mean([len(g["positions"]) for g in graphs]))}
        model = SmallPotential(len(elements), settings.cutoff, near, settings.layers, units.scale, attention)
    return Potential(model, units.scale)


def train(settings: RealMoleculesStudy) -> Outcome:
    """One model, trained and tested."""
    parts = molecules(settings)
    units = Units.of(parts[TRAIN])
    graphs = {name: [units.graph(m, settings.cutoff) for m in part] for name, part in parts.items()}
    learner = Regressor(build(settings, graphs[TRAIN], units), predict, settings)
    training = batches(graphs[TRAIN], settings.batch, settings.seed)
    tests = [name for name in parts if name not in (TRAIN, VALIDATION)]
    held_out = [batches([g for name in names for g in graphs[name]], 32) for names in ([VALIDATION], tests)]
    outcome = fit(learner, training, *held_out, checks=50)
    model = learner.model.cpu()
    outcome.more["errors"] = {name: errors(model, graphs[name], units) for name in tests}
    outcome.metric = "force error" if "force" in outcome.more["errors"][tests[0]] else "energy error"
    outcome.value = outcome.more["errors"][tests[0]][outcome.metric.removesuffix(" error")]
    return outcome


def batches(graphs: list[Graph], size: int, seed: int | None = None) -> Batches:
    return Batches(lambda indices: batch_of([graphs[n] for n in indices]), len(graphs), size, seed)


def errors(model: Potential, graphs: list[Graph], units: Units) -> dict[str, float]:
    """Root mean square errors of energies, in meV, and of forces, in meV/A."""
    model.eval()
    energies, forces = [], []
    for graph in batches(graphs, 32).whole():
        out, target = (x.detach() * 1000 * units.scale for x in predict(model, graph))
        first, size = graph["ptr"][:-1], graph["ptr"].diff()
        energies.append((out - target)[first, 0] * size.sqrt())
        forces.append((out - target)[:, 1:][graph["known"][:, 1] > 0].flatten())
    every = {"energy": torch.cat(energies), "force": torch.cat(forces)}
    return {name: float(x.square().mean().sqrt()) for name, x in every.items() if len(x)}


NAMES = "sets", "models", "after", "epochs"  # by which runs are told apart in tables


def summary(rows: list[Row]) -> str:
    """Errors without and with attention, side by side: models of the default width."""
    lines = []
    best = at_best_rates(rows, *NAMES)
    for (name, which, after, epochs), group in best.items():
        other = best.get((name, "with", after, epochs), [])
        if which == "with" or not other or after:
            continue
        for test in group[0].more["errors"]:
            cells = []
            for kind, digits in (("energy", 2), ("force", 1)):
                if kind in group[0].more["errors"][test]:
                    pair = [[row.more["errors"][test][kind] for row in some] for some in (group, other)]
                    cells += [mean_and_spread(found, digits) for found in pair]
                    cells.append(f"{np.mean(pair[1]) / np.mean(pair[0]):.2f}")
                else:
                    cells += ["-", "-", "-"]
            lines.append([f"{name}, {epochs} epochs", test, *cells])
    columns = (f"{kind}, {part}" for kind in ("energy", "force") for part in ("without", "with", "ratio"))
    return markdown(["set", "test", *columns], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Errors without and with attention."""
    defaults = RealMoleculesStudy().identity()
    rows = [dataclasses.replace(row, settings=defaults | row.settings) for row in rows]
    rows = in_order(rows, sets=Set.__args__, models=Model.__args__)
    return {"summary": summary(rows)}


if __name__ == "__main__":
    study.main(RealMoleculesStudy(), PRESETS, __doc__, train, report)
