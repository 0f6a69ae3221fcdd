"""Find copied regions: which pixels of a micrograph were copied, rotated or mirrored, and pasted elsewhere in it?

``--data`` is an .npz file of grey images (data/forgeries.py says what is in it); ``--synthetic 20`` draws images
instead. In half of the images a disk or a free shape, 16 to 24 pixels across, is copied, rotated by any angle, mirrored
or not, and pasted, with a soft border; the label is the mask of both places. ``--decoys`` regions from outside of the
image, but of the same micrograph, are pasted in the same way, and one more where nothing is copied, so that traces of
pasting do not tell copies. Then come noise and JPEG. All networks are U-Nets of three levels, at about as many
parameters and after about equal time of training; groups are D4:

U-Net                two convolutions at an eighth of the resolution
G-CNN                the same with group convolutions
CNN + comparison     at a quarter of the resolution, the largest cosines between descriptors of distant pixels
G-CNN + comparison   the same; descriptors are compared at all rotations and mirror images
G-CNN + attention    at a quarter of the resolution, R2GroupAttention by content over all pixels and group elements
SIFT                 scikit-image's keypoints, matched with the image and its mirror image; nothing is trained

Copies are rotated by up to 45 degrees in training (``--copies near``), or by any angle, and half of them mirrored
(``--copies any``). Tests have copies rotated by up to 45 degrees, rotated by more, and mirrored. Each threshold has
the best F1 on validation images, whose copies are as in training. Seconds are processor time of training steps.

    python examples/studies/micrographs.py --data nuclei_256.npz --models "G-CNN + comparison"    # minutes
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from baselines.copy_detectors import Sift, UNet
from baselines.gcnn import matched
from data.forgeries import forgeries, load, synthetic
from harness import study
from harness.loading import Batches, FreshBatches, tensor_batches
from harness.results import Row
from harness.settings import Settings, SettingsError, flag
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Learner, Outcome, Timed, fit, parameters
from torch import Tensor, nn

VALIDATION, TEST = 71, 72  # seeds of images, which do not depend on the seed of training
TESTS = ("near", "rotated", "mirrored")
Model = Literal["U-Net", "G-CNN", "CNN + comparison", "G-CNN + comparison", "G-CNN + attention", "SIFT"]
IMAGES = {"U-Net": 15.0, "G-CNN": 5.2, "CNN + comparison": 7.0, "G-CNN + comparison": 2.6, "G-CNN + attention": 1.0}
"""Images of an epoch, which then takes as long for all networks, in units of ``--train``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Micrographs(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "micrographs"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "copies", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*Settings.MAY_BE_ZERO, "synthetic", "decoys")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    copies: tuple[Literal["near", "any"], ...] = ("near",)
    """copies in training: rotated by up to 45 degrees, or by any angle and half of them mirrored"""
    data: Path | None = None
    """.npz file of images"""
    synthetic: int = 0
    """so many drawn images in place of --data"""
    decoys: int = 1
    """regions of other squares of the same micrograph that are pasted in the same way, and are no copies"""
    side: int = 64
    """pixels a side of the squares that are cut out of images"""
    train: int = 100
    """new images of an epoch of attention; other networks see as many as they train with in equal time"""
    validation: int = 100
    """images to choose weights, rates and thresholds on"""
    test: int = 200
    """images of each test"""
    channels: int = 4
    """fields of the network with attention; others get as many parameters by theirs"""
    descriptors: int = 8
    """fields of compared descriptors"""
    heads: int = 1
    """of attention"""
    head_channels: int = 16
    """width of a head"""
    epochs: int = 30
    batch: int = 4
    learning_rate: float = 0.01
    warmup: float = 0.1

    def check(self) -> None:
        super().check()
        if self.side % 8 or self.side < 64:
            raise ValueError(f"{flag('side')} must be a multiple of 8 and at least 64, got {self.side}")


PRESETS = {
    "quick": Micrographs(
        synthetic=20, train=8, validation=8, test=8, channels=2, descriptors=2, heads=1, head_channels=4, epochs=1,
        batch=4,
    ),
    "study": Micrographs(copies=("near", "any"), seeds=(0, 1, 2), results=study.committed("micrographs")),
}  # fmt: skip


def network(settings: Micrographs, channels: int) -> UNet:
    """The network of a single run."""
    (name,) = settings.models
    middle = name.partition(" + ")[2] or "deeper"
    options = {
        "deeper": {},
        "comparison": {"descriptors": settings.descriptors * (1 if name.startswith("G-CNN") else 8)},
        "attention": {
            "descriptors": settings.descriptors,
            "heads": settings.heads,
            "head_channels": settings.head_channels,
        },
    }[middle]
    return UNet(name.startswith("G-CNN"), channels, middle, **options)


def build(settings: Micrographs) -> UNet:
    """The network of a single run, of as many parameters as that with attention."""
    like = network(dataclasses.replace(settings, models=("G-CNN + attention",)), settings.channels)
    return matched(lambda width: network(settings, width), parameters(like), settings.channels // 2)


def best_f1(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """The largest F1 of any threshold, in percent, and the threshold."""
    ordered, order = scores.flatten().sort(descending=True)
    labels = labels.flatten()
    f1 = 2 * labels[order].cumsum(0) / (torch.arange(1, len(order) + 1, device=labels.device) + labels.sum())
    best = int(f1.argmax())
    return 100 * float(f1[best]), float(ordered[best])


def f1(scores: Tensor, labels: Tensor, threshold: float) -> float:
    """F1 in percent."""
    found = scores.flatten() >= threshold
    right = (found * labels.flatten()).sum()
    return 100 * float(2 * right / (found.sum() + labels.sum()))


def of_images(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the 32 largest logits of each image, and labels of images: true for those with a copy."""
    return logits.flatten(1).topk(32).values.mean(1), masks.amax((1, 2, 3))


class Detector(Timed, Learner):
    """Cross entropy of pixels, measured by their F1 at the best threshold; and the processor's seconds."""

    metric, mode, loss = "F1", "max", staticmethod(F.binary_cross_entropy_with_logits)

    def measure(self, out: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(best_f1(out, target)[0])


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


@torch.no_grad()
def predicted(model: nn.Module, batches: Batches) -> tuple[Tensor, Tensor]:
    """Logits and masks of all images."""
    logits, masks = zip(*(predict(model, batch) for batch in batches), strict=True)
    return torch.cat(logits), torch.cat(masks)


def held_out(settings: Micrographs) -> tuple[np.ndarray, Batches, dict[str, Batches]]:
    """Images to train with, images to validate with, and tests by the kind of copies, of other micrographs each."""
    if settings.data is None and settings.synthetic < 20:
        raise SettingsError(f"{flag('data')} must be a file, or --synthetic at least 20, got {settings.synthetic}")
    images = synthetic(settings.synthetic, 3 * settings.side, 0) if settings.data is None else load(settings.data)
    images = images[np.random.default_rng(0).permutation(len(images))]
    training, validation, testing = np.split(images, [7 * len(images) // 10, 8 * len(images) // 10])

    def batches(images: np.ndarray, count: int, kind: str, seed: int) -> Batches:
        return tensor_batches(
            forgeries(images, count, kind, settings.side, settings.decoys, seed), 50, device=settings.device
        )

    tests = {kind: batches(testing, settings.test, kind, TEST) for kind in TESTS}
    return training, batches(validation, settings.validation, settings.copies[0], VALIDATION), tests


def train(settings: Micrographs) -> Outcome:
    """One model, trained and tested."""
    torch.set_flush_denormal(True)  # softmax over many keys has tiny weights, which are slow on some processors
    training, validation, tests = held_out(settings)
    if settings.models == ("SIFT",):
        model, outcome = Sift(), Outcome("F1", 0.0, 0, 0.0)
    else:
        learner = Detector(build(settings), predict, settings)
        fresh = FreshBatches(
            lambda count, seed: forgeries(training, count, settings.copies[0], settings.side, settings.decoys, seed),
            round(settings.train * IMAGES[settings.models[0]]), settings.batch, settings.seed, settings.device,
        )  # fmt: skip
        outcome = fit(learner, fresh, validation, tests["near"])
        model = learner.model.to(settings.device)
    found = predicted(model, validation)
    chosen = [best_f1(*found), best_f1(*of_images(*found))]
    more: dict[str, Any] = {"validation": chosen[0][0], "pixels": {}, "images": {}}
    for kind, batches in tests.items():
        found = predicted(model, batches)
        more["pixels"][kind] = round(f1(*found, chosen[0][1]), 2)
        more["images"][kind] = round(f1(*of_images(*found), chosen[1][1]), 2)
    return dataclasses.replace(outcome, value=more["pixels"]["near"], more=more)


def table(rows: list[Row]) -> str:
    """F1 of pixels and of images by model, copies in training and its length, at the best learning rates."""
    lines = []
    rows = in_order(rows, models=Model.__args__)
    for (name, copies, epochs), group in at_best_rates(rows, "models", "copies", "epochs").items():
        measured = [
            mean_and_spread((row.more[what][kind] for row in group), 1)
            for what in ("pixels", "images")
            for kind in TESTS
        ]
        trained = ["-"] * 3
        if name != "SIFT":
            seconds = np.mean([row.seconds for row in group])
            trained = [f"{group[0].parameters:,}", f"{seconds:.0f}", str(group[0].setting("learning_rate"))]
        lines.append([name, *(["-"] * 2 if name == "SIFT" else [copies, str(epochs)]), *measured, *trained])
    header = [f"{what}, {kind}" for what in ("pixels", "images") for kind in TESTS]
    return markdown(["model", "trained with", "epochs", *header, "parameters", "seconds", "learning rate"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of F1."""
    return {"f1": table(rows)}


if __name__ == "__main__":
    study.main(Micrographs(), PRESETS, __doc__, train, report)
