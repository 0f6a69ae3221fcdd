"""Shapes told from clouds of points: relative positions, or distances alone, against PointNet++ and DGCNN.

Bodies (ellipsoids, boxes, cylinders, cones) and tubes (rings, coils, trefoils, figure eights) of random proportions,
1,024 noisy points on the surface of each (data/surfaces.py). A point's only feature is its distance from the mean of
its cloud; our models see positions through the offsets or the distances of near pairs besides, which bias weights and
are added to values. All models train on shapes that stand upright, turned about their axis, and are tested on others

upright   as in training
turned    by any rotation
shifted   by their own size along every axis
thinner   of half as many points

    python examples/studies/shape_clouds.py                            # minutes on two cores
    python examples/studies/shape_clouds.py --models distance mlp --learning-rate 0.005
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from baselines.point_clouds import DGCNN, PointNet2, edges, from_mean
from data.surfaces import SHAPES, clouds
from harness import study
from harness.figures import points as draw_points
from harness.loading import tensor_batches
from harness.results import Row
from harness.settings import Settings, flag
from harness.tables import grouped, markdown, mean_and_spread
from harness.training import Classifier, Outcome, fit, match_parameters, parameters
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch import Tensor, nn
from torch_geometric.nn import MLP

from tg_equiattn.neighbors import mean_edge_length

SEED = 45  # of the test clouds, which do not depend on the seed of training
Model = Literal["distance", "mlp", "PointNet++", "DGCNN"]
CHANGES = "change", "change in float64"
TESTS = "upright", "turned", "shifted", "thinner"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeClouds(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "shape_clouds"
    SWEEP: ClassVar[tuple[str, ...]] = ("models", "seeds")

    models: tuple[Model, ...] = Model.__args__
    """which to train: ours by their offset, and two from the literature"""
    points: int = 1024
    """of a cloud, a multiple of 32"""
    noise: float = 0.03
    """standard deviation along each axis, in mean distances from the centre"""
    train: int = 800
    """clouds to train on"""
    test: int = 200
    """clouds of each test"""
    neighbors: int = 16
    """nearest points that a point sees, with itself; twice as many where points are fewer, and in PointNet++"""
    channels: int = 32
    """width of our models; the others get as many parameters"""
    heads: int = 2
    """of attention"""
    epochs: int = 3
    batch: int = 4
    learning_rate: float = 0.003

    def check(self) -> None:
        super().check()
        for name in ("train", "test", "neighbors", "channels", "heads", "noise"):
            self.positive(name)
        if self.points % 32 or self.points // 32 < self.neighbors:
            raise ValueError(f"{flag('points')} must be a multiple of 32, and of 32 {flag('neighbors')} at least")
        if self.channels % self.heads:
            raise ValueError(f"{flag('channels')} must divide among {flag('heads')} {self.heads}, got {self.channels}")


PRESETS = {
    "quick": ShapeClouds(points=128, train=16, test=8, neighbors=4, channels=8, heads=2, epochs=1, batch=8),
    "study": ShapeClouds(seeds=(0, 1, 2), results=study.committed("shape_clouds")),
}


class CloudClassifier(nn.Module):
    """Blocks of attention: on all points, on a quarter of them, and two on a sixteenth, where all pairs are near.

    Points that are kept are the first of a cloud. Fewer points have longer pairs, so every block has a cutoff.
    """

    def __init__(self, offset: str, channels: int, heads: int, classes: int, cutoffs: Sequence[float]) -> None:
        super().__init__()
        self.embed = nn.Linear(1, channels)
        attention = {"pos_dim": 3, "offset": offset, "values": "offset", "method": "features"}
        self.blocks = nn.ModuleList(
            RelativeGPSBlock(channels, None, heads, attn_kwargs={**attention, "cutoff": cutoff}) for cutoff in cutoffs
        )
        self.head = MLP([2 * channels, 2 * channels, classes], norm=None)

    def forward(self, positions: Tensor, neighbors: list[Tensor]) -> Tensor:
        """Positions (B, N, 3) and neighbors (B, n, k) of the first n points, for each block -> (B, classes)."""
        count = len(positions)
        x = self.embed(from_mean(positions))
        for block, near in zip(self.blocks, neighbors, strict=True):
            nodes = near.shape[1]
            x, pos = (part[:, :nodes].flatten(0, 1) for part in (x, positions))
            batch = torch.arange(count, device=x.device).repeat_interleave(nodes)
            x = block(x, edges(near, nodes), batch, pos=pos, batch_size=count).unflatten(0, (count, nodes))
        return self.head(torch.cat([x.mean(1), x.amax(1)], 1))


def cutoffs(settings: ShapeClouds) -> list[float]:
    """Twice the mean length of the edges of each block, in the first clouds of the training data."""
    positions, _ = clouds(settings.batch, settings.points, settings.noise, SEED + 1 + settings.seed)
    positions, *neighbors = prepared(positions, dataclasses.replace(settings, models=("mlp",)))
    return [
        2 * mean_edge_length(positions[:, : near.shape[1]].flatten(0, 1), edges(near, near.shape[1]))
        for near in neighbors
    ]


def build(settings: ShapeClouds) -> nn.Module:
    """A model of one name, the baselines with as many parameters as ours."""
    (name,) = settings.models
    shape = settings.channels, settings.heads, len(SHAPES), cutoffs(settings)
    ours = CloudClassifier("mlp", *shape)
    if name in ("distance", "mlp"):
        return CloudClassifier(name, *shape)
    baseline = {"PointNet++": PointNet2, "DGCNN": DGCNN}[name]
    return match_parameters(lambda channels: baseline(channels, len(SHAPES)), parameters(ours))


def farthest_first(positions: Tensor, count: int) -> Tensor:
    """Points (B, N, 3) of each cloud in another order: first ``count``, each as far as can be from those before."""
    rows = torch.arange(len(positions))
    distance = (positions - positions.mean(1, keepdim=True)).square().sum(-1)
    order = []
    for _ in range(count):
        order.append(distance.argmax(1))
        apart = (positions - positions[rows, order[-1]][:, None]).square().sum(-1)
        distance = torch.minimum(distance, apart) if len(order) > 1 else apart
    first = torch.stack(order, 1)
    rest = torch.ones(positions.shape[:2], dtype=torch.bool).scatter(1, first, False).nonzero()[:, 1]
    order = torch.cat([first, rest.view(len(positions), -1)], 1)
    return positions.gather(1, order[..., None].expand(-1, -1, 3))


def nearest(positions: Tensor, centres: int, k: int) -> Tensor:
    """Of the first points of each cloud (B, N, 3) the k nearest, with the point itself, (B, centres, k)."""
    found = [cKDTree(cloud).query(cloud[:centres], k)[1] for cloud in positions.numpy()]
    return torch.from_numpy(np.stack(found))


def prepared(positions: Tensor, settings: ShapeClouds) -> list[Tensor]:
    """Positions and the neighbors of each layer, all in float64.

    Of half as many points half as many are neighbors, which keeps their distances; fewer centres are as many.
    """
    (name,) = settings.models
    points = positions.shape[1]
    counts = points, settings.points // 4, settings.points // 16
    near = [settings.neighbors * points // settings.points, settings.neighbors, settings.neighbors]
    positions = farthest_first(positions, counts[1])
    if name == "PointNet++":
        near = [nearest(positions[:, : counts[n]], counts[n + 1], 2 * near[n]) for n in range(2)]
    elif name == "DGCNN":
        near = [nearest(positions, points, near[0])]
    else:
        near[1:] = [min(2 * near[1], counts[1]), counts[2]]
        near = [nearest(positions[:, :n], n, k) for n, k in zip(counts, near, strict=True)]
        near.append(near[-1])
    return [positions, *near]


def turned_upright(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Each cloud turned about z."""
    positions, *rest = batch
    angle = (2 * math.pi * torch.rand(len(positions), 1, generator=generator)).to(positions.device)
    x, y, z = positions.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return [torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1), *rest]


def tested(settings: ShapeClouds) -> dict[str, list[Tensor]]:
    """Positions, neighbors and labels of each test; the same clouds, but for thinner ones."""
    positions, labels = clouds(settings.test, settings.points, settings.noise, SEED)
    turns = torch.from_numpy(Rotation.random(len(positions), random_state=SEED).as_matrix())
    every = {
        "upright": positions,
        "turned": positions @ turns.mT,
        "shifted": positions + 1,
        "thinner": positions[:, : settings.points // 2],
    }
    return {name: [*prepared(part, settings), labels] for name, part in every.items()}


def predict(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits, in the model's precision, and labels."""
    positions, *neighbors, labels = batch
    return model(positions.to(next(model.parameters()).dtype), neighbors), labels


@torch.no_grad()
def measured(model: nn.Module, tests: dict[str, list[Tensor]], settings: ShapeClouds) -> dict[str, dict[str, float]]:
    """Accuracies in percent, and the largest changes of outputs as shares of the largest output: of all clouds in
    float32, and of the first 32 in float64."""
    model.to(settings.device).eval()
    logits = {}
    for name, part in tests.items():
        batches = tensor_batches(part, 32, device=settings.device).whole()
        logits[name] = torch.cat([predict(model, batch)[0].cpu() for batch in batches])
    accuracy = {name: 100 * float((out.argmax(1) == tests[name][-1]).double().mean()) for name, out in logits.items()}
    model.double()
    exact = {name: predict(model, [x[:32].to(settings.device) for x in tests[name]])[0] for name in TESTS[:3]}
    model.float()
    changes = [
        {name: float((out[name] - out["upright"]).abs().max() / out["upright"].abs().max()) for name in TESTS[1:3]}
        for out in (logits, exact)
    ]
    return {"accuracy": accuracy, "change": changes[0], "change in float64": changes[1]}


def train(settings: ShapeClouds) -> Outcome:
    """One model, trained upright, and tested in all ways."""
    positions, labels = clouds(settings.train, settings.points, settings.noise, SEED + 1 + settings.seed)
    data = [*prepared(positions, settings), labels]
    training = tensor_batches(data, settings.batch, settings.seed, turned_upright, settings.data_device)
    tests = tested(settings)
    testing = tensor_batches(tests["upright"], 32, device=settings.data_device)
    learner = Classifier(build(settings), predict, settings)
    outcome = fit(learner, training, None, testing)
    outcome.more |= measured(learner.model, tests, settings)
    return outcome


def table(rows: list[Row]) -> str:
    """Accuracies of each test, what moving changes, and sizes."""
    lines = []
    for (name,), group in grouped(rows, "models").items():
        cells = [mean_and_spread((row.more["accuracy"][test] for row in group), 1) for test in TESTS]
        changes = [
            " / ".join(f"{max(row.more[change][test] for row in group):.0e}" for change in CHANGES)
            for test in TESTS[1:3]
        ]
        seconds = np.mean([row.seconds for row in group])
        lines.append([label(name), *cells, *changes, f"{group[0].parameters:,}", f"{seconds:.0f}"])
    changes = ["largest change by turning, float32 / float64", "by shifting"]
    return markdown(["model", *TESTS, *changes, "parameters", "seconds"], lines)


def label(name: str) -> str:
    """Ours are known by their offset."""
    return f'ours, offset="{name}"' if name in ("distance", "mlp") else name


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """The table, and a figure."""
    columns: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for test in TESTS:
            columns.setdefault(label(row.setting("models")), {}).setdefault(test, []).append(row.more["accuracy"][test])
    draw_points(columns, folder / "accuracy.png", "accuracy in percent", "", "tested")
    return {"accuracy": table(rows)}


if __name__ == "__main__":
    study.main(ShapeClouds(), PRESETS, __doc__, train, report)
