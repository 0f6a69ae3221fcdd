"""In which quadrant does the nearest of three beacons lie? A choice among distant nodes by where they are.

Three nodes of a square are flagged (data/beacons.py). Every other node predicts the quadrant of the nearest one, as
seen from itself; most are farther away than messages reach. Layers have the same messages, torch_geometric's GATv2Conv,
which sees the offsets of edges, and beside them, at about equal numbers of parameters,

far offsets              RelativeGPSBlock with values="offset", offset="mlp", method="features": 256 random features
far offsets, pairs       the same with method="pairs"
Performer, centred       GPSConv, attn_type="performer", positions from the mean of the graph among the inputs
dense, centred           GPSConv, attn_type="multihead", the same inputs

Every graph of training is seen once. All layers normalise each node by itself, since tests are graphs as in training,
and of 2.5 and 6.25 times the nodes at the same density.

    python examples/studies/beacons.py --models "far offsets" "far offsets, pairs"           # minutes
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from baselines.depot_layers import NodePredictor, relative_layer
from baselines.graph_layers import AttentionLayer, messages
from data.beacons import BEACONS, beacons
from harness import study
from harness.loading import graph_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import at_best_rates, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, parameters
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

TRAINING, VALIDATION, TEST = 48, 49, 50  # seeds of the graphs, which do not depend on the seed of training
TIMES = 1.0, 2.5, 6.25  # the nodes of training
FEATURES = 256  # random features
REACH = 2.0  # near pairs' offsets are divided by it; in the unit of positions
NORM: dict[str, Any] = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}  # graphs of tests are larger
Model = Literal["far offsets", "far offsets, pairs", "Performer, centred", "dense, centred"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeaconsStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "beacons"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    nodes: int = 64
    """of a graph"""
    k: int = 6
    """nearest neighbors of a node"""
    train: int = 3200
    """graphs to train on"""
    held_out: int = 64
    """graphs to choose the epoch and the learning rate on; as many of each test"""
    channels: int = 32
    """width of ours; the others' are chosen for as many parameters"""
    num_layers: int = 2
    heads: int = 4
    """of attention"""
    epochs: int = 1
    batch: int = 8
    learning_rate: float = 0.012
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        for name in ("k", "train", "held_out", "channels", "num_layers", "heads"):
            self.positive(name)
        if self.nodes <= max(BEACONS, self.k):
            raise ValueError(f"--nodes must be more than {BEACONS} beacons and --k {self.k}, got {self.nodes}")
        if self.channels % self.heads:
            raise ValueError(f"{flag('channels')} must divide among {flag('heads')} {self.heads}, got {self.channels}")


PRESETS = {
    "quick": BeaconsStudy(nodes=12, k=3, train=8, held_out=4, channels=8, num_layers=1, heads=2, epochs=1, batch=4),
    "study": BeaconsStudy(seeds=(0, 1, 2), results=study.committed("beacons")),
}


def layer_of(settings: BeaconsStudy) -> Callable[[int], nn.Module]:
    """The constructor of a layer, as a function of its width."""
    (name,), heads = settings.models, settings.heads
    if not name.startswith("far offsets"):
        attention = "performer" if name.startswith("Performer") else "multihead"
        return lambda width: AttentionLayer(width, heads, messages(width, heads, 2), attention, **NORM)
    options = {
        "num_random_features": FEATURES, "cutoff": REACH, "offset": "mlp", "values": "offset",
        "method": "pairs" if "pairs" in name else "features",
    }  # fmt: skip
    return lambda width: relative_layer(width, heads, 2, norm=NORM, **options)


def build(settings: BeaconsStudy) -> NodePredictor:
    """The model, as wide as it takes to have as many parameters as ours by pairs."""
    (name,) = settings.models
    positions = "centred" if "centred" in name else "none"

    def of(width: int) -> NodePredictor:
        side = math.sqrt(settings.nodes)
        return NodePredictor(layer_of(settings), width, settings.num_layers, 2, 4, False, positions, side)

    if name.startswith("far offsets"):
        return of(settings.channels)
    wanted = parameters(build(dataclasses.replace(settings, models=("far offsets, pairs",))))
    widths = range(settings.channels // 2, 2 * settings.channels, settings.heads)
    with torch.random.fork_rng():  # so that weights do not depend on what was tried
        width = min(widths, key=lambda width: abs(parameters(of(width)) - wanted))
    return of(width)


def graphs(settings: BeaconsStudy, count: int, nodes: int, seed: int) -> list[Data]:
    """Graphs of so many nodes; targets ``y`` (N,) are quadrants."""
    found = []
    for pos, flagged, neighbors, quadrants in zip(*beacons(count, nodes, settings.k, seed), strict=True):
        x = torch.stack([torch.ones_like(flagged), flagged], 1).float()
        target = torch.arange(nodes).repeat_interleave(settings.k)
        found.append(Data(x=x, pos=pos, y=quadrants, edge_index=torch.stack([neighbors.flatten(), target])))
    return found


def predict(model: nn.Module, data: Batch) -> tuple[Tensor, Tensor]:
    """Logits and quadrants of the nodes that are asked."""
    asked = data.y >= 0
    return model(data)[asked], data.y[asked]


def sizes(settings: BeaconsStudy) -> list[int]:
    """Nodes of the graphs of each test."""
    return [round(times * settings.nodes) for times in TIMES]


@torch.no_grad()
def measures(model: nn.Module, settings: BeaconsStudy) -> dict[str, float]:
    """Accuracies in percent, of each test."""
    device, found = settings.data_device, {}
    model.to(device).eval()
    for nodes, times in zip(sizes(settings), TIMES, strict=True):
        testing = graph_batches(graphs(settings, max(1, round(settings.held_out / times)), nodes, TEST), 8, device)
        out, target = (torch.cat(part) for part in zip(*(predict(model, d) for d in testing.whole()), strict=True))
        found[f"{times:g} times the nodes"] = 100 * float((out.argmax(1) == target).float().mean())
    return found


def train(settings: BeaconsStudy) -> Outcome:
    """One model, trained and tested."""
    device = settings.data_device
    training = graphs(settings, settings.train, settings.nodes, TRAINING)
    validation, testing = (
        graph_batches(graphs(settings, settings.held_out, settings.nodes, seed), 8, device)
        for seed in (VALIDATION, TEST)
    )
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(learner, graph_batches(training, settings.batch, device, settings.seed), validation, testing)
    return dataclasses.replace(outcome, more=outcome.more | measures(learner.model, settings))


def report(rows: list[Row]) -> dict[str, str]:
    """Accuracies of each model by the size of graphs, at the best learning rate."""
    names = Model.__args__
    rows = sorted(rows, key=lambda row: names.index(row.setting("models")))
    tests, lines = [f"{times:g} times the nodes" for times in TIMES], []
    groups = at_best_rates(rows, "models")
    for (name,), group in groups.items():
        cells = [mean_and_spread((row.more[test] for row in group), 1) for test in tests]
        lines.append([name, *cells, f"{group[0].parameters:,}", f"{group[0].setting('learning_rate'):g}"])
    return {"accuracy": markdown(["model", *tests, "parameters", "learning rate"], lines)}


if __name__ == "__main__":
    study.main(BeaconsStudy(), PRESETS, __doc__, train, report)
