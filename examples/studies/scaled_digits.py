"""Recognise digits at scales that were not seen in training.

scikit-learn's digits on canvases of 10 x 10 pixels, all of one scale, are what networks learn from. In the test whole
canvases are enlarged: by repeating pixels, where features of networks with scales go up one scale when pixels are
doubled, exactly, and smoothly, by bilinear interpolation, where nothing is promised. At about equal numbers of
parameters,

scales                   GroupTransformer on dyadic(3), each scale by itself (scale_window=1)
scales, mixed            the same with windows of three scales
no scales                the same on the trivial group
convolution              3 x 3 convolutions, norm and SiLU, a mean over space
convolution, scales      the same filters at dilations 1, 2 and 4, the greatest logit of the three

Networks with scales are also tested with two scales more than they were trained with.

    python examples/studies/scaled_digits.py --models "no scales" convolution    # some minutes
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import matplotlib
import numpy as np
import torch
from baselines.convolutions import Convolutions
from baselines.gcnn import matched
from data.scaled_digits import Part, repeated, scaled_digits, zoomed
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, parameters
from torch import Tensor

from tg_equiattn.groups import DilationGroup, dyadic, trivial
from tg_equiattn.nn import GroupTransformer
from tg_equiattn.testing import dilation_errors

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REPEATED, ZOOMS = (1, 2, 4), (0.7, 1, 1.5, 2, 3, 4)
MORE = 2  # scales beyond those of training, with which pixels repeated 4 times leave none of theirs out
Model = Literal["scales", "scales, mixed", "no scales", "convolution", "convolution, scales"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledDigits(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "scaled_digits"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    train_images: int = 1200
    """digits to train on; what is left of those that are not for the test tells learning rates apart"""
    test_images: int = 400
    """digits to test on"""
    margin: int = 1
    """empty pixels around a digit"""
    scales: int = 3
    """of the networks with scales"""
    channels: int = 16
    """width of attention networks; convolutions get as many parameters by theirs"""
    blocks: int = 2
    """layers after the first one"""
    heads: int = 4
    """of attention"""
    head_channels: int = 4
    """width of a head"""
    epochs: int = 6
    batch: int = 32
    learning_rate: float = 0.01
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        for name in ("train_images", "test_images", "channels", "blocks", "heads", "head_channels"):
            self.positive(name)
        for name, least in (("scales", 2), ("margin", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{flag(name)} must be at least {least}, got {getattr(self, name)}")
        if (images := self.train_images + self.test_images) > 1700:
            raise ValueError(f"--train-images and --test-images must be 1700 of 1797 at most together, got {images}")


PRESETS = {
    "quick": ScaledDigits(
        train_images=32, test_images=12, scales=2, channels=4, blocks=1, heads=1, head_channels=2, epochs=1, batch=16
    ),
    "study": ScaledDigits(seeds=(0, 1, 2), results=study.committed("scaled_digits")),
}


def build(settings: ScaledDigits, more: int = 0) -> torch.nn.Module:
    """The model of a single run, with so many scales more, where it has any."""
    (name,) = settings.models
    scales = settings.scales + more if has_scales(name) else 1
    if name.startswith("convolution"):
        like = build(dataclasses.replace(settings, models=("scales",)))
        return matched(lambda width: Convolutions(width, 1 + settings.blocks, scales), parameters(like))
    return GroupTransformer(
        dyadic(scales) if has_scales(name) else trivial(2), 1, 10, channels=(settings.channels,) * settings.blocks,
        heads=settings.heads, kernel_size=3, relation="relative", attn_kwargs={
            "head_channels": settings.head_channels, "encoding": "joint",
            "scale_window": {"scales": 1, "scales, mixed": 3}.get(name),
        },
    )  # fmt: skip


def has_scales(name: str) -> bool:
    return name in ("scales", "scales, mixed", "convolution, scales")


def predict(model: torch.nn.Module, batch: Part) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch."""
    return model(batch[0]), batch[1]


@torch.no_grad()
def by_scale(model: torch.nn.Module, images: Tensor, size: int = 50) -> Tensor:
    """Logits of every scale (N, classes, scales), of which the model takes the greatest."""
    return torch.cat([model.classifier(model.features(part)).mean((-2, -1)) for part in images.split(size)])


def percent(right: Tensor) -> float:
    return 100 * float(right.float().mean())


def accuracy_of(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    """Accuracy in percent."""
    return percent(by_scale(model, images).amax(2).argmax(1) == labels)


def on_repeated(model: torch.nn.Module, images: Tensor, labels: Tensor) -> dict[str, dict]:
    """In percent, by how often pixels are repeated: accuracy, predictions that stay those of single pixels, and the
    share of predictions that each scale decides."""
    found: dict[str, dict] = {"repeated": {}, "same": {}, "decided": {}}
    before = None
    for times in REPEATED:
        scores = by_scale(model, repeated(images, times))
        logits, scale = scores.max(2)
        chosen = logits.argmax(1)
        before = chosen if before is None else before
        found["repeated"][str(times)] = percent(chosen == labels)
        found["same"][str(times)] = percent(chosen == before)
        scale = scale.gather(1, chosen[:, None])
        found["decided"][str(times)] = [percent(scale == number) for number in range(scores.shape[2])]
    return found


@torch.no_grad()
def errors(model: torch.nn.Module, images: Tensor) -> list[float]:
    """Relative errors of features where every pixel is doubled, by scale; of a network without scales, whose features
    could only stay as they are, the one of those."""
    group = getattr(model, "group", None) or dyadic(model.scales)
    if isinstance(group, DilationGroup) and group.scales > 1:
        return dilation_errors(model.features, group, images)
    here, there = model.features(images), model.features(repeated(images, 2))
    return [float((there - repeated(here.flatten(1, 2), 2).view_as(there)).abs().max() / here.abs().max())]


def train(settings: ScaledDigits) -> Outcome:
    """One model, trained and tested."""
    (name,) = settings.models
    training, validation, testing = scaled_digits(settings.train_images, settings.test_images, settings.margin)
    here = settings.data_device
    learner = Classifier(build(settings), predict, settings)
    batches = tensor_batches(training, settings.batch, settings.seed, device=here)
    outcome = fit(learner, batches, None, tensor_batches(testing, 50, device=here))
    validation, testing = ([x.to(settings.device) for x in part] for part in (validation, testing))
    model = learner.model.to(settings.device).eval()
    outcome.more |= on_repeated(model, *testing)
    outcome.more["zoomed"] = {f"{zoom:g}": accuracy_of(model, zoomed(testing[0], zoom), testing[1]) for zoom in ZOOMS}
    outcome.more["validation"] = accuracy_of(model, *validation)
    outcome.more["errors"] = errors(model, testing[0][:16])
    if has_scales(name):
        larger = build(settings, MORE).to(settings.device).eval()
        larger.load_state_dict(model.state_dict())
        outcome.more["more scales"] = on_repeated(larger, *testing) | {"errors": errors(larger, testing[0][:16])}
    return outcome


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by model, in the order of the settings, each at the learning rate that validation chooses."""
    return {
        name: chosen_rate(group)
        for name in Model.__args__
        if (group := [r for r in rows if r.setting("models") == name])
    }


def rates_of(rows: list[Row]) -> dict[float, float]:
    """Accuracy on validation data by learning rate, the mean over the seeds that were trained at every one."""
    groups = {rate: group for (rate,), group in grouped(rows, "learning_rate").items()}
    seeds = set.intersection(*({row.setting("seeds") for row in group} for group in groups.values()))
    return {
        rate: float(np.mean([row.more["validation"] for row in groups[rate] if row.setting("seeds") in seeds]))
        for rate in sorted(groups)
    }


def chosen_rate(rows: list[Row]) -> list[Row]:
    """Rows of the learning rate with the highest accuracy on validation data, of equal ones the lowest."""
    rates = rates_of(rows)
    best = max(rates, key=rates.__getitem__)
    return [row for row in rows if row.setting("learning_rate") == best]


def cells(measured: list[dict], what: str) -> list[str]:
    """Mean and spread over runs of what was measured, by zoom."""
    return [mean_and_spread([run[what][zoom] for run in measured], 1) for zoom in measured[0][what]]


def accuracy(rows: list[Row]) -> str:
    """Accuracy at all zooms."""
    lines = []
    for name, group in by_model(rows).items():
        measured = [row.more for row in group]
        lines.append([
            name, *cells(measured, "repeated"), *(cells(measured, "zoomed")[n] for n, f in enumerate(ZOOMS) if f != 1),
            f"{group[0].parameters:,}", f"{np.mean([row.seconds for row in group]):.0f}",
            str(group[0].setting("learning_rate")),
        ])  # fmt: skip
    pixels = ["pixels as they are", *(f"{times} x {times} times" for times in REPEATED[1:])]
    smooth = [f"zoom {factor:g}" for factor in ZOOMS if factor != 1]
    return markdown(["model", *pixels, *smooth, "parameters", "seconds", "learning rate"], lines)


def steps(rows: list[Row]) -> str:
    """What doubling pixels does to features and predictions, with as many scales as in training and with more."""
    lines = []
    for name, group in by_model(rows).items():
        scales = group[0].setting("scales") if has_scales(name) else 1
        for number, path in ((scales, ()), (scales + MORE, ("more scales",))):
            if path and not has_scales(name):
                continue
            measured = [row.more["more scales"] if path else row.more for row in group]
            worst = np.max([values["errors"] for values in measured], 0)
            shares = [np.mean([row["decided"][str(times)] for row in measured], 0) for times in REPEATED]
            lines.append([
                name, str(number), *cells(measured, "repeated"), *cells(measured, "same")[1:],
                *(", ".join(f"{share:.0f}" for share in each) if number > 1 else "-" for each in shares),
                ", ".join(f"{error:.0e}" if error else "0" for error in worst),
            ])  # fmt: skip
    header = [
        "model", "scales in the test", *(f"accuracy, x {times}" for times in REPEATED),
        *(f"predictions as of x 1, x {times}" for times in REPEATED[1:]),
        *(f"decided by scale 1, 2, ..., x {times}" for times in REPEATED), "error of features, by scale",
    ]  # fmt: skip
    return markdown(header, lines)


def rates(rows: list[Row]) -> str:
    """Accuracy on validation data by learning rate."""
    known = sorted({row.setting("learning_rate") for row in rows})
    lines = []
    for name in by_model(rows):
        measured = rates_of([row for row in rows if row.setting("models") == name])
        lines.append([name, *(f"{measured[rate]:.1f}" if rate in measured else "-" for rate in known)])
    return markdown(["model", *map(str, known)], lines)


def draw(rows: list[Row], path: Path) -> None:
    """Accuracy against zoom, one line a model and every run a point."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True, width_ratios=(2, 3))
    for axis, kind, known, title in zip(
        axes, ("repeated", "zoomed"), (REPEATED, ZOOMS), ("pixels repeated", "zoomed smoothly"), strict=True
    ):
        for number, (label, group) in enumerate(by_model(rows).items()):
            values = np.array([list(row.more[kind].values()) for row in group])
            axis.plot(known, values.mean(0), color=f"C{number}", label=label, marker="_", markersize=10)
            axis.plot(known, values.T, ".", color=f"C{number}", alpha=0.4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(known, [f"{zoom:g}" for zoom in known])
        axis.minorticks_off()
        axis.set(xlabel="zoom", title=title)
        axis.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes[0].set(ylabel="test accuracy in percent")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The tables, and a figure of accuracies."""
    draw(rows, folder / "accuracy.png")
    return {"accuracy": accuracy(rows), "steps": steps(rows), "rates": rates(rows)}


if __name__ == "__main__":
    study.main(ScaledDigits(), PRESETS, __doc__, train, report)
