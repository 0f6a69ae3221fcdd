"""Pairs of ions and molecules that part: MACE alone, and with charges that are predicted.

Cations, anions and neutral molecules are in one set, with labels by GFN2-xTB (data/ion_pairs.py); the total charge of
each frame is given. Tests are pairs farther apart than all of training: the error of the force between the two
fragments, and its slope, the factor of 1 / distance in the energy. Needs the extras mace and xtb.

MACE        the potential alone
predicted   add_long_range(charges="predicted"), and a loss of the charge that is shared

    python examples/studies/ion_pairs.py --models MACE predicted --seeds 0 1 2
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from harness import study
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, parameters

if TYPE_CHECKING:
    from ase import Atoms

SHARED = 10.0  # weight of the squared charge that is shared, in 1 / e²
KINDS = "like ions", "unlike ions", "an ion and a molecule", "two molecules"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IonPairsStudy(Settings):
    """Settings of this study."""

    STUDY: ClassVar[str] = "ion_pairs"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    models: tuple[Literal["MACE", "predicted"], ...] = ("MACE", "predicted")
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


def build(settings: IonPairsStudy, frames: Sequence[Atoms], table: Any, sample: Any) -> torch.nn.Module:
    from mace import modules
    from tg_equiattn.integrations.mace import add_long_range

    from e3nn import o3  # isort: skip  (0.4.4 loads after mace alone)

    blocks, symbols = modules.interaction_classes, table.zs
    content = np.array([[(atoms.numbers == z).sum() for z in symbols] for atoms in frames])
    energies = np.array([atoms.info["REF_energy"] for atoms in frames])
    model = modules.ScaleShiftMACE(
        r_max=settings.cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"], num_elements=len(symbols), correlation=2,
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"], hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"), gate=torch.nn.functional.silu, avg_num_neighbors=8.0, atomic_numbers=symbols,
        atomic_energies=np.linalg.lstsq(content, energies, rcond=None)[0], atomic_inter_shift=0.0,
        atomic_inter_scale=math.sqrt(np.square(np.concatenate([x.arrays["REF_forces"] for x in frames])).mean()),
    )  # fmt: skip
    return add_long_range(model, charges="predicted", batch=sample) if "predicted" in settings.models else model


def fit(model: torch.nn.Module, loader: Any, settings: IonPairsStudy) -> None:
    """Train."""
    steps = settings.epochs * len(loader)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, amsgrad=True)
    rising = max(1, int(settings.warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / rising) * (1 - 0.97 * n / steps))
    for _ in range(settings.epochs):
        for batch in loader:
            out = model(batch.to_dict(), training=True)
            loss = 10 * ((out["energy"] - batch.energy) / batch.ptr.diff()).square().mean()
            loss = loss + 100 * (out["forces"] - batch.forces).square().mean()
            if "shared_charge" in out:
                loss = loss + SHARED * out["shared_charge"].square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()


def kind_of(pair: str) -> str:
    """Which ions a pair has."""
    from data.ion_pairs import CHARGES

    first, second = (CHARGES[name] for name in pair.split("-"))
    if not first or not second:
        return "an ion and a molecule" if first or second else "two molecules"
    return "like ions" if first == second else "unlike ions"


def errors(model: torch.nn.Module, frames: Sequence[Atoms], loader: Any) -> dict[str, Any]:
    """Root mean squares of errors of forces and of net forces on the second fragment, in meV/A, and of energies, in
    eV; those by kind of pair, and slopes divided by those of labels."""
    found = [model(batch.to_dict()) for batch in loader]
    energies = torch.cat([out["energy"].detach() for out in found]).numpy()
    forces = np.split(
        torch.cat([out["forces"].detach() for out in found]).numpy(), np.cumsum([len(x) for x in frames])[:-1]
    )
    lacking = [f - x.arrays["REF_forces"] for f, x in zip(forces, frames, strict=True)]
    net = np.array([np.linalg.norm(d[x.info["first"] :].sum(0)) for d, x in zip(lacking, frames, strict=True)])
    labels = np.array([x.info["REF_energy"] for x in frames])
    kinds, slopes = np.array([kind_of(x.info["pair"]) for x in frames]), {}
    for kind in ("like ions", "unlike ions"):
        lines = [(x.info["pair"], x.info.get("line")) for x in frames]
        ratios = []
        for line in dict.fromkeys(line for line, own in zip(lines, kinds, strict=True) if own == kind):
            some = [n for n, other in enumerate(lines) if other == line]
            inverse = [1 / frames[n].info["distance"] for n in some]
            if len(some) > 1:
                ratios.append(np.polyfit(inverse, energies[some], 1)[0] / np.polyfit(inverse, labels[some], 1)[0])
        slopes[kind] = float(np.mean(ratios)) if ratios else math.nan
    shared = [out["shared_charge"].detach() for out in found if "shared_charge" in out]
    return {
        "force": 1000 * rms(np.concatenate(lacking)), "energy": rms(energies - labels), "net": 1000 * rms(net),
        "kinds": {kind: 1000 * rms(net[kinds == kind]) for kind in KINDS}, "slopes": slopes,
        "shared": rms(torch.cat(shared).numpy()) if shared else None,
    }  # fmt: skip


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean())) if x.size else math.nan


def train(settings: IonPairsStudy) -> Outcome:
    """One model, trained and tested."""
    from data.ion_pairs import load
    from mace import tools
    from mace.tools.torch_geometric.dataloader import DataLoader

    torch.set_default_dtype(torch.float64)
    parts = load(settings.output / settings.STUDY)
    frames = parts["train"][: settings.train]
    table = tools.AtomicNumberTable(sorted({int(z) for x in parts["train"] for z in x.numbers}))
    made = {part: graphs(some, table, settings.cutoff) for part, some in (parts | {"train": frames}).items()}
    start = time.process_time()
    model = build(settings, frames, table, DataLoader(made["train"], batch_size=48))
    fit(model, DataLoader(made["train"], batch_size=settings.batch, shuffle=True), settings)
    seconds = time.process_time() - start
    model.eval()
    more = {part: errors(model, parts[part], DataLoader(made[part], batch_size=32)) for part in ("validation", "test")}
    return Outcome("net force error", more["test"]["net"], parameters(model), seconds, more)


def report(rows: list[Row]) -> dict[str, str]:
    """Errors of distant pairs."""
    lines = []
    for (model, rate), group in grouped(rows, "models", "learning_rate").items():
        tests = [row.more["test"] for row in group]
        cells = [model, str(rate), mean_and_spread((row.more["validation"]["force"] for row in group), 1)]
        cells += [mean_and_spread((test["net"] for test in tests), 1), mean_and_spread((t["energy"] for t in tests), 2)]
        cells += [mean_and_spread((test["kinds"][kind] for test in tests), 1) for kind in KINDS]
        cells += [mean_and_spread((test["slopes"][kind] for test in tests), 2) for kind in ("like ions", "unlike ions")]
        shared = [test["shared"] for test in tests if test["shared"] is not None]
        cells += [mean_and_spread(shared, 3) if shared else "-", f"{np.mean([row.seconds for row in group]):.0f}"]
        lines.append(cells)
    header = ["model", "rate", "force, validation", "net force", "energy, eV", *KINDS, "slope, like ions",
              "slope, unlike ions", "shared charge", "seconds"]  # fmt: skip
    return {"pairs": markdown(header, lines)}


if __name__ == "__main__":
    study.main(IonPairsStudy(), PRESETS, __doc__, train, report)
