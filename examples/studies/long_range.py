"""Potentials, fields and forces of charges far apart: what a global operator adds to message passing of short range.

Neutral clouds of soft charges in an open box (data/soft_charges.py). The model embeds the charges by an e3nn Linear,
passes messages between points nearer than a cutoff, adds an operator with global context, passes messages again and
reads out. The operator is Ewald attention, Ewald message passing as published, SE(3)-Hyena in radial order, vector
self-attention, or none; with "all pairs" the second layer of messages has no cutoff. Two tasks:

fields   every point's potential and field, as shares of their variance
forces   the cloud's energy; forces are its derivatives, and learned from too

Each model is also tested on boxes of the same density with 2, 4 and 8 times as many charges.

    python examples/studies/long_range.py                    # minutes on two cores
    python examples/studies/long_range.py --task forces
    python examples/studies/long_range.py --train 4096 --epochs 200 --device cuda
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import torch
from baselines.ewald_message_passing import EwaldMessagePassing
from baselines.message_passing import HIDDEN, ChannelwiseMessagePassing
from data.soft_charges import Clouds, soft_charges
from e3nn import o3
from harness import study
from harness.loading import parted, tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, in_order, markdown, mean_and_spread
from harness.training import Outcome, Regressor, fit
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention, IrrepsSE3HyenaOperator, IrrepsVectorSelfAttention
from torch import Tensor, nn

SEED = 45  # of the data, which do not depend on the seed of training
Operator = Literal[
    "none", "EwaldAttention", "Ewald message passing", "SE3HyenaOperator", "VectorSelfAttention", "all pairs"
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRange(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "long_range"
    SWEEP: ClassVar[tuple[str, ...]] = ("task", "operators", "seeds")

    task: tuple[Literal["fields", "forces"], ...] = ("fields",)
    """what is learned"""
    operators: tuple[Operator, ...] = Operator.__args__
    """the global context between the two layers of messages"""
    charges: int = 48
    """in every box, an even number"""
    side: float = 8.0
    """of the box"""
    softness: float = 0.5
    """s in 1 / sqrt(r^2 + s^2)"""
    cutoff: float = 2.0
    """up to which distance messages pass"""
    width: float = 1.0
    """of Ewald attention's narrowest kernel: half the cutoff"""
    max_width: float = 8.0
    """of its widest: the side of a box"""
    train: int = 512
    """boxes to train on; a quarter as many each to choose the epoch, to test, and to test with larger ones"""
    epochs: int = 16
    batch: int = 16
    learning_rate: float = 0.05
    warmup: float = 0.3
    clip: float = 1.0

    def check(self) -> None:
        super().check()
        if self.charges % 2:
            raise ValueError(f"--charges must be even (clouds are neutral), got {self.charges}")
        if self.train < 4:
            raise ValueError(f"--train must be at least 4, got {self.train}")

    @property
    def diagonal(self) -> float:
        """Of the box of twice the charges: the reach of messages over all pairs."""
        return 2 ** (1 / 3) * self.side * math.sqrt(3)


PRESETS = {
    "quick": LongRange(train=8, charges=8, epochs=1, batch=4),
    "study": LongRange(seeds=(0, 1, 2), results=study.committed("long_range")),
}
AVG_NUM_NODES = 8.0  # of Ewald attention
TIMES = 2, 4, 8  # as many charges in larger boxes
BOXES = {"same": "", "larger": ", 2 times the charges", "4 times": ", 4 times", "8 times": ", 8 times"}


class EwaldMessages(EwaldMessagePassing):
    """Of the invariant features, in clouds of one size."""

    def __init__(self) -> None:
        super().__init__(HIDDEN[0].mul)

    def forward(self, x: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        count = int(batch[-1]) + 1
        scalars, vectors = x.tensor_split([HIDDEN[0].mul], 1)
        found = super().forward(scalars.unflatten(0, (count, -1)), pos.unflatten(0, (count, -1)))
        return torch.cat([found.flatten(0, 1), torch.zeros_like(vectors)], 1)


class Model(nn.Module):
    """Linear, message passing, an operator with a residual, message passing, Linear.

    Args:
        settings: of the example.
    """

    irreps_in = o3.Irreps("0e")

    def __init__(self, settings: LongRange) -> None:
        super().__init__()
        (operator,), (task,) = settings.operators, settings.task
        far = settings.diagonal if operator == "all pairs" else settings.cutoff
        near = max(1.0, settings.charges / settings.side**3 * 4 / 3 * math.pi * settings.cutoff**3)
        operators: dict[str, Callable[[], nn.Module]] = {
            "EwaldAttention": lambda: IrrepsEwaldAttention(
                HIDDEN, HIDDEN, width=settings.width, max_width=settings.max_width, output_scale=AVG_NUM_NODES
            ),
            "Ewald message passing": EwaldMessages,
            "SE3HyenaOperator": lambda: IrrepsSE3HyenaOperator(HIDDEN, HIDDEN, order="radial"),
            "VectorSelfAttention": lambda: IrrepsVectorSelfAttention(HIDDEN, HIDDEN),
        }
        self.irreps_out = o3.Irreps("0e + 1o" if task == "fields" else "0e")
        self.radii = settings.cutoff, far
        self.embed = o3.Linear(self.irreps_in, HIDDEN)
        self.first = ChannelwiseMessagePassing(HIDDEN, settings.cutoff, near)
        self.operator = operators[operator]() if operator in operators else None
        self.second = (
            ChannelwiseMessagePassing(HIDDEN, far, settings.charges, 32, cutoff=False)
            if operator == "all pairs"
            else ChannelwiseMessagePassing(HIDDEN, far, near)
        )
        self.out = o3.Linear(HIDDEN, self.irreps_out)

    def forward(self, charges: Tensor, pos: Tensor) -> Tensor:
        """Charges (B, N), positions (B, N, 3) -> irreps of every point, (B, N, dim)."""
        batch = torch.arange(len(charges), device=charges.device).repeat_interleave(charges.shape[1])
        near = edges(pos, self.radii[0])
        far = near if self.radii[1] == self.radii[0] else edges(pos, self.radii[1])
        flat = pos.flatten(0, 1)
        x = self.first(self.embed(charges.flatten()[:, None]), flat, near)
        if self.operator is not None:
            x = x + self.operator(x, flat, batch)
        return self.out(self.second(x, flat, far)).unflatten(0, charges.shape)


def edges(positions: Tensor, radius: float) -> Tensor:
    """Pairs nearer than the radius of each box, (2, E)."""
    count = positions.shape[1]
    near = torch.cdist(positions.detach(), positions.detach()) < radius
    box, i, j = (near & ~torch.eye(count, dtype=torch.bool, device=positions.device)).nonzero().T
    return torch.stack([i, j]) + count * box


def predict(model: Model, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Predicted and true targets of every point, in units of their spread: potential and field; or the energy of a
    point's cloud, divided by the number of points, and the force."""
    charges, positions, target = data
    if model.irreps_out.dim == 4:
        return model(charges, positions), target
    with torch.inference_mode(False), torch.enable_grad():
        positions = positions.clone().requires_grad_()
        charges = charges.clone()
        energy = torch.einsum("bn,bnd->b", charges, model(charges, positions))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=model.training)
    per_point = (energy / math.sqrt(charges.shape[1]))[:, None, None].expand(-1, charges.shape[1], 1)
    return torch.cat([per_point, -slope], -1), target


def clouds(settings: LongRange) -> list[Clouds]:
    """Those to train on, to choose the epoch, to test on; and larger ones."""
    counts = settings.train, settings.train // 4, settings.train // 4
    every = soft_charges(sum(counts), settings.charges, settings.side, settings.softness, SEED)
    larger = [
        soft_charges(counts[2], n * settings.charges, n ** (1 / 3) * settings.side, settings.softness, SEED + 1)
        for n in TIMES
    ]
    return [*(Clouds(*part) for part in parted(every, counts)), *larger]


def tensors(part: Clouds, spreads: tuple[float, float], task: str) -> list[Tensor]:
    """Charges, positions and targets in units of their spreads in training: a scalar and a vector of every point."""
    if task == "fields":
        scalars, vectors = part.potentials, part.fields
    else:  # energies vary as the square root of the number of charges; their unit is that of forces, whose sum they are
        count = part.charges.shape[1]
        scalars, vectors = (part.energies / math.sqrt(count))[:, None].expand(-1, count), part.forces
    target = torch.cat([scalars[..., None] / spreads[0], vectors / spreads[1]], -1)
    return [part.charges.float(), part.positions.float(), target.float()]


def spreads(part: Clouds, task: str) -> tuple[float, float]:
    """Root mean squares of potential and field; energies and forces have one unit, or forces were no derivatives."""
    of_vectors = float(part.fields.square().mean().sqrt())
    return (float(part.potentials.std()), of_vectors) if task == "fields" else (of_vectors, of_vectors)


def predictions(model: Model, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """:func:`predict`, in batches of up to 1,536 charges."""
    step = max(1, 1536 // data[0].shape[1])
    pairs = [predict(model, [x[n : n + step] for x in data]) for n in range(0, len(data[0]), step)]
    out, target = (torch.cat([pair[n].detach() for pair in pairs]) for n in (0, 1))
    return out, target


def shares(out: Tensor, target: Tensor) -> tuple[float, float]:
    """Squared errors of the scalar and the vector, as shares of their variance."""
    error = (out - target).square()
    scalar = error[..., 0].mean() / target[..., 0].var()
    return float(scalar), float(error[..., 1:].mean() / target[..., 1:].square().mean())


def train(settings: LongRange) -> Outcome:
    """One model, trained and tested, on larger boxes too."""
    (task,) = settings.task
    parts = clouds(settings)
    units = spreads(parts[0], task)
    data = [tensors(part, units, task) for part in parts]
    training = tensor_batches(data[0], settings.batch, settings.seed, device=settings.device)
    held_out = [tensor_batches(part, 32, device=settings.device) for part in data[1:3]]
    learner = Regressor(Model(settings), predict, settings)
    outcome = fit(learner, training, *held_out)
    model = learner.model.cpu()
    for boxes, part in zip(BOXES, data[2:], strict=True):
        outcome.more[boxes] = shares(*predictions(model, part))
    return outcome


def table(rows: list[Row]) -> str:
    """Shares of the variance that remain, in boxes as in training and in larger ones."""
    lines = []
    for key, group in grouped(rows, "task", "operators").items():
        cells = [
            mean_and_spread((row.more[boxes][part] for row in group), 4) if boxes in group[0].more else "-"
            for boxes in BOXES
            for part in (0, 1)
        ]
        seconds = np.mean([row.seconds for row in group])
        lines.append([*key, *cells, f"{group[0].parameters:,}", f"{seconds:.0f}"])
    what = [f"{part}{label}" for label in BOXES.values() for part in ("potential or energy", "field or force")]
    return markdown(["task", "global context", *what, "parameters", "seconds"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of errors."""
    return {"errors": table(in_order(rows, task=("fields", "forces"), operators=Operator.__args__))}


if __name__ == "__main__":
    study.main(LongRange(), PRESETS, __doc__, train, report)
