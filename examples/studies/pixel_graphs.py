"""Classify images as sets of pixels with linear-time attention, and look at what shifts do to it.

Real digits (scikit-learn's 1797 images of 8 x 8) are put in the middle of a larger canvas, whose pixels are the tokens.
Trains the Relative Performer with no positions, absolute ones, and the relative "sinusoid", "clipped" and "window";
then shifts the test images pixel by pixel, as far as no bright pixel leaves. Prints a table like the paper's Table 1,
and accuracy against shift, as its Figure 1.

    python examples/studies/pixel_graphs.py                                      # some minutes on two cores
    python examples/studies/pixel_graphs.py --positions sinusoid window --seeds 0 1 2
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from data.digits import sklearn_digits
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, markdown, mean_and_spread, published
from harness.training import Classifier, Outcome, fit
from torch import Tensor
from tqdm import tqdm

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import RelativePerformer

NAMES = {
    "none": "Performer (No Pos.)", "absolute": "Performer (Absolute)", "sinusoid": "Performer (Rel. S1)",
    "clipped": "Performer (Rel. S2)", "window": "Performer (Window)",
}  # fmt: skip
PAPER = ("MNIST", "Fashion-MNIST", "CIFAR-10")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelGraphs(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "pixel_graphs"
    SWEEP: ClassVar[tuple[str, ...]] = ("positions", "seeds")

    positions: tuple[Literal["none", "absolute", "sinusoid", "clipped", "window"], ...] = (
        "none", "absolute", "sinusoid", "clipped", "window",
    )  # fmt: skip
    """what attention knows of where pixels are"""
    size: int = 14
    """pixels a side of the canvas"""
    train_images: int | None = None
    """use only the first of the training images"""
    test_images: int | None = None
    """use only the first of the test images"""
    channels: int = 32
    """width of the model"""
    layers: int = 2
    """blocks of attention and multilayer perceptron"""
    heads: int = 4
    """of attention"""
    cutoff: int = 4
    """pixels closer than this are joined; "clipped" tells distances up to it apart, "window" offsets below it"""
    shift: int = 3
    """largest shift of test images in pixels"""
    epochs: int = 12
    batch: int = 32
    learning_rate: float = 0.003

    def check(self) -> None:
        super().check()
        if self.size < 8:
            raise ValueError(f"{flag('size')} must be at least 8, got {self.size}")
        if 2 * self.shift > self.size:
            raise ValueError(f"{flag('shift')} must be at most half of {flag('size')} {self.size}, got {self.shift}")


PRESETS = {
    "quick": PixelGraphs(
        train_images=24, test_images=40, size=10, shift=1, channels=8, layers=1, heads=2, cutoff=2, epochs=1,
        batch=8,
    ),
    "study": PixelGraphs(seeds=(0, 1, 2), size=16, epochs=22, results=study.committed("pixel_graphs")),
}  # fmt: skip


def parts(settings: PixelGraphs) -> list[tuple[Tensor, Tensor]]:
    """Digits in the middle of canvases and their labels, to train and to test on."""
    images, labels, *indices = sklearn_digits()
    left = (settings.size - 8) // 2
    right = settings.size - 8 - left
    images = F.pad(images, (left, right, left, right))
    limits = settings.train_images, settings.test_images
    return [(images[part[:limit]], labels[part[:limit]]) for part, limit in zip(indices, limits, strict=True)]


def predict(model: RelativePerformer, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch of images."""
    images, labels = batch
    return model(images), labels


class WithPlaces(torch.nn.Module):
    """An embedding of pixels, plus sinusoids of their absolute positions (Vaswani et al., 2017)."""

    places: Tensor

    def __init__(self, embedding: torch.nn.Module, channels: int, side: int) -> None:
        super().__init__()
        self.embedding, count = embedding, channels // 4
        angles = PixelGrid((side, side), 1).pos(dtype=torch.float32)[..., None] * 1e4 ** -(torch.arange(count) / count)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x) + self.places


def build(settings: PixelGraphs) -> RelativePerformer:
    (position,) = settings.positions
    width = settings.channels // settings.heads
    features = {"num_random_features": max(16, int(width * math.log(width)))}
    model = RelativePerformer(
        1, 10, channels=settings.channels, num_layers=settings.layers, heads=settings.heads,
        position=None if position in ("none", "absolute") else position,
        cutoff=settings.cutoff, dropout=0.0, norm="batch", attn_kwargs=features,
    )  # fmt: skip
    if position == "absolute":
        model.embedding = WithPlaces(model.embedding, settings.channels, settings.size)
    return model


def movable(part: tuple[Tensor, Tensor], limit: int) -> tuple[Tensor, Tensor]:
    """Images with nothing but black in the ``limit`` columns at either side, and their labels."""
    images, labels = part
    chosen = (images[..., :limit].flatten(1).amax(1) == 0) & (images[..., -limit:].flatten(1).amax(1) == 0)
    return images[chosen], labels[chosen]


def shifted(images: Tensor, columns: int) -> Tensor:
    """Move images to the right by whole columns; black comes in."""
    width = images.shape[-1]
    return F.pad(images, (max(columns, 0), max(-columns, 0)))[..., max(-columns, 0) : max(-columns, 0) + width]


@torch.no_grad()
def accuracies_at_shifts(
    model: RelativePerformer, images: Tensor, labels: Tensor, settings: PixelGraphs
) -> dict[str, float]:
    """Percent of images classified right at each shift."""
    model.to(settings.device).eval()
    accuracies = {}
    shifts = range(-settings.shift, settings.shift + 1)
    for shift in tqdm(shifts, desc="shifts", leave=False, disable=not settings.progress):
        right = 0
        for some, wanted in zip(shifted(images, shift).split(256), labels.split(256), strict=True):
            logits = model(some.to(settings.device))
            right += int((logits.argmax(1).cpu() == wanted).sum())
        accuracies[str(shift)] = 100 * right / len(images)
    return accuracies


def train(settings: PixelGraphs) -> Outcome:
    """One model, trained and tested, on images where they are and shifted."""
    training, testing = parts(settings)
    learner = Classifier(build(settings), predict, settings)
    batches = tensor_batches(training, settings.batch, settings.seed, device=settings.device)
    outcome = fit(learner, batches, None, tensor_batches(testing, 256, device=settings.device))
    images, labels = movable(testing, settings.shift)
    outcome.more["shiftable"] = len(images)
    if len(images):
        outcome.more["shifts"] = accuracies_at_shifts(learner.model, images, labels, settings)
    return outcome


def accuracy_table(rows: list[Row]) -> str:
    """The paper's Table 1, beside its numbers."""
    paper = published("Relative Performer Table 1")
    header = ["model", "digits", "parameters", *(f"paper, {name}" for name in PAPER)]
    lines = []
    for (position,), group in grouped(rows, "positions").items():
        cells = [mean_and_spread((row.value for row in group), 1), f"{group[0].parameters:,}"]
        lines.append([NAMES[position], *cells, *(paper.get((position, name), "-") for name in PAPER)])
    return markdown(header, lines)


def curves_of(rows: list[Row]) -> dict[str, dict[int, list[float]]]:
    """Accuracies of all seeds by position and shift."""
    curves = {}
    for (position,), group in grouped((row for row in rows if "shifts" in row.more), "positions").items():
        curves[position] = {}
        for row in group:
            for shift, accuracy in sorted((int(shift), accuracy) for shift, accuracy in row.more["shifts"].items()):
                curves[position].setdefault(shift, []).append(accuracy)
    return curves


def shift_table(curves: dict[str, dict[int, list[float]]]) -> str:
    """Accuracy at every shift."""
    shifts = sorted({shift for curve in curves.values() for shift in curve})
    lines = []
    for position, curve in curves.items():
        lines.append([NAMES[position], *(mean_and_spread(curve[s], 1) if s in curve else "-" for s in shifts)])
    return markdown(["shift in pixels", *map(str, shifts)], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """Tables of accuracy, and of accuracy after shifts."""
    tables = {"accuracy": accuracy_table(rows)}
    return tables | ({"shifts": shift_table(curves)} if (curves := curves_of(rows)) else {})


if __name__ == "__main__":
    study.main(PixelGraphs(), PRESETS, __doc__, train, report)
