"""Tell the greater of two digits that lie far apart on a canvas, and turn the canvas.

Two of scikit-learn's digits, of different classes, lie on a canvas of 32 x 32 pixels with at least 14 empty rows or
columns between them. Networks score every cell of 4 x 4 pixels; a digit's score is the mean over its cells. No cell of
a digit sees the other through convolutions and windows of these networks, so that with those the answer can only be
guessed from the digit itself. After escnn's 3 x 3 convolutions (and pools of 2 x 2) comes, at about equal numbers of
parameters,

window attention         R2AttentionBlock, which ends where its window does
global attention         the same around R2GlobalAttention, linear in the number of pixels
global, starting near    the same, with all heads near at the start; else every second one starts far
global, no rotations     global attention, and convolutions, of the trivial group; all others have 4 rotations
exact attention          the block with an infinite window, and no heads with places of their own (slow; named
                         in no preset but --quick)
G-CNN                    one more convolution
G-CNN + mean             the same, and a linear map of the mean of its input over all pixels

Canvases are upright in training, and turned by multiples of 90 degrees in the test.

    python examples/studies/far_digits.py --models "window attention" "global attention"    # some minutes
"""

from __future__ import annotations

import dataclasses
from statistics import mean
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from baselines.gcnn import GCNN, convolution, gspaces, matched, nn
from data.far_digits import Canvases, far_digits, from_one_digit, turned
from harness import study
from harness.loading import Batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, parameters
from tg_equiattn.integrations.escnn import R2AttentionBlock, R2GlobalAttention, R2GroupAttention
from torch import Tensor

from tg_equiattn.nn import GlobalGroupAttention

ANGLES = (0, 90, 180, 270)
Model = Literal[
    "window attention", "global attention", "global, starting near", "global, no rotations", "exact attention", "G-CNN",
    "G-CNN + mean",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarDigits(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "far_digits"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    models: tuple[Model, ...] = tuple(name for name in Model.__args__ if name != "exact attention")
    """which to train"""
    train_images: int = 2000
    """canvases to train on"""
    validation_images: int = 500
    """canvases to choose learning rates on"""
    test_images: int = 1000
    """canvases to test on"""
    size: int = 32
    """pixels a side of a canvas"""
    gap: int = 14
    """empty rows or columns between digits, at least"""
    channels: int = 16
    """regular fields of the networks with global attention; others get as many parameters by theirs"""
    blocks: int = 1
    """layers after the convolutions that all networks have"""
    heads: int = 4
    """of attention"""
    head_channels: int = 4
    """width of a head"""
    num_features: int = 16
    """random features of global attention"""
    kernel_size: int = 3
    """odd windows"""
    norm: Literal["batch", "layer"] = "batch"
    """of attention blocks; global, over the image, would tell every pixel something of all others"""
    epochs: int = 6
    batch: int = 16
    learning_rate: float = 0.02
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        if self.size % 4 or self.size < 16 + self.gap:
            raise ValueError(f"{flag('size')} must be a multiple of 4 and at least {16 + self.gap}, got {self.size}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{flag('kernel_size')} must be odd, got {self.kernel_size}")
        # in pixels: what a digit's last cell has beside it, the layers on cells, the convolutions before the pools
        reach = 3 + 4 * (1 + self.blocks * max(1, self.kernel_size // 2)) + 3
        if self.gap < reach:
            raise ValueError(f"{flag('gap')} must be at least {reach}, which windows do not bridge, got {self.gap}")


PRESETS = {
    "quick": FarDigits(
        models=Model.__args__, train_images=32, validation_images=12, test_images=12, channels=4, heads=2,
        head_channels=2, num_features=4, epochs=1, batch=8,
    ),
    "study": FarDigits(seeds=(0, 1, 2), results=study.committed("far_digits")),
}  # fmt: skip


class DenseGCNN(GCNN):
    """A ``GCNN`` that classifies every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).amax(2).movedim(1, -1)).movedim(-1, 1)


class WithMean(nn.EquivariantModule):
    """A convolution, plus a linear map of the mean over all pixels."""

    def __init__(self, fields: nn.FieldType) -> None:
        super().__init__()
        self.in_type = self.out_type = fields
        self.near, self.far = convolution(fields), nn.R2Conv(fields, fields, kernel_size=1, bias=False)

    def forward(self, x: nn.GeometricTensor) -> nn.GeometricTensor:
        mean = self.far(nn.GeometricTensor(x.tensor.mean((2, 3), keepdim=True), x.type))
        near = self.near(x)
        return nn.GeometricTensor(near.tensor + mean.tensor, near.type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape


def build(settings: FarDigits, width: int | None = None) -> torch.nn.Module:
    """The model of a single run, of this width or of as many parameters as global attention."""
    (name,) = settings.models
    if width is None:
        like = build(dataclasses.replace(settings, models=("global attention",)), settings.channels)
        return matched(lambda width: build(settings, width), parameters(like), settings.channels // 2)
    gspace = gspaces.trivialOnR2() if name == "global, no rotations" else gspaces.rot2dOnR2(4)
    layer = {"G-CNN": convolution, "G-CNN + mean": WithMean}.get(name, lambda fields: attention(fields, settings))
    model = DenseGCNN(gspace, width, [convolution, convolution, *settings.blocks * [layer]], classes=2, pools=(0, 1))
    if name == "global, starting near":
        for module in model.modules():
            if isinstance(module, GlobalGroupAttention):
                torch.nn.init.zeros_(module.far_bias)
    return model


def attention(fields: nn.FieldType, settings: FarDigits) -> R2AttentionBlock:
    """The block of a network with attention."""
    (name,) = settings.models
    options: dict[str, Any] = {
        "heads": settings.heads, "head_channels": settings.head_channels, "relation": "relative",
        "kernel_size": settings.kernel_size, "encoding": "joint",
    }  # fmt: skip
    if name == "exact attention":
        options |= {"kernel_size": None, "locality": None}  # places of their own would keep heads near
    if name.startswith("global"):
        layer: Any = R2GlobalAttention(fields, fields, num_random_features=settings.num_features, **options)
    else:
        layer = R2GroupAttention(fields, fields, **options)
    return R2AttentionBlock(layer, norm=settings.norm)


def batches(canvases: Canvases, settings: FarDigits, size: int, seed: int | None = None) -> Batches:
    here = Canvases(*(x.to(settings.device) for x in canvases))
    return Batches(lambda indices: Canvases(*(x[indices] for x in here)), len(here.images), size, seed)


def predict(model: torch.nn.Module, batch: Canvases) -> tuple[Tensor, Tensor]:
    """Logits (2 B, 2), each the mean over a digit's pixels, and labels (2 B,)."""
    scores = model(batch.images)
    masks = F.adaptive_avg_pool2d(batch.masks, scores.shape[2:])
    logits = torch.einsum("bchw,bdhw->bdc", scores, masks) / masks.sum((2, 3))[..., None]
    return logits.flatten(0, 1), batch.labels.flatten()


@torch.no_grad()
def elsewhere(model: torch.nn.Module, testing: Batches, settings: FarDigits) -> dict[str, dict[str, float] | float]:
    """Accuracy in percent by angle, and how much outputs change by turning, by the largest of them."""
    model.to(settings.device).eval()
    right, change = dict.fromkeys(map(str, ANGLES), 0), 0.0
    for batch in testing.whole():
        batch = Canvases(*(x.to(settings.device) for x in batch))
        here, _ = predict(model, batch)
        for quarters, angle in enumerate(right):
            there, labels = predict(model, turned(batch, quarters))
            right[angle] += int((there.argmax(1) == labels).sum())
            change = max(change, float((there - here).abs().max() / here.abs().max()))
    return {"angles": {key: 100 * n / (2 * testing.length) for key, n in right.items()}, "change": change}


def train(settings: FarDigits) -> Outcome:
    """One model, trained and tested."""
    counts = settings.train_images, settings.validation_images, settings.test_images
    training, *others = far_digits(*counts, settings.size, settings.gap)
    validation, testing = (batches(canvases, settings, 100) for canvases in others)
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(learner, batches(training, settings, settings.batch, settings.seed), validation, testing)
    outcome.more |= elsewhere(learner.model, testing, settings)
    outcome.more["from one digit"] = from_one_digit(training, others[1])
    return outcome


def on_upright(row: Row) -> float:
    """Accuracy on upright canvases, counted as that on turned ones is."""
    return row.more["angles"]["0"]


def on_turned(row: Row) -> float:
    """Accuracy, the mean over canvases turned by 90, 180 and 270 degrees."""
    return mean(row.more["angles"][str(angle)] for angle in ANGLES[1:])


def table(rows: list[Row]) -> str:
    """Accuracy on upright and on turned canvases, and what turning does to outputs, at the best learning rates."""
    lines = []
    for (name,), group in at_best_rates(in_order(rows, models=Model.__args__), "models").items():
        cells = [mean_and_spread(values, 1) for values in (map(on_upright, group), map(on_turned, group))]
        change = f"{max(row.more['change'] for row in group):.1g}"
        lines.append([name, *cells, change, f"{group[0].parameters:,}", str(group[0].setting("learning_rate"))])
    guess = f"{rows[0].more['from one digit']:.1f}"
    lines.append(["best guess from one digit", guess, guess, "-", "-", "-"])
    header = [
        "model", "accuracy", "turned by 90, 180, 270 degrees", "largest change by turning", "parameters",
        "learning rate",
    ]  # fmt: skip
    return markdown(header, lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of accuracies."""
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(FarDigits(), PRESETS, __doc__, train, report)
