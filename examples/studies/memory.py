"""Responses with a memory: the force on a particle from the history of its motion, and stress from that of strain.

``forces``: particles in a viscous fluid, by the Maxey-Riley equation with its history integral, the drag of Schiller
and Naumann and the lift of a spin. A model sees the slip velocity, its change and the spin, and predicts the force.
Roll-outs integrate the motion with predicted forces. ``stresses``: a generalised Maxwell solid at finite strain. A
model sees logarithmic strains and their changes, and predicts the second Piola-Kirchhoff stress. data/histories.py has
the equations.

Everything is in the world frame or that of the material, in order of time, without positions. Models are trained on
sequences of one length, with equal processor time, and tested on sequences of 1, 4 and 16 times this length. Errors are
shares of the mean square that remain, of roll-outs that of the slip.

long convolution        IrrepsSE3Hyena for forces, TensorProductHyenaOperator for stresses, filter="implicit"
exponentials            the same with filter="exponential"
equivariant GRU         a recurrent network with gates by invariants
equivariant transformer causal softmax attention by invariants, with a learned bias of the lag
messages in a window    two layers of linear maps of the last 12 steps
Hyena, GRU              of components, with random rotations in training

    python examples/studies/memory.py --tasks forces --models "long convolution" "equivariant GRU"    # half an hour
    python examples/studies/memory.py --study    # hours
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import ClassVar, Literal, get_args

import torch
from baselines.memory_models import GRU, Channels, EquivariantGRU, EquivariantTransformer, Hyena, Ours, Window
from data.histories import Histories, forces, quadrature_force, stresses
from e3nn import o3
from harness import study
from harness.results import Row
from harness.settings import Settings
from harness.tables import at_best_rates, markdown, mean_and_spread
from harness.training import Outcome, parameters
from torch import Tensor, nn

Task = Literal["forces", "stresses"]
MODELS = {
    "long convolution": lambda *channels: Ours(*channels, "implicit"),
    "exponentials": lambda *channels: Ours(*channels, "exponential"),
    "equivariant GRU": EquivariantGRU,
    "equivariant transformer": EquivariantTransformer,
    "messages in a window": Window,
    "Hyena": Hyena,
    "GRU": GRU,
}
Model = Literal[
    "long convolution", "exponentials", "equivariant GRU", "equivariant transformer", "messages in a window", "Hyena",
    "GRU",
]  # fmt: skip
CHANNELS: dict[str, tuple[Channels, Channels]] = {
    "forces": ((2, 3, 3), (0, 1, 3)),
    "stresses": ((3, 2, 5), (1, 1, 5)),
}
DRAW = {"forces": forces, "stresses": stresses}
TIMES = (1, 4, 16)  # lengths of tests over that of training
SEEDS = {"validation": 1, "test": 2}  # of data; training has those from 10 on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "memory"
    SWEEP: ClassVar[tuple[str, ...]] = ("tasks", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    tasks: tuple[Task, ...] = get_args(Task)
    """which response"""
    models: tuple[Model, ...] = get_args(Model)
    """which to train"""
    budget: float = 900.0
    """processor seconds of a training run"""
    steps: int = 160
    """of time in sequences of training"""
    train: int = 32
    """sequences of training"""
    held_out: int = 16
    """sequences of validation, and of the test of the same length; longer tests have fewer"""
    batch: int = 12
    learning_rate: float = 0.003
    warmup: float = 0.05
    clip: float = 1.0


PRESETS = {
    "quick": Memory(budget=0.5, steps=12, train=4, held_out=2, batch=2),
    "study": Memory(budget=30.0, results=study.committed("memory")),
}


def rotated(batch: Histories) -> Histories:
    """Every sequence turned by a rotation of its own."""
    dim, count = batch.tensors.shape[3], len(batch.tensors)
    turns = o3.Irrep(dim // 2, 1).D_from_matrix(o3.rand_matrix(count))[:, None]
    scalars, tensors = batch.target
    return Histories(batch.scalars, batch.tensors @ turns.mT, (scalars, tensors @ turns.mT))


def flat(parts: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([parts[0], parts[1].flatten(2)], 2)


def fit(model: nn.Module, data: Histories, scale: Tensor, settings: Memory) -> tuple[int, float]:
    """Train for the budget of processor time; the learning rate rises, and falls as half a cosine. Returns the number
    of steps and their processor seconds."""
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    generator = torch.Generator().manual_seed(settings.seed)
    start, count, spent = time.process_time(), 0, 0.0
    while spent < settings.budget:
        share = spent / settings.budget
        rate = min(1.0, (share + 0.001) / max(settings.warmup, 0.001)) * (0.5 + 0.5 * math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = settings.learning_rate * rate
        batch = data[torch.randint(settings.train, (settings.batch,), generator=generator)]
        batch = rotated(batch) if getattr(model, "augment", False) else batch
        loss = (flat(model(batch.scalars, batch.tensors)) - flat(batch.target) / scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
        optimizer.step()
        count, spent = count + 1, time.process_time() - start
    return count, spent


@torch.no_grad()
def left(model: nn.Module, data: Histories, scale: Tensor) -> float:
    """The share of the mean square of the response that is left."""
    errors = size = 0.0
    for n in range(len(data.scalars)):
        part = data[n : n + 1]
        out = flat(model(part.scalars, part.tensors)) * scale
        errors += float((out - flat(part.target)).double().square().sum())
        size += float(flat(part.target).double().square().sum())
    return errors / size


@torch.no_grad()
def rolled_out(model: nn.Module, data: Histories, scale: Tensor) -> list[float]:
    """The share of the mean square of slips that is left after roll-outs, and the same with the equation's force."""
    world, steps = data.world, data.scalars.shape[1]
    truth = world.motion(steps)[0]

    def predicted(scalars: Tensor, tensors: Tensor) -> Tensor:
        return (model(scalars.float(), tensors.float())[1][:, -1, 0] * scale).double()

    slips = (world.roll_out(force, steps) for force in (predicted, quadrature_force(world)))
    ratios = [(slip - truth).square().sum() / truth.square().sum() for slip in slips]
    return [float(ratio.nan_to_num(nan=1e9).clamp(max=1e9)) for ratio in ratios]  # it may leave all bounds


def train(settings: Memory) -> Outcome:
    """One model on one response, trained and tested."""
    (task,), (name,) = settings.tasks, settings.models
    draw, inside_outside = DRAW[task], CHANNELS[task]
    data = draw(10 + settings.seed, settings.train, settings.steps)
    scale = flat(data.target).square().mean().sqrt()
    model = MODELS[name](*inside_outside).to(settings.device)
    count, seconds = fit(model, data, scale, settings)
    model.eval()
    more: dict = {"steps": count, "validation": left(model, draw(SEEDS["validation"], *shape(settings)), scale)}
    tests = {times: draw(SEEDS["test"], *shape(settings, times)) for times in TIMES}
    more["errors"] = {str(times): left(model, test, scale) for times, test in tests.items()}
    if task == "forces":
        more["rolled out"], more["equation"] = rolled_out(model, tests[1], scale)
    return Outcome("error", more["errors"]["1"], parameters(model), seconds, more)


def shape(settings: Memory, times: int = 1) -> tuple[int, int]:
    """Numbers of sequences and of steps of a test."""
    return max(1, settings.held_out // times), times * settings.steps


def table(rows: list[Row], task: str) -> str:
    """Errors by model, of rows with the learning rate that validation data choose."""
    names, lines = get_args(Model), []
    groups = at_best_rates([row for row in rows if row.setting("tasks") == task], "models")
    for (model,), group in sorted(groups.items(), key=lambda item: names.index(item[0][0])):
        cells = [mean_and_spread((row.more["errors"][str(times)] for row in group), 4) for times in TIMES]
        if task == "forces":
            cells.append(mean_and_spread((row.more["rolled out"] for row in group), 4))
        steps = sum(row.more["steps"] for row in group) / len(group)
        lines.append(
            [model, *cells, f"{group[0].parameters:,}", f"{steps:.0f}", str(group[0].setting("learning_rate"))]
        )
    header = [f"{times} x length" for times in TIMES] + ["roll-out"] * (task == "forces")
    return markdown(["model", *header, "parameters", "steps", "learning rate"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Tables of errors."""
    return {task: table(rows, task) for task in get_args(Task) if any(row.setting("tasks") == task for row in rows)}


if __name__ == "__main__":
    study.main(Memory(), PRESETS, __doc__, train, report)
