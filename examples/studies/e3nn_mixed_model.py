"""Mix SE(3)-Hyena into an e3nn model: global context between message passing layers of short range.

The model embeds scalars and vectors by an e3nn Linear, passes messages between near points (spherical harmonics, tensor
products with weights from distances, Gate), and between two such layers places an operator with global context:
SE(3)-Hyena, vector self-attention, the tensor-product Hyena with features up to l = 2, or none; ``--study`` has the
published convolution, filters of the lag and a short convolution too. Trains each, checks
equivariance with e3nn's own checker, saves, loads, and prints a table. Two tasks:

particles   the charged particles of nbody.py, more of them, on a radius graph that leaves most pairs out: where is each
            of them 1,000 steps later?
chain       points along a smooth random curve, edges between neighbors on it; one point, anywhere, carries a number,
            every point a vector: what is each one's vector times that number? Two layers of messages reach two points
            in both directions, and beyond the number can be anything, so without global context no model has a lower
            error than what the table calls "two steps along the chain".

    python examples/studies/e3nn_mixed_model.py                    # some minutes on two cores
    python examples/studies/e3nn_mixed_model.py --task chain
    python examples/studies/e3nn_mixed_model.py --particles 40 --train 2000 --epochs 60 --device cuda
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from baselines.message_passing import HIDDEN, MessagePassing
from baselines.published_norm import divided_by_length
from data.charged_particles import cached, linear_error
from e3nn import o3
from e3nn.util.test import equivariance_error
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit, load
from tg_equiattn.integrations.e3nn import IrrepsSE3HyenaOperator, IrrepsVectorSelfAttention, TensorProductHyenaOperator
from torch import Tensor, nn

SEED, STEPS = 44, 1000  # of the data, which do not depend on the seed of training
WIDE = "8x0e + 4x1o + 2x2e + 8x0e + 4x1o"
OPERATORS: dict[str, Callable[[str], nn.Module | None]] = {
    "none": lambda order: None,
    "SE3HyenaOperator": lambda order: IrrepsSE3HyenaOperator(HIDDEN, HIDDEN, order=order),
    "SE3HyenaOperator, as published": lambda order: divided_by_length(
        IrrepsSE3HyenaOperator(HIDDEN, HIDDEN, order=order)
    ),
    "SE3HyenaOperator, short convolution": lambda order: IrrepsSE3HyenaOperator(
        HIDDEN, HIDDEN, order=order, short_conv=3
    ),
    "SE3HyenaOperator, implicit filter": lambda order: IrrepsSE3HyenaOperator(
        HIDDEN, HIDDEN, order=order, filter="implicit"
    ),
    "VectorSelfAttention": lambda order: IrrepsVectorSelfAttention(HIDDEN, HIDDEN),
    "TensorProductHyenaOperator": lambda order: TensorProductHyenaOperator(HIDDEN, HIDDEN, WIDE, order=order),
    "TensorProductHyenaOperator, implicit filter": lambda order: TensorProductHyenaOperator(
        HIDDEN, HIDDEN, WIDE, order=order, filter="implicit"
    ),
}
Operator = Literal[
    "none", "SE3HyenaOperator", "SE3HyenaOperator, as published", "SE3HyenaOperator, short convolution",
    "SE3HyenaOperator, implicit filter", "VectorSelfAttention", "TensorProductHyenaOperator",
    "TensorProductHyenaOperator, implicit filter",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedModelSettings(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "e3nn_mixed_model"
    SWEEP: ClassVar[tuple[str, ...]] = ("operators", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "cache")

    operators: tuple[Operator, ...] = (
        "none", "SE3HyenaOperator", "VectorSelfAttention", "TensorProductHyenaOperator",
    )  # fmt: skip
    """the global context between the two layers of messages"""
    task: Literal["particles", "chain"] = "particles"
    """where charged particles go, or a number carried by one point of a chain"""
    particles: int = 20
    """of every system; points of every chain"""
    radius: float = 1.0
    """up to which distance messages pass; particles start N(0, 1) (n / 5)^(1/3), neighbors on a chain are 0.5 apart"""
    train: int = 400
    """systems to train on; a quarter as many each to choose the epoch and to test"""
    cache: Path = Path("out/simulations")
    """folder for simulated systems"""
    epochs: int = 20
    batch: int = 20
    learning_rate: float = 0.005

    def check(self) -> None:
        super().check()
        for name in ("particles", "radius", "train"):
            self.positive(name)
        if self.train < 4 or self.particles < 2:
            raise ValueError(f"--train must be at least 4 and --particles 2, got {self.train} and {self.particles}")


PRESETS = {
    "quick": MixedModelSettings(train=12, particles=6, epochs=1, batch=6),
    "study": MixedModelSettings(
        operators=get_args(Operator),
        task="chain",
        seeds=(0, 1, 2),
        epochs=40,
        results=study.committed("e3nn_mixed_model"),
    ),
    "full": MixedModelSettings(particles=40, train=2000, epochs=60),
}


class MixedModel(nn.Module):
    """Linear, message passing, an operator with global context and a residual, message passing, Linear."""

    irreps_in, irreps_out = o3.Irreps("1x0e + 1x1o"), o3.Irreps("1x1o")

    def __init__(self, operator: nn.Module | None, radius: float) -> None:
        super().__init__()
        self.embed = o3.Linear(self.irreps_in, HIDDEN)
        self.first, self.second = MessagePassing(HIDDEN, radius), MessagePassing(HIDDEN, radius)
        self.operator = operator
        self.out = o3.Linear(HIDDEN, self.irreps_out)

    def forward(self, x: Tensor, pos: Tensor, batch: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(self.embed(x), pos, edge_index)
        if self.operator is not None:
            x = x + self.operator(x, pos, batch)
        return self.out(self.second(x, pos, edge_index))


def build(settings: MixedModelSettings) -> MixedModel:
    """Particles have no order but by distance; points of a chain have theirs."""
    (name,) = settings.operators
    order = "radial" if settings.task == "particles" else "input"
    return MixedModel(OPERATORS[name](order), settings.radius)


def chains(count: int, points: int, seed: int) -> list[Tensor]:
    """Numbers (0 but for one point of a chain), vectors, positions, and vectors times the chain's number."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(count, points, 3, generator=generator)
    for n in range(1, points):
        steps[:, n] = 0.9 * steps[:, n - 1] + 0.4 * steps[:, n]  # directions that change slowly
    positions = (0.5 * steps / steps.norm(dim=-1, keepdim=True)).cumsum(1)
    vectors = torch.randn(count, points, 3, generator=generator)
    number = torch.randn(count, 1, generator=generator)
    place = torch.randint(points, (count, 1), generator=generator)
    return [torch.zeros(count, points).scatter(1, place, number), vectors, positions, number[..., None] * vectors]


def systems(settings: MixedModelSettings) -> list[list[Tensor]]:
    """Training, validation and test systems: scalars, vectors, positions, targets."""
    counts = settings.train, settings.train // 4, settings.train // 4
    if settings.task == "chain":
        tensors = chains(sum(counts), settings.particles, SEED)
    else:
        data = cached(sum(counts), SEED, settings.particles, STEPS, settings.cache, settings.progress)
        tensors = [data.charges, data.velocities[:, 0], data.positions[:, 0], data.positions[:, -1]]
    return [list(part) for part in zip(*(x.float().split(counts) for x in tensors), strict=True)]


def edges(positions: Tensor, settings: MixedModelSettings) -> Tensor:
    """Pairs of near points of each system, (2, E)."""
    count, points = positions.shape[:2]
    if settings.task == "chain":
        place = torch.arange(points, device=positions.device)
        near = ((place[:, None] - place).abs() == 1).expand(count, -1, -1)
    else:
        near = torch.cdist(positions, positions) < settings.radius
        near = near & ~torch.eye(points, dtype=torch.bool, device=positions.device)
    system, i, j = near.nonzero().T
    return torch.stack([i, j]) + points * system


def flat(data: list[Tensor], settings: MixedModelSettings) -> list[Tensor]:
    """Features, positions, numbers of systems and edges, as e3nn has them."""
    scalars, vectors, positions, _ = data
    batch = torch.arange(len(scalars), device=scalars.device).repeat_interleave(scalars.shape[1])
    x = torch.cat([scalars[..., None], vectors], -1).flatten(0, 1)
    return [x, positions.flatten(0, 1), batch, edges(positions, settings)]


def predictor(settings: MixedModelSettings) -> Callable[[nn.Module, list[Tensor]], tuple[Tensor, Tensor]]:
    """Predicted and true targets, (systems, points, 3)."""

    def predict(model: nn.Module, data: list[Tensor]) -> tuple[Tensor, Tensor]:
        positions, target = data[2:]
        out = model(*flat(data, settings)).view_as(target)
        return (positions + out if settings.task == "particles" else out), target

    return predict


def equivariance(model: MixedModel, data: list[Tensor], settings: MixedModelSettings) -> float:
    """Largest error in double precision over rotations, reflections and translations of one system, by e3nn."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = model.double()
        x, pos, batch, edge_index = flat([part[:1].double() for part in data], settings)
        errors = equivariance_error(
            lambda x, pos: model(x, pos, batch, edge_index), args_in=[x, pos],
            irreps_in=[model.irreps_in, "cartesian_points"], irreps_out=[model.irreps_out],
        )  # fmt: skip
        return max(float(error.max()) for error in errors.values())
    finally:
        model.float()
        torch.set_default_dtype(default)


def baselines(data: list[Tensor], settings: MixedModelSettings) -> dict[str, float]:
    """Errors that need no training; the first is what others are divided by."""
    scalars, vectors, positions, target = data
    if settings.task == "particles":
        return {"linear motion": linear_error(positions, vectors, target, 1.0)[0]}
    place = torch.arange(settings.particles)
    far = (place - scalars.abs().argmax(1, keepdim=True)).abs() > 2
    return {
        "zero": float(target.square().mean()),
        "two steps along the chain": float((far[..., None] * target).square().mean()),
    }


def train(settings: MixedModelSettings) -> Outcome:
    """One model, trained and tested, saved and loaded, its equivariance checked."""
    parts, predict = systems(settings), predictor(settings)
    training = tensor_batches(parts[0], settings.batch, settings.seed, device=settings.data_device)
    held_out = [tensor_batches(part, settings.batch, device=settings.data_device) for part in parts[1:]]
    learner = Regressor(build(settings), predict, settings)
    outcome = fit(learner, training, *held_out)
    model = learner.model.cpu().float()  # where e3nn's checker makes its rotations
    loaded = build(settings).eval()
    saved = load(settings.folder / "best.ckpt")["state_dict"]
    loaded.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    few = [x[:3] for x in parts[2]]
    with torch.no_grad():
        if not torch.equal(predict(loaded, few)[0], predict(model, few)[0]):
            raise SystemExit("a loaded model must give what the saved one gave")
        outcome.more["equivariance"] = equivariance(model, few, settings)
    outcome.more["baselines"] = baselines(parts[2], settings)
    return outcome


def table(rows: list[Row]) -> str:
    """Errors by task and operator, beside what needs no training."""
    lines = []
    for (task,), same in grouped(rows, "task").items():
        known = same[0].more["baselines"]
        base = next(iter(known.values()))
        lines += [[task, name, f"{error:.4f}", f"{error / base:.3f}", "0", "-"] for name, error in known.items()]
        for (name,), group in grouped(same, "operators").items():
            errors = [row.value for row in group]
            worst = max(row.more["equivariance"] for row in group)
            lines.append([
                task, name, mean_and_spread(errors, 4),
                f"{np.mean(errors) / base:.3f}", f"{group[0].parameters:,}", f"{worst:.0e}",
            ])  # fmt: skip
    return markdown(["task", "global context", "MSE", "of the first line's", "parameters", "equivariance error"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(rows)}


if __name__ == "__main__":
    study.main(MixedModelSettings(), PRESETS, __doc__, train, report)
