"""Find the pair: which two of several patterns, never seen before, are equal up to a quarter turn?

A canvas of 3 x 3 cells, of 4 x 4 pixels each, holds patterns of normal noise in 2, 4, 6 or 9 of its cells; the others
are empty. Two patterns are equal up to a turn by a multiple of 90 degrees; of two patterns, half are. Canvases are new
in every step. Networks of four rotations embed every cell as a vision transformer its patches, score it, and a pair's
score is the sum of its two. Between come two residual layers, each with a pointwise one of two group-linear maps and a
ReLU behind it, all at about as many parameters:

frames               GroupAttention over all cells, relation="frame", with an encoding by an MLP
frames, rotary       the same with rotary positions, the default
frames, no content   the first with content_heads=0: heads look by place alone, a separable group convolution
relative             relation="relative"
relative, rotary     the same with rotary positions
ge_vit               relation="ge_vit", as published
G-CNN + mean         escnn's 3 x 3 convolution, and a group-linear map of the mean over all cells
deep G-CNN           four convolutions in place of two layers
deep G-CNN + mean    both
dilated G-CNN        the second convolution with dilation 2
wide G-CNN           convolutions of 5 x 5, which see the whole canvas from everywhere

Seconds are those of the processor in the steps of training, whatever else the machine does.

    python examples/studies/matching.py --models frames "G-CNN + mean" --cells 4    # half a minute
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from baselines.gcnn import gspaces, matched
from baselines.gcnn import nn as escnn
from data.pairs import SIDE, Canvases, draw, pairs
from harness import study
from harness.loading import FreshBatches, tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, in_order, markdown, mean_and_spread, validated
from harness.training import Classifier, Outcome, Timed, fit, parameters
from torch import Tensor, nn

from tg_equiattn.group.layers import RegularBatchNorm
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention, GroupLinear, RegularLayerNorm

GROUP = cyclic(4)
VALIDATION, TEST = 71, 72  # seeds of canvases, which do not depend on the seed of training
Model = Literal[
    "frames", "frames, rotary", "frames, no content", "relative", "relative, rotary", "ge_vit",
    "G-CNN + mean", "deep G-CNN", "dilated G-CNN", "wide G-CNN", "deep G-CNN + mean",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matching(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "matching"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "cells", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "norm", "epochs")

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    cells: tuple[int, ...] = (2, 4, 6)
    """how many hold patterns"""
    side: int = 3
    """cells a side of a canvas"""
    train: int = 1920
    """canvases of an epoch; those of the next are new"""
    validation: int = 500
    """canvases to choose weights, rates and norms on"""
    test: int = 2000
    """canvases to test on"""
    channels: int = 12
    """regular fields of the network with frames; others get as many parameters by theirs"""
    heads: int = 4
    """of attention"""
    head_channels: int = 8
    """width of a head"""
    norm: Literal["layer", "batch"] = "layer"
    """before every layer"""
    epochs: int = 10
    batch: int = 32
    learning_rate: float = 0.01
    warmup: float = 0.1

    def check(self) -> None:
        super().check()
        for cells in self.cells:
            if not 2 <= cells <= self.side**2:
                raise ValueError(f"{flag('cells')} must be in 2 ... {self.side**2}, got {cells}")


PRESETS = {
    "quick": Matching(
        cells=(2, 4), train=32, validation=8, test=12, channels=4, heads=2, head_channels=3, epochs=1, batch=8,
    ),
    "study": Matching(seeds=(0, 1, 2), results=study.committed("matching")),
}  # fmt: skip


class Patches(nn.Module):
    """Every cell as regular features: its products with filters of its size, in four turns, ``(B, C, 4, S, S)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, SIDE, SIDE) * 2**0.5 / SIDE)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.stack([self.weight.rot90(quarters, (2, 3)) for quarters in range(4)], 1)
        return F.conv2d(x, turned.flatten(0, 1), stride=SIDE).unflatten(1, (-1, 4))


class Convolution(nn.Module):
    """escnn's convolution of regular features; with ``mean`` plus a map of their mean over all cells."""

    def __init__(self, channels: int, side: int = 3, dilation: int = 1, mean: bool = False) -> None:
        super().__init__()
        gspace = gspaces.rot2dOnR2(4)
        self.fields = escnn.FieldType(gspace, channels * [gspace.regular_repr])
        padding = dilation * (side // 2)
        self.near = escnn.R2Conv(self.fields, self.fields, kernel_size=side, padding=padding, dilation=dilation)
        self.far = GroupLinear(GROUP, channels, channels, bias=False) if mean else None

    def forward(self, x: Tensor) -> Tensor:
        near = self.near(escnn.GeometricTensor(x.flatten(1, 2), self.fields)).tensor.unflatten(1, (-1, 4))
        return near if self.far is None else near + self.far(x.mean((3, 4), keepdim=True))


class Scorer(nn.Module):
    """A score for every cell, ``(B, 1, 4 S, 4 S)`` -> ``(B, S S)``."""

    def __init__(self, settings: Matching, channels: int) -> None:
        super().__init__()
        (name,) = settings.models
        norm: Any = {"layer": RegularLayerNorm, "batch": RegularBatchNorm}[settings.norm]
        self.embedding = Patches(channels)
        self.branches = nn.ModuleList()
        for number in range(4 if name.startswith("deep") else 2):
            wide = GroupLinear(GROUP, channels, 2 * channels)
            pointwise = wide, nn.ReLU(), GroupLinear(GROUP, 2 * channels, channels)
            self.branches.append(nn.Sequential(norm(channels), layer(settings, channels, number)))
            self.branches.append(nn.Sequential(norm(channels), *pointwise))
        self.norm, self.score = norm(channels), nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.score(self.norm(x).amax(2).movedim(1, -1)).flatten(1)


def layer(settings: Matching, channels: int, number: int) -> nn.Module:
    """The layer by which cells see each other."""
    (name,) = settings.models
    if "G-CNN" in name:
        dilation = 1 + number if name == "dilated G-CNN" else 1
        return Convolution(channels, 5 if name == "wide G-CNN" else 3, dilation, mean=name.endswith("+ mean"))
    encodings = {"ge_vit": "axial", "frames, rotary": "rotary", "relative, rotary": "rotary"}
    options: dict[str, Any] = {"encoding": encodings.get(name, "joint")}
    if name == "frames, no content":
        options["content_heads"] = 0
    return GroupAttention(
        GROUP, channels, channels, heads=settings.heads, head_channels=settings.head_channels, kernel_size=None,
        relation=name.split(",")[0].replace("frames", "frame"),
        locality=4.0 if name == "frames, no content" else None, **options,
    )  # fmt: skip


def build(settings: Matching) -> Scorer:
    """The model of a single run, of as many parameters as that with frames."""
    like = Scorer(dataclasses.replace(settings, models=("frames",)), settings.channels)
    return matched(lambda width: Scorer(settings, width), parameters(like), settings.channels // 3)


def predict(model: nn.Module, batch: Canvases) -> tuple[Tensor, Tensor]:
    """Logits of pairs, or, of two cells, of whether they are equal; and labels."""
    images, places, labels = batch
    logits = model(images).gather(1, places)[:, pairs(places.shape[1]).to(places.device)].sum(2)
    return torch.cat([torch.zeros_like(logits), logits], 1) if places.shape[1] == 2 else logits, labels


class Learner(Timed, Classifier):
    """Accuracy, and the processor's seconds."""


def train(settings: Matching) -> Outcome:
    """One model, trained and tested."""
    held_out = [
        tensor_batches(draw(count, settings.cells[0], settings.side, seed), 250, device=settings.device)
        for count, seed in ((settings.validation, VALIDATION), (settings.test, TEST))
    ]
    training = FreshBatches(
        lambda count, seed: draw(count, settings.cells[0], settings.side, seed),
        settings.train, settings.batch, settings.seed, settings.device,
    )  # fmt: skip
    return fit(Learner(build(settings), predict, settings), training, *held_out)


def tried(rows: list[Row]) -> list[Row]:
    """The rows that choose learning rate and norm: of four cells, the first seed and the usual number of steps; where
    there are none of four cells, of any."""
    rows = [row for row in usual(rows) if row.setting("cells") == 4] or usual(rows)
    return [row for row in rows if row.setting("seeds") == min(row.setting("seeds") for row in rows)]


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each model at the learning rate and norm that are best on validation canvases."""
    groups = {}
    for (name,), group in grouped(in_order(rows, models=Model.__args__), "models").items():
        best = max(tried(group), key=validated)
        chosen = [best.setting(setting) for setting in ("learning_rate", "norm")]
        groups[name] = [row for row in group if [row.setting(s) for s in ("learning_rate", "norm")] == chosen]
    return groups


def cells_of(rows: list[Row]) -> list[int]:
    return sorted({row.setting("cells") for row in rows})


def usual(rows: list[Row]) -> list[Row]:
    """Rows of the usual number of steps, where there are any."""
    return [row for row in rows if row.setting("epochs") == Matching().epochs] or rows


def accuracies(rows: list[Row]) -> str:
    """Accuracy by model and number of cells, over seeds, at the best learning rate and norm."""
    lines, counts = [], cells_of(usual(rows))
    for name, group in by_model(rows).items():
        by_cells = {cells: [r for r in usual(group) if r.setting("cells") == cells] for cells in counts}
        cells = [mean_and_spread((r.value for r in some), 1) if some else "-" for some in by_cells.values()]
        first, middle = group[0], by_cells.get(4) or usual(group)
        lines.append([
            name, *cells, f"{first.parameters:,}", f"{np.mean([r.seconds for r in middle]):.0f}",
            f"{first.setting('learning_rate')}, {first.setting('norm')}",
        ])  # fmt: skip
    chance = [f"{100 / max(2, len(pairs(cells))):.1f}" for cells in counts]
    lines.append(["chance", *chance, "-", "-", "-"])
    header = ["model", *(f"{cells} cells" for cells in counts), "parameters", "seconds", "learning rate, norm"]
    return markdown(header, lines)


def times(rows: list[Row]) -> str:
    """Accuracy with four cells, after shorter and longer runs."""
    lines = []
    for name, group in by_model(rows).items():
        here = [row for row in group if row.setting("cells") == 4] or group
        for (epochs,), some in sorted(grouped(here, "epochs").items()):
            steps = epochs * (some[0].setting("train") // some[0].setting("batch"))
            seconds = f"{np.mean([row.seconds for row in some]):.0f}"
            lines.append([name, f"{steps:,}", seconds, mean_and_spread((row.value for row in some), 1)])
    return markdown(["model", "steps", "seconds", "accuracy"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Tables of accuracies and times."""
    return {"accuracy": accuracies(rows), "times": times(rows)}


if __name__ == "__main__":
    study.main(Matching(), PRESETS, __doc__, train, report)
