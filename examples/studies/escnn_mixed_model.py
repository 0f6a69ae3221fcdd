"""Put group attention into an escnn G-CNN, and see what it does on rotated digits.

The G-CNN is escnn's: 3 x 3 convolutions between regular fields of 4 rotations, norm and ReLU, group pooling. In the
mixed model one of its convolutions is a residual block around R2GroupAttention instead, with a norm in front; its width
is chosen so that both have about the same number of parameters. Data and their rotations are those of
rotated_digits.py, and so is the meaning of locality.

    python examples/studies/escnn_mixed_model.py                               # a minute on two cores
    python examples/studies/escnn_mixed_model.py --rotations 8 --relation relative --seeds 0 1 2
    python examples/studies/escnn_mixed_model.py --data ~/rotmnist --full --device cuda   # rotated MNIST
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from baselines.gcnn import GCNN, convolution, gspaces, matched, nn
from data.rotated_digits import parts
from equivariance_figures import equivariance
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import grouped, markdown, mean_and_spread, published
from harness.training import Classifier, Outcome, fit, parameters
from rotated_digits import predict
from tg_equiattn.integrations.escnn import R2GroupAttention

Model = Literal["G-CNN", "G-CNN + attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EscnnMixedModel(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "escnn_mixed_model"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "heads", "locality", "seeds")

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    rotations: int = 4
    """of the group of all layers"""
    size: int = 16
    """pixels a side that scikit-learn's digits are enlarged to, even; those of --data have 28"""
    train_images: int | None = None
    """use only the first of the training images"""
    data: Path | None = None
    """folder with the rotated MNIST files (.amat)"""
    channels: int = 8
    """regular fields of every layer of the G-CNN; the mixed model's follow from the number of parameters"""
    convolutions: int = 3
    """3 x 3 convolutions of the G-CNN, the first of which lifts the image"""
    attention: int = 3
    """which of the convolutions is attention in the mixed model, counted from 1; the first one cannot be"""
    heads: tuple[int, ...] = (8,)
    """of the attention"""
    head_channels: int | None = 3
    """width of a head; None is half the fields"""
    kernel_size: int = 3
    """odd window of the attention; 0 is global"""
    relation: Literal["ge_vit", "gsa", "lifted", "relative"] = "ge_vit"
    """of the group encoding"""
    locality: tuple[float | None, ...] = (4.0,)
    """strength by which heads start at places of their own; None is without"""
    encoding: Literal["axial", "joint"] = "joint"
    """of positions: a table for rows and one for columns, one for both, or one for positions and group elements"""
    epochs: int = 8
    """passes over the training images"""
    batch: int = 16
    """images of one step, over all devices together"""
    learning_rate: float = 0.02
    """of Adam, at the start"""
    weight_decay: float = 1e-4
    """of Adam"""

    def check(self) -> None:
        super().check()
        for name in ("rotations", "size", "train_images", "channels", "head_channels"):
            self.positive(name)
        if min(self.heads) < 1:
            raise ValueError(f"--heads must be positive, got {list(self.heads)}")
        if self.size % 2:
            raise ValueError(f"--size must be even (the models pool 2 x 2), got {self.size}")
        if self.kernel_size < 0 or (self.kernel_size and self.kernel_size % 2 == 0):
            raise ValueError(f"--kernel-size must be odd, or 0, got {self.kernel_size}")
        if self.convolutions < 2:
            raise ValueError(f"--convolutions must be 2 or more, got {self.convolutions}")
        if not 2 <= self.attention <= self.convolutions:
            raise ValueError(f"--attention must be from 2 to {self.convolutions}, got {self.attention}")
        if self.patience and not self.data:
            raise ValueError("--patience needs validation data, which only --data has")

    def runs(self) -> Iterator[EscnnMixedModel]:
        """Those of the G-CNN once: it has no heads."""
        seen = []
        for run in super().runs():
            if run.models == ("G-CNN",):
                run = dataclasses.replace(run, heads=self.heads[:1], locality=self.locality[:1])
            if run not in seen:
                seen.append(run)
                yield run


PRESETS = {
    "quick": EscnnMixedModel(
        train_images=32, size=8, channels=4, convolutions=2, attention=2, heads=(1,), kernel_size=3, epochs=1,
        batch=8,
    ),
    "study": EscnnMixedModel(
        seeds=(0, 1, 2, 3, 4), heads=(2, 4, 8), size=12, results=study.committed("escnn_mixed_model"),
    ),
    "full": EscnnMixedModel(
        seeds=(0, 1, 2, 3, 4), rotations=8, size=28, channels=20, convolutions=7, attention=4, heads=(9,), epochs=100,
        batch=64, learning_rate=0.001,
    ),
}  # fmt: skip


class ResidualAttention(nn.EquivariantModule):
    """x + attention(norm(x)), between regular fields."""

    def __init__(self, fields: nn.FieldType, settings: EscnnMixedModel) -> None:
        super().__init__()
        self.in_type = self.out_type = fields
        self.norm = nn.InnerBatchNorm(fields)
        self.attention = R2GroupAttention(
            fields, fields, heads=settings.heads[0], head_channels=settings.head_channels,
            kernel_size=settings.kernel_size or None, relation=settings.relation, locality=settings.locality[0],
            encoding=settings.encoding, window_shape="square",
        )  # fmt: skip

    def forward(self, x: nn.GeometricTensor) -> nn.GeometricTensor:
        return x + self.attention(self.norm(x))

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape


def build(settings: EscnnMixedModel) -> GCNN:
    """The model of a single run."""
    gspace, layers = gspaces.rot2dOnR2(settings.rotations), [convolution] * (settings.convolutions - 1)
    plain = GCNN(gspace, settings.channels, layers)
    if settings.models == ("G-CNN",):
        return plain
    layers[settings.attention - 2] = lambda fields: ResidualAttention(fields, settings)
    # half the width is the attention's head, which the axial encoding splits in three
    return matched(lambda width: GCNN(gspace, width, layers), parameters(plain), 6)


def train(settings: EscnnMixedModel) -> Outcome:
    """One model, trained and tested, and the equivariance error of its features."""
    training, validation, testing = parts(settings)
    held_out = [part and tensor_batches(part, 256, device=settings.data_device) for part in (validation, testing)]
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(
        learner, tensor_batches(training, settings.batch, settings.seed, device=settings.data_device), *held_out
    )
    images = testing[0][:8].to(next(learner.model.parameters()).device)
    outcome.more |= equivariance(learner.model, images) | {"width": learner.model.classifier.in_features}
    return outcome


def label(row: Row) -> str:
    """The model, with what the attention has."""
    name = row.setting("models")
    if name == "G-CNN":
        return name
    heads, without = row.setting("heads"), row.setting("locality") is None
    return f"{name}, {heads} head{'s' if heads > 1 else ''}{', no locality' if without else ''}"


def table(rows: list[Row]) -> str:
    """Accuracy, size and equivariance error of each model."""
    paper = published("GE-ViT Table 4")
    header = [
        "model",
        "accuracy",
        "fields",
        "parameters",
        "seconds",
        "max error / max feature",
        "GE-ViT paper, rotMNIST",
    ]
    lines = []
    for (name, _, _), group in grouped(rows, "models", "heads", "locality").items():
        errors = [row.more["max error"] for row in group if "max error" in row.more]
        known = paper.get(("C4 G-CNN", "accuracy"), "-") if name == "G-CNN" else "-"
        lines.append([
            label(group[0]), mean_and_spread(row.value for row in group), str(group[0].more["width"]),
            f"{group[0].parameters:,}", f"{np.mean([row.seconds for row in group]):.0f}",
            f"{max(errors):.1e}" if errors else "-", known,
        ])  # fmt: skip
    return markdown(header, lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of accuracies."""
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(EscnnMixedModel(), PRESETS, __doc__, train, report)
