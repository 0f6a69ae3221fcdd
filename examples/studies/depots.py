"""Where is my depot? Nodes at random places of a square look for a flagged node that is far away.

Every node has one of a few colours and edges to its nearest neighbors, and one node of each colour is flagged
(data/depots.py). All nodes predict their displacement to the flagged node of their colour; or (``--tasks distance``)
how far it is, in graphs that the test turns, where edges have lengths in place of offsets; or (``--tasks nearest``) the
quadrant in which the nearest of three flagged nodes lies, a choice among distant nodes by where they are. Layers have
the same messages, torch_geometric's GATv2Conv, which sees the offsets (lengths) of edges, and beside them, at about
equal numbers of parameters,

far offsets              RelativeGPSBlock with values="offset", offset="mlp" (or "distance"), method="features": 256
                         random features
far offsets, pairs       the same with method="pairs"
far offsets, near only   the same without its far part
content                  the same with values="content": far nodes are seen by content
GATv2                    no attention; twice as many layers
Performer                GPSConv, attn_type="performer", positions among the inputs
Performer, shifts        the same, with random shifts in training
Performer, centred       the same, with positions from the mean of the graph
dense, shifts            GPSConv, attn_type="multihead", positions among the inputs, with random shifts in training
dense, centred           the same, with positions from the mean of the graph
SGFormer, centred        the whole model of torch_geometric, without dropout, positions from the mean of the graph
Polynormer, centred      the same of torch_geometric's Polynormer

Positions among the inputs are turned at random in training where the task is the distance. Tests are graphs as in
training, moved, turned, and of two and four times the nodes at the same density. For the nearest of three, every graph
of training is seen once, layers normalise each node by itself, and graphs have 2.5 and 6.25 times the nodes.

    python examples/studies/depots.py --models "far offsets" Performer           # minutes
    python examples/studies/depots.py --tasks distance --models "far offsets"
    python examples/studies/depots.py --nearest
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from baselines.depot_layers import NodePredictor, Positions, WholeModel, relative_layer
from baselines.graph_layers import AttentionLayer, LocalLayer, messages
from data.depots import BEACONS, depots, nearest_of_three
from harness import study
from harness.loading import graph_batches
from harness.results import Row
from harness.settings import Settings
from harness.tables import at_best_rates, in_order, markdown, mean_and_spread
from harness.training import Classifier, Outcome, Regressor, closest_width, fit, parameters
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.data import Batch, Data

TRAINING, VALIDATION, TEST = 45, 46, 47  # seeds of the graphs, which do not depend on the seed of training
FAR = 100.0  # that test graphs are moved by on both axes
TIMES = 2, 4  # the nodes of training
LARGER = {f"{times} times the nodes": times for times in TIMES}
OF_NEAREST = {f"{times:g} times the nodes": times for times in (1, 2.5, 6.25)}
FEATURES = 256  # random features
REACH = {"displacement": 3.0, "distance": 3.0, "nearest": 2.0}  # near pairs' offsets are divided by it
NODE_NORM: dict[str, Any] = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
Task = Literal["displacement", "distance", "nearest"]
Model = Literal[
    "far offsets", "far offsets, pairs", "far offsets, near only", "content", "GATv2", "Performer",
    "Performer, shifts", "Performer, centred", "dense, shifts", "dense, centred", "SGFormer, centred",
    "Polynormer, centred",
]  # fmt: skip
IN_TASK = {
    "displacement": Model.__args__,
    "distance": (
        "far offsets", "far offsets, pairs", "content", "GATv2", "Performer, centred",
        "dense, shifts",
    ),
    "nearest": ("far offsets", "far offsets, pairs", "Performer, centred", "dense, centred", "SGFormer, centred",
                "Polynormer, centred"),
}  # fmt: skip
OUTPUTS = {"displacement": 2, "distance": 1, "nearest": 4}
POSITIONS: dict[str, Positions] = {"Performer": "as they are", "shifts": "shifted", "centred": "centred"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepotsStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "depots"
    SWEEP: ClassVar[tuple[str, ...]] = ("tasks", "models", "seeds")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs")

    tasks: tuple[Task, ...] = ("displacement",)
    """what to predict"""
    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    nodes: int = 100
    """of a graph"""
    colours: int = 6
    k: int = 8
    """nearest neighbors of a node"""
    train: int = 480
    """graphs to train on"""
    held_out: int = 64
    """graphs to choose the epoch and the learning rate on; as many of each test"""
    channels: int = 64
    """width of ours; the others' are chosen for as many parameters"""
    layers: int = 2
    heads: int = 4
    """of attention"""
    epochs: int = 8
    batch: int = 8
    learning_rate: float = 0.006
    warmup: float = 0.2

    def check(self) -> None:
        super().check()
        if self.nodes < max(self.colours, self.k + 1, BEACONS + 1):
            raise ValueError(
                f"--nodes must be at least --colours {self.colours} and more than --k {self.k}, got {self.nodes}"
            )

    def runs(self) -> Iterator[DepotsStudy]:
        """Some models are not there for all tasks."""
        return (run for run in super().runs() if run.models[0] in IN_TASK[run.tasks[0]])


PRESETS = {
    "quick": DepotsStudy(
        nodes=12, colours=3, k=3, train=8, held_out=4, channels=8, layers=1, heads=2, epochs=1, batch=4
    ),
    "study": DepotsStudy(
        tasks=("displacement", "distance"), seeds=(0, 1, 2), results=study.committed("depots")
    ),
    "nearest": DepotsStudy(
        tasks=("nearest",), seeds=(0, 1, 2), results=study.committed("depots"), nodes=64, k=6, train=3200, channels=32,
        epochs=1, learning_rate=0.012,
    ),
}  # fmt: skip


def layers_of(settings: DepotsStudy) -> tuple[Callable[[int], nn.Module], int]:
    """The constructor of a layer, as a function of its width, and the number of layers."""
    (task,), (name,), heads = settings.tasks, settings.models, settings.heads
    edge_dim = 1 if task == "distance" else 2
    if name == "GATv2":
        return lambda width: LocalLayer(width, messages(width, heads, edge_dim)), 2 * settings.layers
    if name in ("SGFormer, centred", "Polynormer, centred"):
        return lambda width: WholeModel(name.split(",")[0], width), 1
    kind, norm = name.split(",")[0], NODE_NORM if task == "nearest" else {}
    if kind in ("Performer", "dense"):
        attention = "performer" if kind == "Performer" else "multihead"
        return lambda width: AttentionLayer(
            width, heads, messages(width, heads, edge_dim), attention, **norm
        ), settings.layers
    options = {
        "num_random_features": FEATURES, "cutoff": REACH[task], "offset": "distance" if task == "distance" else "mlp",
        "values": "content" if name == "content" else "offset", "method": "pairs" if "pairs" in name else "features",
    }  # fmt: skip
    return lambda width: relative_layer(
        width, heads, edge_dim, "near only" not in name, norm=norm, **options
    ), settings.layers


def build(settings: DepotsStudy) -> NodePredictor:
    """The model, as wide as it takes to have as many parameters as ours by pairs."""
    (task,), (name,) = settings.tasks, settings.models
    layer, count = layers_of(settings)

    def of(width: int) -> NodePredictor:
        return NodePredictor(
            layer, width, count, 2 if task == "nearest" else settings.colours + 1, OUTPUTS[task], task == "distance",
            POSITIONS.get(name.split(", ")[-1], "none"), math.sqrt(settings.nodes),
        )  # fmt: skip

    if name.startswith("far offsets"):
        return of(settings.channels)
    wanted = parameters(build(dataclasses.replace(settings, models=("far offsets, pairs",))))
    widths = range(settings.channels // 2, 2 * settings.channels, settings.heads)
    return of(closest_width(of, wanted, widths))


def graphs(settings: DepotsStudy, count: int, times: float, seed: int) -> list[Data]:
    """Graphs of so many times the nodes; targets ``y`` (N, 2 or 1) in the unit of positions, or quadrants (N,)."""
    (task,) = settings.tasks
    if task == "nearest":
        return beacons(settings, count, round(times * settings.nodes), seed + 3)
    found = []
    drawn = depots(count, round(times * settings.nodes), settings.colours, settings.k, seed)
    for pos, colours, flagged, neighbors, displacements in zip(*drawn, strict=True):
        target = torch.arange(len(pos)).repeat_interleave(settings.k)
        x = torch.cat([one_hot(colours, settings.colours), flagged[:, None]], 1).float()
        y = displacements.norm(dim=1, keepdim=True) if task == "distance" else displacements
        edge_index = torch.stack([neighbors.flatten(), target])
        found.append(Data(x=x, pos=pos, y=y.float(), edge_index=edge_index))
    return found


def beacons(settings: DepotsStudy, count: int, nodes: int, seed: int) -> list[Data]:
    """Graphs of the task of the nearest of three."""
    found = []
    for pos, flagged, neighbors, quadrants in zip(*nearest_of_three(count, nodes, settings.k, seed), strict=True):
        x = torch.stack([torch.ones_like(flagged), flagged], 1).float()
        target = torch.arange(nodes).repeat_interleave(settings.k)
        found.append(Data(x=x, pos=pos, y=quadrants, edge_index=torch.stack([neighbors.flatten(), target])))
    return found


class Scaled(nn.Module):
    """A model whose outputs are in units of the targets' spread, from their mean.

    Args:
        model: of a batch.
        targets: of training, (N, d).
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, model: NodePredictor, targets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", targets.mean(0))
        self.register_buffer("spread", (targets - self.mean).square().mean().sqrt())

    def forward(self, data: Batch) -> Tensor:
        return self.mean + self.spread * self.model(data)


def predict(model: Scaled, data: Batch) -> tuple[Tensor, Tensor]:
    """Predictions and targets, in units of the spread in training."""
    return model(data) / model.spread, data.y / model.spread


def predict_quadrant(model: nn.Module, data: Batch) -> tuple[Tensor, Tensor]:
    """Logits and quadrants of the nodes that are asked."""
    asked = data.y >= 0
    return model(data)[asked], data.y[asked]


def moved(data: Batch) -> Batch:
    """By ``FAR`` on both axes."""
    data = copy.copy(data)
    data.pos = data.pos + FAR
    return data


def turned(data: Batch) -> Batch:
    """Every graph about the corner of its square, by an angle of its own; displacements do not turn along."""
    data = copy.copy(data)
    angles = 2 * math.pi * (torch.arange(data.num_graphs, device=data.pos.device) + 0.5) / data.num_graphs
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(-1, 2, 2)
    data.pos = (turns.to(data.pos)[data.batch] @ data.pos[:, :, None])[:, :, 0]
    return data


@torch.no_grad()
def measures(model: Scaled, settings: DepotsStudy) -> dict[str, float]:
    """Squared errors as shares of the targets' variance about their mean, of each test; and by how much outputs
    change, of their largest, where graphs are moved and turned."""
    (task,) = settings.tasks
    device = settings.device
    model.to(device).eval()
    same: Callable[[Batch], Batch] = copy.copy
    tests = {"as trained": (1, same), "moved": (1, moved)}
    if task == "distance":
        tests["turned"] = 1, turned
    tests |= {name: (times, same) for name, times in LARGER.items()}
    found: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}
    for name, (times, change) in tests.items():
        count = max(1, settings.held_out // times)
        testing = graph_batches(graphs(settings, count, times, TEST), 8, device)
        pairs = [predict(model, change(data)) for data in testing.whole()]
        out, target = (torch.cat(part) for part in zip(*pairs, strict=True))
        found[name] = float((out - target).square().mean() / (target - target.mean(0)).square().mean())
        outputs[name] = out
    here = outputs["as trained"]
    for name in {"moved", "turned"} & outputs.keys():
        found[f"change, {name}"] = float((outputs[name] - here).abs().max() / here.abs().max())
    return found


@torch.no_grad()
def accuracies(model: nn.Module, settings: DepotsStudy) -> dict[str, float]:
    """Accuracies in percent, of each size of the graphs."""
    device, found = settings.device, {}
    model.to(device).eval()
    for name, times in OF_NEAREST.items():
        testing = graph_batches(graphs(settings, max(1, round(settings.held_out / times)), times, TEST), 8, device)
        out, target = (
            torch.cat(part) for part in zip(*(predict_quadrant(model, d) for d in testing.whole()), strict=True)
        )
        found[name] = 100 * float((out.argmax(1) == target).float().mean())
    return found


def train(settings: DepotsStudy) -> Outcome:
    """One model, trained and tested."""
    device = settings.device
    training = graphs(settings, settings.train, 1, TRAINING)
    validation, testing = (
        graph_batches(graphs(settings, settings.held_out, 1, seed), 8, device) for seed in (VALIDATION, TEST)
    )
    if settings.tasks == ("nearest",):
        classifier = Classifier(build(settings), predict_quadrant, settings)
        outcome = fit(classifier, graph_batches(training, settings.batch, device, settings.seed), validation, testing)
        return dataclasses.replace(outcome, more=outcome.more | accuracies(classifier.model, settings))
    model = Scaled(build(settings), torch.cat([graph.y for graph in training]))
    learner = Regressor(model, predict, settings)
    outcome = fit(learner, graph_batches(training, settings.batch, device, settings.seed), validation, testing)
    more = outcome.more | measures(learner.model, settings)
    return dataclasses.replace(outcome, metric="share of the variance", value=more["as trained"], more=more)


def chosen(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by task and label, a model with its epochs where these are not the usual ones, of the best learning rate."""
    groups, rows = {}, in_order(rows, tasks=Task.__args__, models=Model.__args__)
    for (task, name, epochs), group in at_best_rates(rows, "tasks", "models", "epochs").items():
        usual = epochs == (1 if task == "nearest" else DepotsStudy.epochs)
        groups[task, name if usual else f"{name}; {epochs} epochs"] = group
    return groups


def table(rows: list[Row], task: Task) -> str:
    """Shares of the variance that remain in each test, and what moving and turning does to outputs."""
    groups = {label: group for (of, label), group in chosen(rows).items() if of == task}
    tests = ["as trained", "moved", *(["turned"] if task == "distance" else []), *LARGER]
    if task == "nearest":
        tests = list(OF_NEAREST)
    changes = [f"change, {name}" for name in tests if name in ("moved", "turned")]
    lines = []
    for label, group in groups.items():
        cells = [mean_and_spread((row.more[test] for row in group), 1 if task == "nearest" else 4) for test in tests]
        cells += [f"{max(row.more[change] for row in group):.0e}" for change in changes]
        lines.append([label, *cells, f"{group[0].parameters:,}", f"{group[0].setting('learning_rate'):g}"])
    return markdown(["model", *tests, *changes, "parameters", "learning rate"], lines)


def report(rows: list[Row]) -> dict[str, str]:
    """A table for each task."""
    tasks = dict.fromkeys(row.setting("tasks") for row in rows)
    return {task: table(rows, task) for task in tasks}


if __name__ == "__main__":
    study.main(DepotsStudy(), PRESETS, __doc__, train, report)
