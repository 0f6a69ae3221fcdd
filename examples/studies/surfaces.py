"""Electrostatic potentials around proteins, from residues alone.

``--data`` is an .npz file that data/make_surfaces.py makes: proteins with the mean Poisson-Boltzmann potential around
each residue of the surface. ``--synthetic 40`` makes random chains in its place. A model sees kinds of residues, their
centres, and edges between nearest ones. Errors are shares of the variance about the mean potential of training, also
within proteins: after the mean of each protein is taken from predictions and labels.

All models have two layers of the same messages along edges, and between them

messages                   nothing
messages, net charge       the same, with the protein's net formal charge as an input
messages, potentials       the same, with five screened potentials of the formal charges at the centres as inputs
distance attention         a transformer's self-attention with a learned function of the distance in its logits
all pairs                  messages along all pairs of residues
GPS, multihead             PyG's GPSConv with multi-head attention
SE(3)-Hyena                SE3HyenaOperator, filter="implicit", mixed_products=False, short_conv=3
Ewald (e3nn)               IrrepsEwaldAttention
Ewald (PyG)                integrations.pyg.EwaldAttention, of scalars

at equal numbers of parameters. Seconds are processor time of training steps.

    python examples/studies/surfaces.py --data surfaces.npz --models "Ewald (e3nn)" messages    # minutes
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from baselines.surface_models import Model, SurfaceModel
from data.protein_sets import Drawn
from data.surfaces import SETS, Surface, surfaces
from harness import study
from harness.results import Row
from harness.settings import Settings, SettingsError
from harness.tables import at_best_rates, markdown, mean_and_spread
from harness.training import Outcome, Regressor, Timed, closest_width, fit, parameters
from torch import Tensor, nn

TESTS = SETS[2:]
UNIT = 10.0  # angstroms; the unit of length of the models


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurfacesStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "surfaces"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*Settings.MAY_BE_ZERO, "synthetic")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    data: Path | None = None
    """.npz file of proteins with potentials"""
    synthetic: int = 0
    """so many random proteins in place of --data"""
    residues: tuple[int, int] = (40, 120)
    """fewest and most of a random protein of training; tests have some of twice as many"""
    neighbors: int = 10
    """nearest residues from which messages come"""
    scalars: int = 24
    vectors: int = 8
    hidden: int = 32
    """width of the networks beside Ewald attention in e3nn; others' are chosen for as many parameters"""
    width: float = 3.0
    """angstroms, the narrowest kernel of Ewald attention"""
    max_width: float = 24.0
    """angstroms, the widest"""
    kernels: tuple[int, int] = (2, 2)
    """Gaussians and Coulomb kernels of Ewald attention"""
    epochs: int = 8
    batch: int = 4
    learning_rate: float = 0.005
    warmup: float = 0.2
    clip: float = 1.0

    def check(self) -> None:
        super().check()
        fewest, most = self.residues
        if not self.neighbors < fewest < most:
            raise ValueError(f"--residues must be more than --neighbors {self.neighbors} and rise, got {fewest} {most}")


PRESETS = {
    "quick": SurfacesStudy(
        synthetic=10, residues=(12, 20), neighbors=4, scalars=8, vectors=4, hidden=8, kernels=(1, 1),
        epochs=1,
    ),
    "study": SurfacesStudy(seeds=(0, 1, 2), results=study.committed("surfaces")),
}  # fmt: skip
AVG_NUM_NODES = 10.0  # of Ewald attention


def build(settings: SurfacesStudy) -> nn.Module:
    """The model, as wide as it takes to have as many parameters as that with Ewald attention in e3nn."""
    (name,) = settings.models
    gaussians, coulomb = settings.kernels
    ewald: dict[str, Any] = {
        "width": settings.width / UNIT, "max_width": settings.max_width / UNIT, "num_gaussians": gaussians,
        "num_coulomb": coulomb, "output_scale": AVG_NUM_NODES,
    }  # fmt: skip

    def of(name: str, hidden: int) -> nn.Module:
        return SurfaceModel(name, settings.scalars, settings.vectors, hidden, ewald)

    wanted = parameters(of("Ewald (e3nn)", settings.hidden))
    return of(name, closest_width(lambda hidden: of(name, hidden), wanted, range(2, 257)))


def batches(graphs: list[Surface], settings: SurfacesStudy, seed: int | None = None) -> Drawn:
    sizes = [len(graph.residue) for graph in graphs]
    return Drawn(lambda n, _: graphs[n], sizes, settings.batch, settings.device, seed)


def predict(model: nn.Module, graph: Surface) -> tuple[Tensor, Tensor]:
    """Predictions and potentials of the residues of the surface."""
    return model(graph)[graph.known], graph.target[graph.known]


@torch.no_grad()
def errors(model: nn.Module, graphs: list[Surface]) -> list[float]:
    """Shares of the variance that remain: about the mean of training, and within proteins."""
    sums = np.zeros((2, 2))
    for graph in graphs:
        out, target = (x.double() for x in predict(model, graph))
        for n, (a, b) in enumerate(((out, target), (out - out.mean(), target - target.mean()))):
            sums[n] += float((a - b).square().sum()), float(b.square().sum())
    return (sums[:, 0] / sums[:, 1]).round(5).tolist()


class Learner(Timed, Regressor):
    """Squared errors, and the processor's seconds."""


def train(settings: SurfacesStudy) -> Outcome:
    """One model, trained and tested."""
    if settings.data is None and not settings.synthetic:
        raise SettingsError("--data must be an .npz file of potentials, or --synthetic a number of random proteins")
    most = settings.residues[1]
    found = surfaces(settings.data, settings.synthetic, settings.residues, 2 * most, settings.neighbors)
    training, *held_out = (
        batches(found[name], settings, settings.seed if name == "training" else None) for name in SETS[:3]
    )
    learner = Learner(build(settings), predict, settings)
    outcome = fit(learner, training, *held_out, checks=10)
    model = learner.model.cpu()
    more = outcome.more | {"errors": {name: errors(model, found[name]) for name in TESTS}}
    return dataclasses.replace(outcome, more=more)


def table(rows: list[Row]) -> str:
    """Errors of each test by model, of rows with the learning rate that validation data choose."""
    groups = at_best_rates(rows, "models", "epochs")
    lines = []
    for (model, epochs), group in sorted(groups.items(), key=lambda item: Model.__args__.index(item[0][0])):
        cells = [
            mean_and_spread((row.more["errors"][name][part] for row in group), 3) for part in (0, 1) for name in TESTS
        ]
        seconds = np.mean([row.seconds for row in group])
        rate = group[0].setting("learning_rate")
        lines.append([model, *cells, f"{group[0].parameters:,}", str(epochs), f"{seconds:.0f}", str(rate)])
    header = [f"{name}{words}" for words in ("", ", within") for name in TESTS]
    return markdown(["model", *header, "parameters", "epochs", "seconds", "learning rate"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(rows)}


if __name__ == "__main__":
    study.main(SurfacesStudy(), PRESETS, __doc__, train, report)
