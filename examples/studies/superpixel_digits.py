"""Classify digits as graphs of about 75 superpixels, whose positions are real numbers, and move and turn the graphs.

Real digits (scikit-learn's, enlarged to 20 x 20 pixels in the middle of 28 x 28, or MNIST's with --data) are cut into
superpixels by SLIC: nodes with a mean intensity and a centroid, joined to their 16 nearest. Where a digit's strokes lie
is in positions alone. All models have equally many layers and about as many parameters, and the same messages along the
same edges: GATv2Conv, which sees the offset of every edge (in "lengths", its length alone). Beside messages they have

no attention              nothing; also with positions among the inputs
Performer                 GPSConv, attn_type="performer"; also with positions among the inputs, where digits were in
                          training, or moved by up to 16 pixels anew every time
dense                     GPSConv, attn_type="multihead"
ours                      RelativeGPSBlock: attention that knows the offsets of edges by an MLP, in weights and values;
                          with "far offsets" heads also attend to mean offsets of all nodes
far part off              the same, where nodes attend along edges alone
PointTransformer          PointTransformerConv in place of GATv2Conv, no attention
CNN on pixels             of the image itself, which superpixels leave details of out

A fifth of the training images is held out: learning rates and epochs are chosen by it.

Tests them on graphs where they were in training; moved by up to 16 pixels, right, left, up or down; and turned by
45, 90 and 180 degrees about the middle. Positions are moved and turned, so that graphs stay the same graphs (for the
network on pixels, the images). With --turned, training graphs are turned too, by any angle.

    python examples/studies/superpixel_digits.py --models "ours, far offsets" Performer   # some minutes
    python examples/studies/superpixel_digits.py --data ~/mnist --epochs 5
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from baselines.graph_layers import (
    AttentionLayer,
    GraphClassifier,
    LocalLayer,
    PixelNetwork,
    PointTransformerLayer,
    messages,
    without_far_part,
)
from data.superpixel_digits import SIDE, graphs
from harness import study
from harness.loading import Batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import at_best_rates, markdown, mean_and_spread, rates
from harness.training import Classifier, Outcome, fit, match_parameters, parameters
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch import Tensor, nn
from torch_geometric.data import Batch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CENTRE = (SIDE - 1) / 2
UNIT = 4.0  # about the length of an edge, in pixels
TABLE = 12  # offsets of tables are below it, in pixels; longer ones are clipped
SHIFTS, ANGLES = (4, 16), (45, 90, 180)
# of GraphClassifier: lengths in place of offsets, positions among the inputs, which move in training
KNOWS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": True},
    "positions": {"positions": True},
    "moved positions": {"positions": True, "moved": float(SHIFTS[-1])},
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {"offset": "mlp", "method": "pairs"},
    "ours, far offsets": {"offset": "mlp", "values": "offset", "method": "pairs"},
    "ours, far part off": {"offset": "mlp", "values": "offset", "method": "features"},
    "ours, lengths": {"offset": "distance", "values": "offset", "method": "pairs"},
}
MODELS = (
    "no attention", "no attention, positions", "Performer", "Performer, positions", "Performer, moved positions",
    "dense", "PointTransformer", *list(OURS)[:3], "no attention, lengths", "Performer, lengths", "ours, lengths",
    "CNN on pixels",
)  # fmt: skip
Model = Literal[
    "no attention", "no attention, positions", "Performer", "Performer, positions", "Performer, moved positions",
    "dense", "PointTransformer", "ours", "ours, far offsets", "ours, far part off", "no attention, lengths",
    "Performer, lengths", "ours, lengths", "CNN on pixels",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperpixelDigits(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "superpixel_digits"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("turned", "learning_rate")

    models: tuple[Model, ...] = MODELS
    """which to train"""
    data: Path | None = None
    """folder with MNIST's files; by default scikit-learn's digits"""
    train_images: int | None = None
    """use only the first of the training images"""
    test_images: int | None = None
    """use only the first of the test images"""
    segments: int = 75
    """nodes of a graph, about"""
    k: int = 16
    """nearest neighbors of a node"""
    channels: int = 32
    """width of ours; others get as many parameters by theirs"""
    layers: int = 2
    heads: int = 4
    """of attention"""
    turned: bool = False
    """turn training graphs by any angle"""
    epochs: int = 6
    batch: int = 16
    learning_rate: float = 0.01
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        for name in ("train_images", "test_images", "segments", "k", "channels", "layers", "heads"):
            self.positive(name)
        if self.channels % self.heads:
            raise ValueError(f"{flag('channels')} must divide among {flag('heads')} {self.heads}, got {self.channels}")


PRESETS = {
    "quick": SuperpixelDigits(
        train_images=32, test_images=24, segments=20, k=4, channels=8, heads=2, layers=1, epochs=1, batch=8
    ),
    "study": SuperpixelDigits(seeds=(0, 1, 2), results=study.committed("superpixel_digits")),
}


class RelativeGPS(GraphClassifier):
    """``RelativeGPSBlock``s, whose attention shares its near pairs, the edges."""

    def through(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        near = self.layers[0].neighbors(data.edge_index, data.batch, pos=data.pos, num_nodes=len(x))
        for layer in self.layers:
            x = layer(x, data.edge_index, data.batch, edge_attr, data.pos, batch_size=data.num_graphs, neighbors=near)
        return x


def ours(settings: SuperpixelDigits) -> RelativeGPS:
    (name,) = settings.models
    attention, lengths = {"cutoff": UNIT, **OURS[name]}, name.endswith("lengths")

    def layer(width: int) -> RelativeGPSBlock:
        conv = messages(width, settings.heads, 1 if lengths else 2)
        block = RelativeGPSBlock(width, conv, settings.heads, attn_kwargs=attention)
        if name.endswith("off"):
            without_far_part(block.attention)
        return block

    return RelativeGPS(layer, settings.channels, settings.layers, CENTRE, UNIT, lengths=lengths)


def build(settings: SuperpixelDigits) -> nn.Module:
    """The model; those that are not ours as wide as it takes to have as many parameters."""
    (name,) = settings.models
    if name in OURS:
        return ours(settings)
    with torch.device("meta"):
        wanted = parameters(ours(dataclasses.replace(settings, models=("ours, far offsets",))))
    if name == "CNN on pixels":
        return match_parameters(PixelNetwork, wanted)
    kind, _, knows = name.partition(", ")

    def of(kind: str, width: int, **knows: Any) -> GraphClassifier:
        def layer(width: int) -> nn.Module:
            if kind == "PointTransformer":
                return PointTransformerLayer(width, UNIT)
            conv = messages(width, settings.heads, 1 if "lengths" in knows else 2)
            if kind == "no attention":
                return LocalLayer(width, conv)
            return AttentionLayer(width, settings.heads, conv, "performer" if kind == "Performer" else "multihead")

        return GraphClassifier(layer, width, settings.layers, CENTRE, UNIT, **knows)

    counted = "dense" if kind == "Performer" else kind  # PyG's Performer is not built on the meta device
    widths = range(settings.heads, 129, settings.heads)
    with torch.device("meta"):
        width = min(widths, key=lambda width: abs(parameters(of(counted, width)) - wanted))
    return of(kind, width, **KNOWS.get(knows, {}))


def moved(data: Batch, pixels: int) -> Batch:
    """Every graph, and image, right, left, up or down by so many pixels, one after the other."""
    data = copy.copy(data)
    steps = pixels * torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]], device=data.pos.device)
    steps = steps.repeat(-(-data.num_graphs // 4), 1)[: data.num_graphs]
    data.pos = data.pos + steps[data.batch]
    wider = F.pad(data.pixels, 4 * (pixels,))
    moves = zip(wider, steps.tolist(), strict=True)
    data.pixels = torch.stack([image.roll((-up, right), (0, 1)) for image, (right, up) in moves])
    return data


def turned(data: Batch, degrees: Tensor) -> Batch:
    """Every graph, and image, turned about the middle to the left, by an angle of its own (B,)."""
    data = copy.copy(data)
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    turns = torch.stack([cos, -sin, sin, cos], -1).view(-1, 2, 2)
    data.pos = (turns[data.batch] @ (data.pos - CENTRE)[:, :, None])[:, :, 0] + CENTRE
    image = data.pixels[:, None]
    # where pixels come from; rows run down, so a turn to the right of (x right, y down) is one to the left
    grid = F.affine_grid(F.pad(turns, (0, 1)), list(image.shape), align_corners=False)
    data.pixels = F.grid_sample(image, grid, align_corners=False)[:, 0]
    return data


def batches(parts: list, settings: SuperpixelDigits, size: int, seed: int | None = None) -> Batches:
    """Batches of graphs; for training with ``--turned``, each turned by an angle drawn anew."""

    def get(indices: list[int]) -> Batch:
        data = Batch.from_data_list([parts[n] for n in indices]).to(settings.data_device)
        turn = settings.turned and seed is not None
        return turned(data, 360 * torch.rand(data.num_graphs).to(data.pos)) if turn else data

    return Batches(get, len(parts), size, seed)


def predict(model: nn.Module, data: Batch) -> tuple[Tensor, Tensor]:
    """Logits and labels."""
    return model(data), data.y


@torch.no_grad()
def elsewhere(model: nn.Module, testing: Batches, settings: SuperpixelDigits) -> dict[str, dict[str, float]]:
    """Accuracy in percent by shift and by angle, and how much outputs change by the largest and by any of them."""
    model.to(settings.device).eval()
    right: dict[str, dict[str, float]] = {"shifts": {}, "angles": {}}
    change = {"shifts": 0.0, "angles": 0.0}
    for data in testing.whole():
        data = data.to(settings.device)
        here = model(data)
        others = [("shifts", shift, moved(data, shift)) for shift in SHIFTS]
        others += [("angles", angle, turned(data, data.pos.new_full((data.num_graphs,), angle))) for angle in ANGLES]
        for kind, amount, other in others:
            there, counts = model(other), right[kind]
            counts[str(amount)] = counts.get(str(amount), 0) + int((there.argmax(1) == data.y).sum())
            change[kind] = max(change[kind], float((there - here).abs().max() / here.abs().max()))
    percent = {kind: {key: 100 * n / testing.length for key, n in counts.items()} for kind, counts in right.items()}
    return percent | {"change": change}


def train(settings: SuperpixelDigits) -> Outcome:
    """One model, trained and tested."""
    with study.refusing():
        training, testing = graphs(
            settings.data, settings.segments, settings.k, settings.train_images, settings.test_images, settings.progress
        )
    cut = max(1, len(training) // 5)  # in no order of classes
    held_out, testing = batches(training[:cut], settings, 200), batches(testing, settings, 200)
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(learner, batches(training[cut:], settings, settings.batch, settings.seed), held_out, testing)
    outcome.more |= elsewhere(learner.model, testing, settings)
    return outcome


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by model, and by whether training graphs were turned, at the learning rates that validation data choose."""
    groups = at_best_rates(rows, "models", "turned")
    return {f"{name}; turned in training" if turns else name: group for (name, turns), group in groups.items()}


def table(rows: list[Row]) -> str:
    """Accuracy where digits were in training, moved and turned, and what moving and turning does to outputs."""
    lines = []
    for name, group in by_model(rows).items():
        accuracies = (
            [row.value for row in group],
            [row.more["shifts"][str(SHIFTS[-1])] for row in group],
            [np.mean([row.more["angles"][str(angle)] for angle in ANGLES]) for row in group],
        )
        changes = (f"{max(row.more['change'][kind] for row in group):.1g}" for kind in ("shifts", "angles"))
        cells = (mean_and_spread(values, 1) for values in accuracies)
        lines.append([
            name, *cells, *changes, f"{group[0].parameters:,}", f"{group[0].setting('learning_rate'):g}",
            f"{np.mean([row.seconds for row in group]):.0f}",
        ])  # fmt: skip
    header = [
        "model", "accuracy", f"moved by {SHIFTS[-1]} pixels", "turned", "largest change by moving", "by turning",
        "parameters", "rate", "seconds",
    ]  # fmt: skip
    return markdown(header, lines)


def draw(rows: list[Row], path: Path) -> None:
    """Accuracy against shift and against angle, means over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for number, (name, group) in enumerate(by_model(rows).items()):
        style = {"linestyle": "-" if name.startswith("ours") else "--", "marker": "o", "markersize": 4}
        style["color"] = plt.get_cmap("tab20")(number % 20)
        for axis, kind, amounts in zip(axes, ("shifts", "angles"), (SHIFTS, ANGLES), strict=True):
            here = np.mean([row.value for row in group])
            means = [here, *(np.mean([row.more[kind][str(amount)] for row in group]) for amount in amounts)]
            axis.plot([0, *amounts], means, label=name if kind == "shifts" else None, **style)
    axes[0].set(xlabel="shift in pixels", ylabel="accuracy in percent", ylim=(0, 100), xticks=[0, *SHIFTS])
    axes[1].set(xlabel="turn in degrees", xticks=[0, *ANGLES])
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """Tables of accuracies and learning rates, and a figure."""
    rows = sorted(rows, key=lambda row: MODELS.index(row.setting("models")))
    draw(rows, folder / "accuracy.png")
    return {"accuracy": table(rows), "rates": rates(rows, "models", digits=1)}


if __name__ == "__main__":
    study.main(SuperpixelDigits(), PRESETS, __doc__, train, report)
