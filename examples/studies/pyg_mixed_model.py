"""Mix linear-time attention with relative positions into a PyG model: GPS layers with three kinds of global attention.

A GPS layer (torch_geometric.nn.GPSConv) adds up messages along edges and attention over the whole graph. Its built-in
Performer knows nothing of positions; here RelativePerformerConv takes its place, and the layer stays what it is. The
task needs local structure and what lies where far away: two real digits (scikit-learn's, 8 x 8 pixels) stand side by
side, anywhere on a canvas; which is the one on the left? Bright pixels are nodes, and those that touch are joined by
edges with their offset. Messages along these can tell which two digits there are, but not which of them is on the left,
as no edge leads from one to the other. With ``--edges "near pairs"`` messages of all models pass along the pairs that
our attention knows the offsets of, and these lead across. Compares, at equal depth and about equal numbers of
parameters,

local only              messages alone
Performer               GPSConv as it comes, attn_type="performer"
Performer + positions   the same, with the position on the canvas among the inputs, as is usual with GPS
ours                    attention by RelativePerformerConv
ours, near only         the same without its far part

on places as in training and on places beyond the canvas, and measures how much moving a graph changes the outputs.

    python examples/studies/pyg_mixed_model.py                                  # minutes on two cores
    python examples/studies/pyg_mixed_model.py --edges "near pairs" --models "local only" ours --seeds 0 1 2
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
from baselines.graph_layers import without_far_part
from data.digits import sklearn_digits
from harness import study
from harness.loading import Batches, tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import at_best_rates, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, match_parameters, parameters
from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv, global_mean_pool

SEED = 45  # of the test graphs, which do not depend on the seed of training
BRIGHT = 0.25  # pixels from this on are nodes
BOX = 12, 20  # that holds two digits
REACH = 12  # attention knows the offset of pairs whose Manhattan distance is below it
Model = Literal["local only", "Performer", "Performer + positions", "ours", "ours, near only"]
Edges = Literal["touching", "near pairs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PyGMixedModel(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "pyg_mixed_model"
    SWEEP: ClassVar[tuple[str, ...]] = ("edges", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate",)

    edges: tuple[Edges, ...] = ("near pairs",)
    """what messages pass along: pixels that touch, or the near pairs of our attention"""
    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    canvas: int = 32
    """pixels a side that digits lie on"""
    train_images: int | None = None
    """use only the first of the 1200 training images"""
    test_images: int | None = None
    """use only the first of the 597 test images"""
    channels: int = 32
    """width of models with attention; the one without gets as many parameters by being wider"""
    layers: int = 2
    """GPS layers"""
    heads: int = 4
    """of attention"""
    epochs: int = 12
    batch: int = 32
    learning_rate: float = 0.003

    def check(self) -> None:
        super().check()
        if self.canvas < max(BOX):
            raise ValueError(f"{flag('canvas')} must be at least {max(BOX)}, got {self.canvas}")


PRESETS = {
    "quick": PyGMixedModel(train_images=32, test_images=24, channels=8, heads=2, layers=1, epochs=1, batch=8),
    "study": PyGMixedModel(seeds=(0, 1, 2), results=study.committed("pyg_mixed_model")),
}


class RelativeGPSConv(GPSConv):
    """``GPSConv`` with another global attention, or none: ``attention(x, near_index, pos=, batch=)``."""

    def __init__(self, channels: int, conv: nn.Module, attention: nn.Module | None) -> None:
        super().__init__(channels, conv)
        self.attn = attention  # in place of the built-in one
        if attention is None:
            self.norm2 = None

    def forward(self, x: Tensor, data: Batch) -> Tensor:
        out = self.norm1(x + self.conv(x, data.edge_index, data.edge_attr))
        if self.attn is not None:
            out = out + self.norm2(x + self.attn(x, data.near_index, pos=data.pos, batch=data.batch))
        return self.norm3(out + self.mlp(out))


class BuiltInGPSConv(GPSConv):
    """``GPSConv`` as it comes."""

    def __init__(self, channels: int, conv: nn.Module, heads: int) -> None:
        width = {"head_channels": channels // heads}
        super().__init__(channels, conv, heads, attn_type="performer", attn_kwargs=width)

    def forward(self, x: Tensor, data: Batch) -> Tensor:
        return super().forward(x, data.edge_index, data.batch, edge_attr=data.edge_attr)


class GraphClassifier(nn.Module):
    """GPS layers between a linear map of every node and one of the mean over nodes."""

    def __init__(self, name: str, channels: int, layers: int, heads: int) -> None:
        super().__init__()
        self.positions = name == "Performer + positions"
        self.embed = nn.Linear(3 if self.positions else 1, channels)
        self.layers = nn.ModuleList(_layer(name, channels, heads) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, data: Batch) -> Tensor:
        x = self.embed(torch.cat([data.x, data.pos / REACH], 1) if self.positions else data.x)
        for layer in self.layers:
            x = layer(x, data)
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))


def _layer(name: str, channels: int, heads: int) -> GPSConv:
    perceptron = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
    local = GINEConv(perceptron, edge_dim=2)
    if name == "local only":
        return RelativeGPSConv(channels, local, None)
    if name.startswith("ours"):
        attention = RelativePerformerConv(channels, channels, heads, cutoff=REACH, method="features")
        if name.endswith("near only"):
            without_far_part(attention)
        return RelativeGPSConv(channels, local, attention)
    return BuiltInGPSConv(channels, local, heads)


def build(settings: PyGMixedModel) -> GraphClassifier:
    (name,) = settings.models
    shape = settings.layers, settings.heads
    if name != "local only":
        return GraphClassifier(name, settings.channels, *shape)
    wanted = parameters(GraphClassifier("ours", settings.channels, *shape))
    return match_parameters(lambda channels: GraphClassifier(name, channels, *shape), wanted)


def pairs(batch: list[Tensor], generator: torch.Generator, canvas: int) -> list[Tensor]:
    """Of digits, boxes (B, 1, 12, 20) with each left of another; labels of the left; places (B, 2) on the canvas."""
    images, labels = batch
    others = images[torch.randperm(len(images), generator=generator).to(images.device)]
    boxes = images.new_zeros(len(images), 1, *BOX)
    low, high, gap = (torch.randint(end, (len(images),), generator=generator).tolist() for end in (5, 5, 4))
    for n, (left, right) in enumerate(zip(images, others, strict=True)):
        boxes[n, :, low[n] : low[n] + 8, :8] = left
        boxes[n, :, high[n] : high[n] + 8, 9 + gap[n] : 17 + gap[n]] = right
    rows, columns = (torch.randint(canvas - side + 1, (len(images),), generator=generator) for side in BOX)
    return [boxes, labels, torch.stack([rows, columns], 1).to(images.device)]


def graph(box: Tensor, label: Tensor, place: Tensor, along: Edges = "touching") -> Data:
    """Bright pixels as nodes; edges for messages, with their offsets in units of a usual one, and near pairs for
    attention."""
    bright = box[0] >= BRIGHT
    local = bright.nonzero()
    offsets = local[:, None] - local  # of the source, the row, from the target
    far = offsets.abs()
    near = far.sum(-1) < REACH
    touching, unit = along == "touching", 1 if along == "touching" else REACH / 2
    edges = (far.amax(-1) == 1 if touching else near & (far.sum(-1) > 0)).nonzero().T
    return Data(
        x=box[0][bright][:, None], pos=(local + place).to(box.dtype), y=label, edge_index=edges,
        edge_attr=offsets[edges[0], edges[1]].to(box.dtype) / unit, near_index=near.nonzero().T,
    )  # fmt: skip


def predict(model: nn.Module, batch: list[Tensor], along: Edges = "touching") -> tuple[Tensor, Tensor]:
    """Logits and labels."""
    data = Batch.from_data_list([graph(*one, along) for one in zip(*batch, strict=True)])
    return model(data), data.y


@torch.no_grad()
def moved(model: nn.Module, testing: Batches, settings: PyGMixedModel) -> dict[str, float]:
    """Accuracy in percent where every place lies beyond the canvas, and how much the outputs have changed."""
    model.to(settings.device).eval()
    right, change = 0, 0.0
    for batch in testing.whole():
        boxes, labels, places = (x.to(settings.device) for x in batch)
        here, _ = predict(model, [boxes, labels, places], *settings.edges)
        there, _ = predict(model, [boxes, labels, places + settings.canvas], *settings.edges)
        right += int((there.argmax(1) == labels).sum())
        change = max(change, float((there - here).abs().max() / here.abs().max()))
    return {"elsewhere": 100 * right / testing.length, "change": change}


def train(settings: PyGMixedModel) -> Outcome:
    """One model, trained and tested."""
    images, labels, first, last = sklearn_digits()
    first = first[: settings.train_images]
    kept = len(first) // 6  # to choose the epoch and the learning rate on
    training, validation = ([x[part] for x in (images, labels)] for part in (first[:-kept], first[-kept:]))
    validation = pairs(validation, torch.Generator().manual_seed(SEED + 1), settings.canvas)
    validation = tensor_batches(validation, 200, device=settings.device)
    testing = [x[last[: settings.test_images]] for x in (images, labels)]
    testing = pairs(testing, torch.Generator().manual_seed(SEED), settings.canvas)
    testing = tensor_batches(testing, 200, device=settings.device)

    def augment(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
        return pairs(batch, generator, settings.canvas)

    (along,) = settings.edges
    learner = Classifier(build(settings), functools.partial(predict, along=along), settings)
    training = tensor_batches(training, settings.batch, settings.seed, augment, settings.device)
    outcome = fit(learner, training, validation, testing)
    outcome.more |= moved(learner.model, testing, settings)
    return outcome


def table(rows: list[Row]) -> str:
    """Accuracy, what moving does, and sizes."""
    lines = []
    for (along, name), group in at_best_rates(rows, "edges", "models").items():
        here, elsewhere = [row.value for row in group], [row.more["elsewhere"] for row in group]
        change = max(row.more["change"] for row in group)
        lines.append([
            along, name, mean_and_spread(here, 1), mean_and_spread(elsewhere, 1), f"{change:.1g}",
            f"{group[0].parameters:,}", f"{group[0].setting('learning_rate'):g}",
        ])  # fmt: skip
    header = ["messages along", "GPS with", "accuracy", "beyond the canvas", "largest change by moving", "parameters"]
    return markdown([*header, "rate"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """The table of accuracies."""
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(PyGMixedModel(), PRESETS, __doc__, train, report)
