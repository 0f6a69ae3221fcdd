"""Transformers of frames beside plain vision transformers and convolutional networks, after equal processor time.

Digits (``--data`` is a folder with MNIST's test images; by default they are scikit-learn's) or volumes of adrenal
glands (``--data adrenalmnist3d_64.npz``) are turned by any angle: training images anew in every step, those of
validation and test by a rotation of their own. Every run has ``--minutes`` of the processor for its training steps:

frames C4, D4, cube          FrameTransformer, of this width for all group elements together
plain, equal width           a vision transformer as timm's
plain, equal parameters      the same with as many parameters as frames (C4, or the cube for volumes)
CNN                          three plain convolutions
G-CNN C4, D4, cube           five convolutions of escnn, with a pool of 2 pixels after the first and the third
convolutions + frames C4     convolutions of escnn before the blocks of frames (C4, or the cube for volumes)
convolutions + plain         plain convolutions before plain blocks of this width, or, with ", equal parameters" behind
                             it, before blocks with as many parameters as frames

Before blocks stand two convolutions for images and three for volumes, each with a pool of 2 pixels.

Rows have accuracy (AUC for volumes) by time on validation images, and for digits that on larger images: the test images
with a blank border of one and of two patches, a size that no model saw in training.

    python examples/studies/vision_transformers.py --models "frames C4" "plain, equal width" --minutes 0.5
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from baselines.gcnn import GCNN, convolution, gspaces
from baselines.vision_models import GroupStem, PlainTransformer, frames, plain_cnn, stem
from data.turned import adrenal, digits, turned
from harness import study
from harness.loading import Batches, tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Classifier, Outcome, Timed, fit
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from tg_equiattn.groups import cyclic, dihedral, octahedral

Model = Literal[
    "frames C4", "frames D4", "frames cube", "plain, equal width", "plain, equal parameters", "CNN", "G-CNN C4",
    "G-CNN D4", "G-CNN cube", "convolutions + frames C4", "convolutions + frames cube", "convolutions + plain",
    "convolutions + plain, equal parameters",
]  # fmt: skip
GROUPS = {"C4": cyclic(4), "D4": dihedral(4), "cube": octahedral()}
GSPACES = {  # made by a call, for that of the cube takes seconds
    "C4": lambda: gspaces.rot2dOnR2(4), "D4": lambda: gspaces.flipRot2dOnR2(4), "cube": gspaces.octaOnR3,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionTransformers(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "vision_transformers"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("data", "train", "minutes", "learning_rate", "std", "width", "layers")

    models: tuple[Model, ...] = ("frames C4", "plain, equal width", "plain, equal parameters", "G-CNN C4")
    """which to train"""
    data: Path | None = None
    """folder with MNIST's test images, or the file adrenalmnist3d_64.npz"""
    train: int = 7000
    """use only the first of the training images"""
    minutes: float = 15.0
    """processor time of training; the number of epochs follows from the time of a few steps"""
    width: int = 192
    """channels of tokens, for all group elements together"""
    layers: int = 4
    """blocks"""
    std: float | None = None
    """of initial weights of plain transformers; None is sqrt(2 / inputs)"""
    fields: int = 12
    """regular fields of group convolutions, for volumes a sixth; four times as many channels of plain ones"""
    batch: int = 64
    learning_rate: float = 1e-3
    warmup: float = 0.1
    clip: float = 1.0

    @property
    def volumes(self) -> bool:
        return self.data is not None and self.data.suffix == ".npz"

    def check(self) -> None:
        super().check()
        if self.width % 48:
            raise ValueError(f"{flag('width')} must be a multiple of 48, got {self.width}")
        wrong = [name for name in self.models if name.endswith("cube") != self.volumes and "plain" not in name]
        if wrong := [name for name in wrong if name != "CNN"]:
            raise ValueError(f"{flag('models')} must be for {'volumes' if self.volumes else 'images'}, got {wrong}")


PRESETS = {
    "quick": VisionTransformers(
        models=tuple(name for name in Model.__args__ if not name.endswith("cube")), train=64, minutes=0.01, width=48,
        layers=1, fields=2, batch=16,
    ),
    "study": VisionTransformers(
        models=("frames C4", "frames D4", "plain, equal width", "plain, equal parameters", "G-CNN C4",
                "convolutions + frames C4", "convolutions + plain"),
        seeds=(0, 1, 2), results=study.committed("vision_transformers"),
    ),
}  # fmt: skip


def build(settings: VisionTransformers, side: int) -> nn.Module:
    """The model of a single run for images of so many pixels to a side."""
    (name,), dim, patch = settings.models, 3 if settings.volumes else 2, 8 if settings.volumes else 4
    classes, width = (2 if settings.volumes else 10), settings.width
    fields = max(1, settings.fields // 6) if settings.volumes else settings.fields
    kind, _, group = name.rpartition(" ")
    convolutions = 3 if settings.volumes else 2  # before blocks
    if kind == "frames":
        heads = max(1, width // (48 * len(GROUPS[group])))
        return frames(GROUPS[group], classes, width, settings.layers, heads, patch)
    if kind == "G-CNN":
        return GCNN(GSPACES[group](), fields, [convolution] * 4, classes, pools=(0, 2))
    if kind == "convolutions + frames":
        options = {"channels": width // len(GROUPS[group]), "num_layers": settings.layers}
        return GroupStem(GSPACES[group](), fields, convolutions, classes, **options)
    if name == "CNN":
        return plain_cnn(dim, 4 * settings.fields, classes)
    if name.endswith("equal parameters"):
        width = 2 * round(width / len(GROUPS["cube" if settings.volumes else "C4"]) ** 0.5 / 2)
    heads = max(n for n in range(1, max(1, width // 32) + 1) if width % n == 0)
    options = {"classes": classes, "width": width, "layers": settings.layers, "heads": heads, "std": settings.std}
    if name.startswith("convolutions"):
        widths = (4 * settings.fields,) * convolutions
        blocks = PlainTransformer(dim, widths[-1], **options, side=side // 2**convolutions, patch=1)
        return nn.Sequential(stem(dim, widths), blocks)
    return PlainTransformer(dim, 1, **options, side=side // patch, patch=patch)


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


class Learner(Timed, Classifier):
    """Keeps validation by the processor's seconds. AdamW as in training of vision transformers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.curve: list[tuple[float, float]] = []

    def on_validation_end(self) -> None:
        self.curve.append((round(self.seconds, 1), round(float(self.trainer.callback_metrics[self.metric]), 2)))


class Ranker(Learner):
    """Measures the area under the ROC curve in percent, for data that are one batch."""

    metric = "AUC"

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(100 * roc_auc_score(target.cpu(), (out[:, 1] - out[:, 0]).float().cpu()))


def seconds_of_an_epoch(model: nn.Module, batches: Batches) -> float:
    """The processor's seconds, from the second and third step. Weights stay as they are."""
    times = []
    for number, batch in zip(range(3), batches, strict=False):
        start = time.process_time()
        out, target = predict(model, batch)
        torch.autograd.grad(F.cross_entropy(out, target), list(model.parameters()), allow_unused=True)
        times.append(time.process_time() - start if number else np.inf)
    return min(times) * len(batches)


def train(settings: VisionTransformers) -> Outcome:
    """One model, trained and tested."""
    with study.refusing():
        parts = adrenal(settings.data, settings.train) if settings.volumes else digits(settings.data, settings.train)
    training, *held_out = parts
    batches = tensor_batches(
        training, settings.batch, settings.seed, lambda batch, generator: [turned(batch[0], generator), batch[1]],
        settings.device,
    )  # fmt: skip
    model = build(settings, training[0].shape[-1])
    with torch.random.fork_rng():
        epochs = round(60 * settings.minutes / seconds_of_an_epoch(model.to(settings.device), batches))
    chosen = dataclasses.replace(settings, epochs=max(1, epochs))
    learner = (Ranker if settings.volumes else Learner)(model, predict, chosen)
    outcome = fit(learner, batches, *(tensor_batches(part, 500, device=settings.device) for part in held_out))
    outcome.more |= {"curve": learner.curve, "epochs": chosen.epochs}
    if not settings.volumes and settings.models[0].startswith("frames"):
        outcome.more["larger"] = [larger(learner.model, *held_out[1], border) for border in (4, 8)]
    return outcome


@torch.no_grad()
def larger(model: nn.Module, images: Tensor, labels: Tensor, border: int) -> float:
    """Accuracy in percent on images with a blank border of so many pixels."""
    device = next(model.parameters()).device
    right = [
        (model(F.pad(x, [border] * 4).to(device)).argmax(1).cpu() == y).float()
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    return round(100 * float(torch.cat(right).mean()), 2)


def table(rows: list[Row]) -> str:
    """Accuracy at the rates that are best on validation images, by data and time."""
    lines = []
    rows = in_order(rows, models=Model.__args__)
    rows.sort(key=lambda row: (str(row.setting("data")).endswith("npz"), -row.setting("train"), row.setting("minutes")))
    for (name, data, count, minutes), group in at_best_rates(rows, "models", "data", "train", "minutes").items():
        curves = [dict(map(tuple, row.more["curve"])) for row in group]
        quarter = [max(v for s, v in curve.items() if s <= 15 * minutes + min(curve)) for curve in curves]
        cells = [mean_and_spread((row.value for row in group), 1), mean_and_spread(quarter, 1)]
        more = [row.more["larger"] for row in group if "larger" in row.more]
        cells += [" / ".join(f"{x:.1f}" for x in np.mean(more, 0)) if more else "-"]
        settings = [str(group[0].setting("learning_rate")), f"{group[0].parameters:,}", f"{minutes:g}", str(len(group))]
        epochs = f"{np.mean([row.more['epochs'] for row in group]):.0f}"
        what = (
            "scikit-learn's digits" if data is None else "adrenal glands" if data.endswith("npz") else "MNIST's digits"
        )
        lines.append([f"{what}, {count:,}", name, *cells, *settings, epochs])
    head = ["data", "model", "test", "validation after a quarter of the time", "test, larger images", "rate"]
    return markdown([*head, "parameters", "minutes", "seeds", "epochs"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(VisionTransformers(), PRESETS, __doc__, train, report)
