"""Tell shapes in boxes of voxels, and mirror images from one another, upright and turned.

Ellipsoids, boxes, cones, tori, and right- and left-handed knots and coils (data/solids.py) in 16 x 16 x 16 voxels. No
rotation takes a knot to its mirror image, so whoever is to name it must be invariant under rotations and not under
reflections. Blocks of 2 x 2 x 2 voxels are averaged, which every model begins with; then come, at about equal numbers
of parameters, lifting and two layers, with windows of 3 x 3 x 3 and, between one and the next, pools of 2 x 2 x 2,

GE-ViT                 attention on the 24 rotations of the cube, relation "relative"
GE-ViT, frames         the same with relation "frame", heads of one channel, an eighth of which look by content
GE-ViT, no rotations   the same on the trivial group
G-CNN                  escnn's R3Conv on the 24 rotations of the cube
G-CNN, no rotations    the same on the trivial group
G-CNN, reflections     the same on all 48 symmetries of the cube, for which mirror images are the same

All models train on shapes that stand upright but for a tilt, and are tested on others

upright   as in training
lattice   the same, each turned by a rotation of the cube
turned    the same, each turned by any rotation

    python examples/studies/solid_shapes.py --models G-CNN "G-CNN, no rotations"    # a minute
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import matplotlib
import numpy as np
import torch
from baselines.gcnn import GCNN, convolution, gspaces, matched
from data.solids import KINDS, shapes, volumes
from harness import study
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import by_model, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, parameters
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from torch import Tensor, nn

from tg_equiattn.groups import octahedral, trivial
from tg_equiattn.nn import GroupTransformer
from tg_equiattn.testing import equivariance_error

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEED = 71  # of the test shapes, which do not depend on the seed of training
TESTS = "upright", "lattice", "turned"
Model = Literal[
    "GE-ViT", "GE-ViT, frames", "GE-ViT, no rotations", "G-CNN", "G-CNN, no rotations", "G-CNN, reflections"
]
FRAMED = "frame", 12, 1  # relation, heads, their width: a value of 24 elements has 24 times the weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolidShapes(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "solid_shapes"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    train: int = 320
    """shapes to train on"""
    test: int = 240
    """shapes of each test"""
    size: int = 16
    """voxels a side of a box"""
    channels: int = 16
    """of GE-ViT; others get as many parameters by theirs"""
    blocks: int = 2
    """layers after lifting"""
    heads: int = 8
    """of attention"""
    head_channels: int = 2
    """width of a head"""
    epochs: int = 8
    batch: int = 8
    learning_rate: float = 0.02
    warmup: float = 0.2
    weight_decay: float = 1e-4

    def check(self) -> None:
        super().check()
        for name in ("train", "test", "channels", "blocks", "heads", "head_channels"):
            self.positive(name)
        if self.size < 1 or self.size % 2 ** (1 + self.blocks):
            raise ValueError(f"{flag('size')} must be a multiple of {2 ** (1 + self.blocks)}, got {self.size}")


PRESETS = {
    "quick": SolidShapes(
        models=Model.__args__[:-1], train=16, test=8, size=8, channels=4, heads=2, head_channels=2, epochs=1,
    ),
    "study": SolidShapes(
        models=("GE-ViT", *Model.__args__[2:]), seeds=(0, 1, 2), results=study.committed("solid_shapes"),
    ),
}  # fmt: skip


def build(settings: SolidShapes, width: int | None = None) -> nn.Module:
    """The model of a single run, of this width or of as many parameters as GE-ViT."""
    (name,) = settings.models
    if width is None:
        like = build(dataclasses.replace(settings, models=("GE-ViT",)), settings.channels)
        if name == "GE-ViT":
            return like
        return matched(lambda width: build(settings, width), parameters(like))
    if name.startswith("GE-ViT"):
        width_of_heads = "relative", settings.heads, settings.head_channels
        relation, heads, head_channels = FRAMED if "frames" in name else width_of_heads
        model = GroupTransformer(
            trivial(3) if "no rotations" in name else octahedral(), 1, len(KINDS), channels=[width] * settings.blocks,
            heads=heads, kernel_size=3, relation=relation, pools=range(settings.blocks),
            attn_kwargs={"head_channels": head_channels, "encoding": "joint"},
        )  # fmt: skip
    else:
        spaces = {"G-CNN": gspaces.octaOnR3, "G-CNN, reflections": gspaces.fullOctaOnR3}
        gspace = spaces.get(name, gspaces.trivialOnR3)()
        model = GCNN(gspace, width, [convolution] * settings.blocks, classes=len(KINDS), pools=range(settings.blocks))
    return nn.Sequential(nn.AvgPool3d(2), model)


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and classes."""
    boxes, labels = batch
    return model(boxes), labels


def turns(count: int) -> dict[str, NDArray | None]:
    """Rotations of the test shapes, (count, 3, 3)."""
    lattice = octahedral()
    others = [g for g in range(len(lattice)) if g != lattice.identity]
    drawn = np.random.default_rng(SEED).choice(others, count)
    anyhow = Rotation.random(count, random_state=SEED).as_matrix()
    return dict(zip(TESTS, (None, lattice.matrices.numpy()[drawn], anyhow), strict=True))


@torch.no_grad()
def confusions(model: nn.Module, settings: SolidShapes) -> dict[str, list[list[int]]]:
    """By test, how many shapes of each kind (rows) were taken for which (columns)."""
    model.to(settings.device).eval()
    solids, labels = shapes(settings.test, SEED)
    found = {}
    for test, turn in turns(settings.test).items():
        batches = tensor_batches([volumes(solids, settings.size, turn)], 16, device=settings.data_device).whole()
        guesses = torch.cat([model(boxes.to(settings.device)).argmax(1).cpu() for (boxes,) in batches])
        pairs = len(KINDS) * labels + guesses
        found[test] = pairs.bincount(minlength=len(KINDS) ** 2).view(len(KINDS), -1).tolist()
    return found


def errors(model: nn.Module, boxes: Tensor) -> dict[str, float]:
    """The worst relative error of logits, over all rotations and over all reflections of the cube."""
    cube = octahedral(reflections=True)
    rotates = cube.matrices.det() > 0
    return {
        name: equivariance_error(model, cube, boxes, elements=part.nonzero().flatten().tolist())
        for name, part in (("rotations", rotates), ("reflections", ~rotates))
    }


def train(settings: SolidShapes) -> Outcome:
    """One model, trained on upright shapes and tested."""
    training, testing = shapes(settings.train, SEED + 1 + settings.seed), shapes(settings.test, SEED)
    boxes, held_out = ([volumes(solids, settings.size), labels] for solids, labels in (training, testing))
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(
        learner, tensor_batches(boxes, settings.batch, settings.seed, device=settings.data_device), None,
        tensor_batches(held_out, 16, device=settings.data_device),
    )  # fmt: skip
    outcome.more["confusions"] = confusions(learner.model, settings)
    outcome.more["errors"] = errors(learner.model, held_out[0][: len(KINDS)].to(settings.device))
    return outcome


def accuracy(row: Row, test: str) -> float:
    """Percent of the shapes that were named right."""
    table = np.array(row.more["confusions"][test])
    return 100 * table.trace() / table.sum()


def handedness(row: Row, test: str) -> float:
    """Percent of the knots taken for knots, and of the coils taken for coils, whose hand was right."""
    table = np.array(row.more["confusions"][test])
    right, all_ = 0, 0
    for first in (KINDS.index("right knot"), KINDS.index("right coil")):
        pair = table[first : first + 2, first : first + 2]
        right, all_ = right + pair.trace(), all_ + pair.sum()
    return 100 * right / max(all_, 1)


def table(rows: list[Row]) -> str:
    """Accuracy of each test, hands told apart, and the errors under the symmetries of the cube."""
    lines = []
    for name, group in by_model(rows, Model.__args__).items():
        cells = [mean_and_spread((accuracy(row, test) for row in group), 1) for test in TESTS]
        cells += [mean_and_spread((handedness(row, test) for row in group), 1) for test in TESTS[::2]]
        worst = [f"{max(row.more['errors'][part] for row in group):.0e}" for part in ("rotations", "reflections")]
        seconds = np.mean([row.seconds for row in group])
        lines.append([name, *cells, *worst, f"{group[0].parameters:,}", f"{seconds:.0f}"])
    header = [
        "model", "upright", "turned, lattice", "turned, any", "hand, upright", "hand, turned",
        "error, 24 rotations", "error, 24 reflections", "parameters", "seconds",
    ]  # fmt: skip
    return markdown(header, lines)


def draw(rows: list[Row], path: Path) -> None:
    """One shape of each kind in slices, upright and turned, and every run's accuracies."""
    figure = plt.figure(figsize=(12, 4.8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(0.55, 1.1))
    solids, labels = shapes(2 * len(KINDS), SEED)
    chosen = [solids[int((labels == kind).nonzero()[0])] for kind in range(len(KINDS))]
    anyhow = turns(len(KINDS))["turned"]
    views = [volumes(chosen, rows[0].setting("size"), turn)[:, 0] for turn in (None, anyhow)]
    axes = above.subplots(2, 3 * len(KINDS))
    for line, (view, word) in enumerate(zip(views, ("upright", "turned"), strict=True)):
        side = view.shape[1]
        for kind, box in enumerate(view):
            for number in range(3):
                axis = axes[line, 3 * kind + number]
                axis.imshow(box[(3 + 2 * number) * side // 10], cmap="gray_r", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
            if line == 0:
                axes[0, 3 * kind + 1].set_title(KINDS[kind], fontsize=9)
        axes[line, 0].set_ylabel(word, fontsize=9)
    groups, axis = by_model(rows, Model.__args__), below.subplots()
    for number, test in enumerate(TESTS):
        for place, group in enumerate(groups.values()):
            values, here = [accuracy(row, test) for row in group], place + 0.25 * (number - 1)
            axis.plot([here] * len(values), values, ".", color=f"C{number}", alpha=0.5)
            label = {"lattice": "turned, lattice", "turned": "turned, any"}.get(test, test)
            axis.plot(here, np.mean(values), "_", color=f"C{number}", ms=14, mew=2, label=None if place else label)
    axis.set_xticks(range(len(groups)), [name.replace(", ", ",\n") for name in groups], fontsize=9)
    axis.set(ylabel="test accuracy in percent")
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The table of accuracies, and its figure."""
    draw(rows, folder / "accuracy.png")
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(SolidShapes(), PRESETS, __doc__, train, report)
