"""Real chains: how a protein moves when one residue is pushed, and which residues feel the drag of a flow.

``--data`` is an .npz file of C-alpha traces (data/proteins.py says what is in it); ``--synthetic 40`` makes random
chains in its place. Proteins are split by clusters of sequences, so that none of training is a homologue of one of a
test. Tasks:

response     one residue of an elastic network is pushed (springs between all pairs, stiffness 1 / distance^2): where do
             the others move? Displacements are scaled to a mean square of 1 beyond 8 angstroms from the push, where
             errors are measured, so 1 is what zero displacements leave. Trained on whole chains of 40 to 220 residues;
             tested on other such chains, on chains of 220 to 400, on complexes of several chains, and on chains with
             gaps, with and without residue numbers and chains given to the layers
drag         a rigid protein moves through a fluid, a bead for each residue (the Rotne-Prager mobility, inverted): how
             do forces differ between residues? Errors are relative to those of equal forces. The same training, the
             same tests

All models have the same messages along the edges to the nearest residues, and behind each layer of messages

messages                 nothing
messages, all pairs      the same messages along all pairs of residues
distance attention       a transformer's self-attention with a learned function of the distance in its logits
vector attention         VectorSelfAttention
Hyena, implicit          SE3HyenaOperator, filter="implicit", mixed_products=False, short_conv=3
Ewald                    EwaldAttention
Ewald + Hyena            both
Hyena, degree 2          TensorProductHyenaOperator, the same with features of degrees 0, 1 and 2 inside

or are EGNN on all pairs of residues,

at equal numbers of parameters. Seconds are processor time of training steps.

    python examples/studies/proteins.py --data proteins.npz --models Ewald messages    # minutes
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from baselines.chain_layers import ChainModel
from baselines.protein_models import ORDERED, ChainEGNN, Model, global_layers
from data.protein_errors import response_errors
from data.protein_graphs import FAR, NEAR, UNIT, Graph
from data.protein_sets import Drawn, drawing, sets
from data.proteins import Protein
from harness import study
from harness.results import Row
from harness.settings import Settings, SettingsError
from harness.tables import at_best_rates, markdown, mean_and_spread
from harness.training import Outcome, Regressor, Timed, closest_width, fit, parameters
from torch import Tensor, nn

Task = Literal["response", "drag"]
REACH = 16.0  # angstroms up to which messages tell lengths of edges apart
TESTS = "chains", "larger", "complexes", "complexes, without index", "gaps", "gaps, without index"
DRAG_TESTS = "chains", "larger", "complexes", "gaps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProteinsStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "proteins"
    SWEEP: ClassVar[tuple[str, ...]] = ("tasks", "models", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*Settings.MAY_BE_ZERO, "synthetic", "lmax")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    tasks: tuple[Task, ...] = ("response",)
    """what to predict"""
    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    data: Path | None = None
    """.npz file of C-alpha traces"""
    synthetic: int = 0
    """so many random chains in place of --data"""
    residues: tuple[int, int] = (40, 220)
    """fewest and most of the chains of training"""
    larger: int = 400
    """most residues of larger chains and of complexes in tests"""
    pushes: int = 2
    """of each protein, to validate and test with; training pushes every chain once an epoch"""
    neighbors: int = 10
    """nearest residues from which messages come"""
    scalars: int = 24
    vectors: int = 8
    hidden: int = 32
    """width of the networks of messages beside Ewald attention; others' are chosen for as many parameters"""
    num_layers: int = 3
    """layers of messages"""
    width: float = 3.0
    """angstroms, the narrowest kernel of Ewald attention"""
    max_width: float = 24.0
    """angstroms, the widest"""
    kernels: tuple[int, int] = (2, 1)
    """Gaussians and Coulomb kernels of Ewald attention"""
    lmax: int = 2
    """of Ewald attention: the response to a force has degrees 0 and 2"""
    epochs: int = 8
    batch: int = 4
    learning_rate: float = 0.005
    warmup: float = 0.2
    clip: float = 1.0

    def check(self) -> None:
        super().check()
        fewest, most = self.residues
        if not self.neighbors < fewest < most < self.larger:
            raise ValueError(
                f"--residues must be more than --neighbors {self.neighbors} and rise, and stay below --larger "
                f"{self.larger}, got {fewest} {most}"
            )


PRESETS = {
    "quick": ProteinsStudy(
        synthetic=24, residues=(12, 20), larger=30, pushes=2, neighbors=4, scalars=8, vectors=4, hidden=8, num_layers=1,
        kernels=(1, 1), epochs=1,
    ),
    "study": ProteinsStudy(seeds=(0, 1, 2), results=study.committed("proteins")),
}  # fmt: skip


def build(settings: ProteinsStudy) -> nn.Module:
    """The model, as wide as it takes to have as many parameters as that with Ewald attention."""
    (task,), (name,) = settings.tasks, settings.models
    rigid = task == "drag"  # the sum of the forces counts
    kernels = settings.width / UNIT, settings.max_width / UNIT

    def of(width: int) -> nn.Module:
        if name == "EGNN":
            return ChainEGNN(width, settings.num_layers, REACH / UNIT, rigid)
        return ChainModel(
            settings.scalars, settings.vectors, width, layers, settings.num_layers, REACH / UNIT,
            settings.neighbors, rigid,
        )  # fmt: skip

    channels = settings.scalars, settings.vectors, settings.hidden
    layers = [] if name == "EGNN" else global_layers(name, *channels, kernels, settings.kernels, settings.lmax)
    if name == "Ewald":
        return of(settings.hidden)
    wanted = parameters(build(dataclasses.replace(settings, models=("Ewald",))))
    return of(closest_width(of, wanted, range(2, 4 * settings.hidden)))


def batches(settings: ProteinsStudy, found: tuple[Protein, ...], seed: int | None = None) -> Drawn | None:
    """Batches of proteins with what is to be predicted of them; none where there are no proteins."""
    drawn, draws = drawing(settings.tasks[0], found, settings.neighbors), 1 if seed is not None else settings.pushes
    sizes = [len(graph.residue) for graph in drawn.graphs]
    return Drawn(drawn.draw, sizes, settings.batch, settings.device, seed, draws) if sizes else None


def predict(model: nn.Module, graph: Graph) -> tuple[Tensor, Tensor]:
    """Predictions and targets where errors count."""
    known = graph.known[:, 0]
    return model(graph)[known], graph.target[known]


class Learner(Timed, Regressor):
    """Squared errors, and the processor's seconds."""


def train(settings: ProteinsStudy) -> Outcome:
    """One model, trained and tested."""
    parts = sets(settings.data, settings.synthetic, settings.residues, settings.larger)
    first = ("training", "validation", "chains")
    seeds = {"training": settings.seed}
    every = {name: batches(settings, parts[name], seeds.get(name)) for name in parts}
    for name in first:
        if every[name] is None:
            raise SettingsError(f"--data must have proteins of {settings.residues} residues for {name}, got none")
    learner = Learner(build(settings), predict, settings)
    outcome = fit(learner, every["training"], every["validation"], every["chains"], checks=10)
    tests = {name: x for name, x in every.items() if x is not None and name not in ("training", "validation")}
    errors = {name: response_errors(learner.model, found) for name, found in tests.items()}
    for name in {"complexes", "gaps"} & set(tests) if settings.models[0] in ORDERED else ():
        errors[f"{name}, without index"] = response_errors(learner.model, tests[name], ordered=False)
    more = outcome.more | {"errors": errors}
    return dataclasses.replace(outcome, more=more)


def by_epochs(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """A task's rows by model and epochs, of each those with the learning rate that validation data choose."""
    groups = at_best_rates(rows, "models", "epochs")
    order = sorted(groups, key=lambda key: (Model.__args__.index(key[0]), key[1]))
    return {key: groups[key] for key in order}


def response_table(rows: list[Row]) -> str:
    """Errors of each test by model, beyond 8 and beyond 25 angstroms."""
    groups = by_epochs(rows)
    there = {name for group in groups.values() for name in group[0].more["errors"]}
    names = [name for name in TESTS if name in there]
    lines = []
    for (model, epochs), group in groups.items():
        cells = [str(epochs)]
        for name in names:
            found = np.array([row.more["errors"][name] for row in group if name in row.more["errors"]])
            cells += [
                mean_and_spread(column, 3) if found.size else "-" for column in (found.T if found.size else [0, 0])
            ]
        first = group[0]
        seconds = np.mean([row.seconds for row in group])
        lines.append([model, *cells, f"{first.parameters:,}", f"{seconds:.0f}", str(first.setting("learning_rate"))])
    header = [f"{name}, beyond {far:g} Å" for name in names for far in (NEAR, FAR)]
    return markdown(["model", "epochs", *header, "parameters", "seconds", "learning rate"], lines)


def drag_table(rows: list[Row]) -> str:
    """Errors of each test by model."""
    lines = []
    for (model, epochs), group in by_epochs(rows).items():
        tests = [mean_and_spread([row.more["errors"][name][0] for row in group], 3) for name in DRAG_TESTS]
        seconds = f"{np.mean([row.seconds for row in group]):.0f}"
        rate = str(group[0].setting("learning_rate"))
        lines.append([model, *tests, f"{group[0].parameters:,}", str(epochs), seconds, rate])
    return markdown(["model", *DRAG_TESTS, "parameters", "epochs", "seconds", "learning rate"], lines)


def hyena_beside_ewald(rows: list[Row]) -> str:
    """Errors of Ewald attention without and with Hyena after the same number of epochs, and their ratio."""
    groups, names = by_epochs(rows), ("Ewald", "Ewald + Hyena")
    both = [epochs for name, epochs in groups if (names[0], epochs) in groups and (names[1], epochs) in groups]
    if not both:
        return "Not trained yet."
    pair, lines = [groups[name, max(both)] for name in names], []
    for test in (name for name in TESTS if name in pair[0][0].more["errors"]):
        for place, far in enumerate((NEAR, FAR)):
            without, beside = ([row.more["errors"][test][place] for row in group] for group in pair)
            ratio = f"{np.mean(beside) / np.mean(without):.2f}"
            lines.append([f"{test}, beyond {far:g} Å", mean_and_spread(without, 3), mean_and_spread(beside, 3), ratio])
    return markdown(["test", "Ewald", "Ewald + Hyena", "ratio"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The tables of errors, and Ewald attention without and with Hyena."""
    tasks = {name: [row for row in rows if row.setting("tasks") == name] for name in Task.__args__}
    response = tasks["response"]
    tables = {"response": response_table, "hyena_beside_ewald": hyena_beside_ewald} if response else {}
    found = {name: table(response) for name, table in tables.items()}
    return found | ({"drag": drag_table(tasks["drag"])} if tasks["drag"] else {})


if __name__ == "__main__":
    study.main(ProteinsStudy(), PRESETS, __doc__, train, report)
