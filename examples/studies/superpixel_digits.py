"""Classify digits as graphs of about 75 superpixels, whose positions are real numbers, and move and turn the graphs.

Real digits (scikit-learn's, enlarged to 20 x 20 pixels in the middle of 28 x 28, or MNIST's with --data) are cut into
superpixels by SLIC: nodes with a mean intensity and a centroid, joined to their 16 nearest. Where a digit's strokes lie
is in positions alone. Compares, at about equal numbers of parameters,

GATv2, positions        torch_geometric's GATv2Conv, positions among the inputs
Performer, positions    GPSConv as it comes, attn_type="performer", positions among the inputs, offsets at the edges
Performer, offsets      the same without positions among the inputs
PointTransformer        torch_geometric's PointTransformerConv, which sees offsets only
ours                    RelativeGPSBlock: messages without positions, attention that knows the offsets of edges: as a
                        table of rounded ones, an MLP, or their lengths, in weights and ("+ values") in values too
CNN on pixels           of the image itself, which superpixels leave details of out

Tests them on graphs where they were in training; moved by up to 16 pixels, right, left, up or down; and turned by
multiples of 45 degrees about the middle. Positions are moved and turned, so that graphs stay the same graphs (for the
network on pixels, the images). With --turned, training graphs are turned too, by any angle.

    python examples/studies/superpixel_digits.py --models "ours, mlp + values" "Performer, positions"   # some minutes
    python examples/studies/superpixel_digits.py --data ~/mnist --epochs 5
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from baselines.graph_layers import GATLayer, GraphClassifier, PerformerLayer, PixelNetwork, PointTransformerLayer
from data.superpixel_digits import SIDE, graphs
from harness import study
from harness.loading import Batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, match_parameters, parameters
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MLP, GINConv, global_mean_pool

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CENTRE = (SIDE - 1) / 2
UNIT = 4.0  # about the length of an edge, in pixels
TABLE = 12  # offsets of tables are below it, in pixels; longer ones are clipped
SHIFTS, ANGLES = (2, 4, 8, 16), tuple(range(45, 360, 45))
Model = Literal[
    "GATv2, positions", "Performer, positions", "Performer, offsets", "PointTransformer", "ours, table", "ours, mlp",
    "ours, mlp + values", "ours, distance + values", "CNN on pixels",
]  # fmt: skip
OURS = {
    "ours, table": {"offset": "table", "max_distance": TABLE},
    "ours, mlp": {"offset": "mlp", "max_distance": "auto"},
    "ours, mlp + values": {"offset": "mlp", "max_distance": "auto", "values": "offset"},
    "ours, distance + values": {"offset": "distance", "max_distance": "auto", "values": "offset"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperpixelDigits(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "superpixel_digits"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("turned", "learning_rate")

    models: tuple[Model, ...] = (
        "GATv2, positions", "Performer, positions", "Performer, offsets", "PointTransformer", "ours, table",
        "ours, mlp", "ours, mlp + values", "ours, distance + values", "CNN on pixels",
    )  # fmt: skip
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
    """width of models with attention over the whole graph; others get as many parameters by theirs"""
    layers: int = 2
    """of models with attention over the whole graph; twice as many of others on graphs"""
    heads: int = 4
    """of attention"""
    turned: bool = False
    """turn training graphs by any angle"""
    epochs: int = 10
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


class RelativeGPS(nn.Module):
    """``RelativeGPSBlock``s between a linear map of every node's intensity and one of the mean over nodes."""

    def __init__(self, settings: SuperpixelDigits, **attention) -> None:
        super().__init__()
        width = settings.channels
        self.embed, self.head = nn.Linear(1, width), nn.Linear(width, 10)
        self.rounded = attention["offset"] == "table"

        def local() -> GINConv:
            return GINConv(MLP([width, width, width], norm=None))

        blocks = (RelativeGPSBlock(width, local(), settings.heads, **attention) for _ in range(settings.layers))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, data: Batch) -> Tensor:
        x, (source, target) = self.embed(data.x), data.edge_index
        offsets = (data.pos[source] - data.pos[target]).round().clamp(1 - TABLE, TABLE - 1) if self.rounded else None
        attention = self.blocks[0].attention
        pos = None if self.rounded else data.pos
        near = attention.neighbors(data.edge_index, offsets, pos, data.batch, num_nodes=len(x))
        for block in self.blocks:
            x = block(x, data.edge_index, None, data.pos, data.batch, batch_size=data.num_graphs, neighbors=near)
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))


def build(settings: SuperpixelDigits) -> nn.Module:
    (name,) = settings.models
    if name in OURS:
        return RelativeGPS(settings, **OURS[name])
    heads, scale = settings.heads, {"centre": CENTRE, "unit": UNIT}
    if name.startswith("Performer"):
        return GraphClassifier(
            lambda width: PerformerLayer(width, heads), settings.channels, settings.layers,
            positions=name.endswith("positions"), **scale,
        )  # fmt: skip
    wanted = parameters(build(dataclasses.replace(settings, models=("ours, mlp + values",))))
    if name == "CNN on pixels":
        return match_parameters(PixelNetwork, wanted)
    if name == "PointTransformer":
        layer, positions = PointTransformerLayer, False
    else:
        layer, positions = (lambda width: GATLayer(width, heads)), True
    return match_parameters(
        lambda width: GraphClassifier(layer, width, 2 * settings.layers, positions, **scale), wanted
    )


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
    held_out = batches(testing, settings, 200)
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(learner, batches(training, settings, settings.batch, settings.seed), None, held_out)
    outcome.more |= elsewhere(learner.model, held_out, settings)
    return outcome


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by model, and by whether training graphs were turned; where learning rates differ besides, by those."""
    groups: dict[str, list[Row]] = {}
    for (name, turns, rate), group in grouped(rows, "models", "turned", "learning_rate").items():
        label = f"{name}; turned in training" if turns else name
        groups[f"{label}, learning rate {rate}" if label in groups else label] = group
    return groups


def table(rows: list[Row]) -> str:
    """Accuracy where digits were in training, moved and turned, and what moving and turning does to outputs."""
    lines = []
    for name, group in by_model(rows).items():
        accuracies = (
            [row.value for row in group],
            [row.more["shifts"][str(SHIFTS[-1])] for row in group],
            [np.mean([row.more["angles"][str(angle)] for angle in (90, 180, 270)]) for row in group],
            [np.mean(list(row.more["angles"].values())) for row in group],
        )
        changes = (f"{max(row.more['change'][kind] for row in group):.1g}" for kind in ("shifts", "angles"))
        cells = (mean_and_spread(values, 1) for values in accuracies)
        lines.append([name, *cells, *changes, f"{group[0].parameters:,}", str(group[0].setting("learning_rate"))])
    header = [
        "model", "accuracy", f"moved by {SHIFTS[-1]} pixels", "turned by 90, 180, 270 degrees",
        "by all multiples of 45", "largest change by moving", "by turning", "parameters", "learning rate",
    ]  # fmt: skip
    return markdown(header, lines)


def draw(rows: list[Row], path: Path) -> None:
    """Accuracy against shift and against angle, means over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for name, group in by_model(rows).items():
        style = {"linestyle": "-" if name.startswith("ours") else "--", "marker": "o", "markersize": 4}
        for axis, kind in zip(axes, ("shifts", "angles"), strict=True):
            here = np.mean([row.value for row in group])
            keys = sorted(group[0].more[kind], key=int)
            means = [here, *(np.mean([row.more[kind][key] for row in group]) for key in keys)]
            axis.plot([0, *map(int, keys)], means, label=name if kind == "shifts" else None, **style)
    axes[0].set(xlabel="shift in pixels", ylabel="accuracy in percent", ylim=(0, 100), xticks=[0, *SHIFTS])
    axes[1].set(xlabel="turn in degrees", xticks=[0, *ANGLES])
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The table of accuracies, and its figure."""
    draw(rows, folder / "accuracy.png")
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(SuperpixelDigits(), PRESETS, __doc__, train, report)
