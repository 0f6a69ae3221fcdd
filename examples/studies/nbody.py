"""Predict where charged particles go, with SE(3)-Hyena and what the paper compares it with.

Five charged particles attract and repel each other (data/charged_particles.py simulates them once, and keeps that).
From positions, velocities and charges at one time the models predict positions 1,000 steps later: SE(3)-Hyena, with and
without local context, the same with Ewald attention in place of the convolution, local context without either,
SE(3)-Transformer, the non-equivariant Hyena and Transformer, and EGNN at its published size, all on identical data,
beside linear motion x + t v. Prints the paper's Table 1 with ratios to linear motion.

The particles have no order, and a convolution needs one: with --augment, training shuffles them.

    python examples/studies/nbody.py                        # minutes on two cores
    python examples/studies/nbody.py --study --models EGNN "SE(3)-Hyena + local"   # the standard task, 3,000 systems
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from baselines.egnn import EGNN
from baselines.published_norm import divided_by_length
from baselines.sequence_models import Hyena, Transformer
from data.charged_particles import STEPS, cached, linear_error
from harness import study
from harness.loading import parted, tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread, published
from harness.training import Outcome, Regressor, fit, match_parameters, parameters
from torch import Tensor, nn

from tg_equiattn.chains.clifford import POSITION, Grades, MultivectorMLP, features, with_position
from tg_equiattn.chains.operator import TokenOperator
from tg_equiattn.chains.sequences import OperatorSettings, TokenBatch
from tg_equiattn.nn import EwaldAttention, SE3Hyena

PUBLISHED = ("SE(3)-Hyena", "SE(3)-Hyena + local")  # divided by the number of particles
LOCAL = {"attn_kwargs": {"local_context": True, "edge_channels": 1}}
EQUIVARIANT: dict[str, dict[str, Any]] = {
    "SE(3)-Hyena": {},
    "SE(3)-Hyena, radial order": {"order": "radial"},
    "SE(3)-Hyena + local": LOCAL,
    "SE(3)-Transformer": {"attention": True},
    "SE(3)-Transformer + local": {"attention": True, **LOCAL},
    "local only": LOCAL,
    "Ewald attention": {},
}
PLAIN = {"Hyena": functools.partial(Hyena, norm="forward"), "Transformer": Transformer}
Model = Literal[
    "SE(3)-Hyena", "SE(3)-Hyena, radial order", "SE(3)-Hyena + local", "SE(3)-Transformer", "SE(3)-Transformer + local",
    "local only", "Ewald attention", "Hyena", "Transformer", "EGNN",
]  # fmt: skip
WIDTH, MAX_WIDTH = 0.5, 8.0  # 95 of 100 pairs are farther apart than 0.9, and 95 of 100 systems narrower than 10
SEED = 43  # of the simulation, as the data do not depend on the seed of training


@dataclasses.dataclass(frozen=True, kw_only=True)
class NBody(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "nbody"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "cache")
    SHOWN: ClassVar[tuple[str, ...]] = ("epochs", "blocks", "learning_rate")

    models: tuple[Model, ...] = (
        "SE(3)-Hyena", "SE(3)-Hyena + local", "SE(3)-Transformer", "local only", "Ewald attention",
        "Hyena", "Transformer", "EGNN",
    )  # fmt: skip
    """which to train"""
    train: int = 1000
    """systems to train on"""
    validation: int = 500
    """systems that choose the epoch"""
    test: int = 500
    """systems to test on"""
    particles: int = 5
    """of every system"""
    scalars: int = 8
    """invariant width"""
    vectors: int = 16
    """equivariant width"""
    num_layers: int = 2
    """operators"""
    blocks: int = 1
    """of every Clifford MLP"""
    augment: bool = False
    """shuffle the particles in training"""
    cache: Path = Path("out/simulations")
    """folder for simulated systems"""
    epochs: int = 40
    batch: int = 100
    learning_rate: float = 0.003
    weight_decay: float = 1e-5


PRESETS = {
    "quick": NBody(
        train=60, validation=20, test=20, epochs=1, batch=20, vectors=4, scalars=3, num_layers=1
    ),
    "study": NBody(
        models=(
            "SE(3)-Hyena + local", "local only", "SE(3)-Transformer + local", "SE(3)-Hyena", "SE(3)-Transformer",
            "Hyena",
        ),
        seeds=(0, 1, 2), train=3000, validation=2000, test=2000, epochs=100, learning_rate=0.01, augment=True,
        results=study.committed("nbody"),
    ),
}  # fmt: skip


class LocalOnly(TokenOperator):
    """The operator without its convolution, and without the parameters that only it uses."""

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings) -> None:
        super().__init__(in_grades, out_grades, hidden_grades, options)
        self.project = self.gate = None

    def forward(self, x: Tensor, tokens: TokenBatch) -> Tensor:
        return features(self.out(self.in_grades.parts(self.local(x, tokens.pos, tokens.edges))))


class EwaldOperator(TokenOperator):
    """The operator with Ewald attention in place of convolution and gate."""

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings) -> None:
        super().__init__(in_grades, out_grades, hidden_grades, options)
        self.gate = None
        self.project = MultivectorMLP(in_grades.plus(POSITION), in_grades, max(1, *in_grades), len(self.out.blocks))
        self.attention = EwaldAttention(in_grades.scalars, in_grades.vectors, width=WIDTH, max_width=MAX_WIDTH)

    def forward(self, x: Tensor, tokens: TokenBatch) -> Tensor:
        projected = features(self.project(with_position(self.in_grades.parts(x), tokens.pos)))
        scalars, vectors, *_ = self.in_grades.parts(projected)
        found = self.attention(scalars[0].T, vectors.permute(2, 1, 0), pos=tokens.pos.T, batch=tokens.graphs.batch)
        mixed = torch.cat([found[0].T, found[1].permute(2, 1, 0).flatten(0, 1)])
        return features(self.out(self.in_grades.parts(x + mixed)))


OPERATORS: dict[str, type[TokenOperator]] = {"local only": LocalOnly, "Ewald attention": EwaldOperator}


def systems(settings: NBody) -> list[list[Tensor]]:
    """Training, validation and test systems: charges, velocities, positions, later positions."""
    counts = settings.train, settings.validation, settings.test
    data = cached(sum(counts), SEED, settings.particles, STEPS, settings.cache, settings.progress)
    first, last = 31, 41  # frame f of the standard task, which leads from 30 to 40, is step 100 (f + 1)
    tensors = data.charges, data.velocities[:, first], data.positions[:, first], data.positions[:, last]
    return [list(part) for part in parted([x.float() for x in tensors], counts)]


def complete_graphs(count: int, particles: int, device: torch.device) -> Tensor:
    """Edges between all pairs of particles of each of ``count`` systems, (2, E)."""
    pairs = (~torch.eye(particles, dtype=torch.bool, device=device)).nonzero().T
    return (pairs[:, None] + particles * torch.arange(count, device=device)[:, None]).flatten(1)


def shuffled(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """The particles of every system in a random order."""
    order = torch.rand(batch[0].shape, generator=generator).argsort(1).to(batch[0].device)
    return [x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x)) for x in batch]


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true later positions."""
    charges, velocities, positions, later = batch
    if isinstance(model, EGNN):
        return model(charges, velocities, positions), later
    scalars = torch.stack([charges > 0, charges < 0], -1).to(charges.dtype)
    edges = {}
    if isinstance(model, SE3Hyena) and model.module.options.local_context:
        index = complete_graphs(len(charges), charges.shape[1], charges.device)
        flat = charges.flatten()
        edges = {"edge_index": index, "edge_attr": (flat[index[0]] * flat[index[1]])[:, None]}
    _, moved = model(scalars, velocities[:, :, None], pos=positions, **edges)
    return positions + moved[:, :, 0], later


def build(name: str, settings: NBody) -> nn.Module:
    """A model with two scalars (the charge, one-hot) and one vector (the velocity) in, and one vector out."""
    if name == "EGNN":
        return EGNN()
    if name in PLAIN:
        wanted = parameters(build("SE(3)-Hyena", settings))
        return match_parameters(
            lambda channels: PLAIN[name](2, 1, 0, 1, channels=channels, num_layers=settings.num_layers), wanted
        )
    model = SE3Hyena(
        2, 1, 0, 1, hidden_scalars=settings.scalars, hidden_vectors=settings.vectors, num_layers=settings.num_layers,
        num_blocks=settings.blocks, **EQUIVARIANT[name],
    )  # fmt: skip
    if name in OPERATORS:
        grades = model.module.hidden_grades
        operators = (OPERATORS[name](grades, grades, grades, part.options) for part in model.module.operators)
        model.module.operators = nn.ModuleList(operators)
    if name in PUBLISHED:
        divided_by_length(model)
    return model


def train(settings: NBody) -> Outcome:
    """One model, trained and tested."""
    (name,) = settings.models
    parts = systems(settings)
    augment = shuffled if settings.augment else None
    training = tensor_batches(parts[0], settings.batch, settings.seed, augment, settings.device)
    held_out = [tensor_batches(part, 500, device=settings.device) for part in parts[1:]]
    outcome = fit(Regressor(build(name, settings), predict, settings), training, *held_out)
    _, velocities, positions, later = parts[2]
    _, best_time = linear_error(*(parts[0][n] for n in (2, 1, 3)))
    for label, time in (("linear", 1.0), ("best linear", best_time)):
        outcome.more[label] = linear_error(positions, velocities, later, time)
    return outcome


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by model; where they differ in epochs or blocks from most, by those too, and by learning rates last."""
    counts = {key: len(group) for key, group in grouped(rows, "epochs", "blocks").items()}
    most = max(counts, key=counts.__getitem__)
    groups: dict[str, list[Row]] = {}
    for (model, epochs, blocks, rate), group in grouped(rows, "models", "epochs", "blocks", "learning_rate").items():
        other = [
            f"{n} {name}"
            for n, usual, name in zip((epochs, blocks), most, ("epochs", "blocks"), strict=True)
            if n != usual
        ]
        label = ", ".join([model, *other])
        groups[f"{label}, learning rate {rate}" if label in groups else label] = group
    return groups


def table(rows: list[Row]) -> str:
    """The paper's Table 1, and ratios to linear motion."""
    header = ["method", "MSE", "of linear motion's", "parameters"]
    header += ["SE(3)-Hyena paper, other data", "published, this task"]
    paper, others = published("SE(3)-Hyena Table 1"), published("n-body, standard task")
    linear, groups = rows[0].more["linear"][0], by_model(rows)
    lines = []
    for label in ("linear", "best linear"):
        error, time = rows[0].more[label]
        name = f"linear, t = {time:.3g}"
        lines.append([name, f"{error:.4f}", f"{error / linear:.3f}", "0", paper.get((label, "MSE"), "-"), "-"])
    for name, group in groups.items():
        errors = [row.value for row in group]
        lines.append([
            name, mean_and_spread(errors, 4), f"{np.mean(errors) / linear:.3f}", f"{group[0].parameters:,}",
            paper.get((name, "MSE"), "-"), others.get((name, "MSE"), "-"),
        ])  # fmt: skip
    lines += [[name, "-", "-", "-", "-", value] for (name, _), value in others.items() if name not in groups]
    return markdown(header, lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(rows)}


if __name__ == "__main__":
    study.main(NBody(), PRESETS, __doc__, train, report)
