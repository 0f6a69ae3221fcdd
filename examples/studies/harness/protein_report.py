"""Tables and figures of the study of proteins."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import torch
from baselines.protein_models import Model
from data.protein_errors import ALONG, MODES, MOTIONS, SPACE
from data.protein_graphs import FAR, NEAR, UNIT, Graph
from torch import nn

from .results import Row
from .tables import at_best_rates, grouped, markdown, mean_and_spread

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TESTS = "chains", "larger", "complexes", "complexes, without index", "gaps", "gaps, without index"
WAYS = "moved", "turned", "mirrored"


def draw_protein(model: nn.Module, graph: Graph, path: Path) -> None:
    """The first protein of some, with its true and its predicted displacements side by side."""
    here = graph.batch == 0
    with torch.no_grad():
        out = model(graph)[here]
    pos, target, known = UNIT * graph.pos[here], graph.target[here], graph.known[here, 0]
    place = int(graph.mark[here, 0].argmax())
    pos = pos - pos.mean(0)
    axes = torch.linalg.svd(pos, full_matrices=False).Vh  # the longest across the page
    push = graph.push[here][place] @ axes.T
    pos, target, out = (x @ axes.T for x in (pos, target, out))
    top = float(target[known].norm(dim=1).quantile(0.95))
    figure = plt.figure(figsize=(11, 5))
    for number, (title, shown) in enumerate((("true", target), ("predicted", out))):
        axis = figure.add_axes((0.45 * number, 0.02, 0.46, 0.92), projection="3d", computed_zorder=False)
        axis.plot(*pos.T.numpy(), color="0.8", lw=2.5, zorder=1)
        colours = plt.colormaps["viridis"]((shown[known].norm(dim=1) / top).clamp(max=1).numpy())
        for colour, start, arrow in zip(colours, pos[known].numpy(), (9 / top * shown[known]).numpy(), strict=True):
            axis.quiver(*start, *arrow, color=colour, lw=1.8, arrow_length_ratio=0.3, zorder=2)
        axis.scatter(*pos[place].numpy(), color="C3", s=70, depthshade=False, label="pushed residue", zorder=3)
        axis.quiver(*pos[place].numpy(), *(14 * push).numpy(), color="C3", lw=3, label="push", zorder=3)
        axis.view_init(elev=75, azim=-90)
        axis.set_title(f"{title} displacements", y=0.97)
        axis.set_box_aspect(np.ptp(pos.numpy(), axis=0) + 10, zoom=1.1)
        axis.set_axis_off()
    axis.legend(loc="lower right", fontsize="small")
    bar = figure.add_axes((0.93, 0.2, 0.012, 0.6))
    mapped = plt.cm.ScalarMappable(plt.Normalize(0, top), "viridis")
    figure.colorbar(mapped, cax=bar, label="size, root mean square is 1")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def by_epochs(rows: list[Row], task: str) -> dict[tuple[str, int], list[Row]]:
    """The rows of a task by model and epochs, of each those with the learning rate that is best on validation data."""
    groups = at_best_rates([row for row in rows if row.setting("tasks") == task], "models", "epochs")
    order = sorted(groups, key=lambda key: (Model.__args__.index(key[0]), key[1]))
    return {key: groups[key] for key in order}


def of_task(rows: list[Row], task: str) -> dict[str, list[Row]]:
    """The rows of each model's longest training."""
    return {name: group for (name, _), group in by_epochs(rows, task).items()}


def compared(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each model's longest training for the response, and of those half as long."""
    groups = by_epochs(rows, "response")
    longest = dict(groups.keys())  # the epochs of a model's last key
    return {(name, epochs): group for (name, epochs), group in groups.items() if 2 * epochs >= longest[name]}


def response_table(rows: list[Row]) -> str:
    """Errors of each test by model, beyond 8 and beyond 25 angstroms."""
    groups = compared(rows)
    there = {name for group in groups.values() for name in group[0].more["errors"]}
    names = [name for name in TESTS if name in there]
    lines = []
    for (model, epochs), group in groups.items():
        cells = [str(epochs)]
        for name in names:
            found = np.array([row.more["errors"][name]["beyond"] for row in group if name in row.more["errors"]])
            cells += [
                mean_and_spread(column, 3) if found.size else "-" for column in (found.T if found.size else [0, 0])
            ]
        first = group[0]
        seconds = np.mean([row.seconds for row in group])
        lines.append([model, *cells, f"{first.parameters:,}", f"{seconds:.0f}", str(first.setting("learning_rate"))])
    header = [f"{name}, beyond {far:g} Å" for name in names for far in (NEAR, FAR)]
    return markdown(["model", "epochs", *header, "parameters", "seconds", "learning rate"], lines)


def equal_times(rows: list[Row]) -> str:
    """The least validation error of each model within the seconds of the shortest training of Ewald attention."""
    groups = compared(rows)
    ends = {key: np.mean([row.seconds for row in group]) for key, group in groups.items()}
    limits = [seconds for (name, _), seconds in ends.items() if name == "Ewald"][:1]

    def within(row: Row, limit: float) -> float:
        curve = [(row.seconds * epoch / row.setting("epochs"), value) for epoch, value in row.more["curve"]]
        return min((value for seconds, value in curve if seconds <= 1.001 * limit), default=np.nan)

    lines = []
    for (name, epochs), group in groups.items():
        cells = [mean_and_spread((within(row, limit) for row in group), 3) for limit in limits]
        lines.append([name, str(epochs), *cells,
                      mean_and_spread((min(v for _, v in row.more["curve"]) for row in group), 3),
                      f"{ends[name, epochs]:.0f}"])  # fmt: skip
    header = [f"within {limit:.0f} s" for limit in limits]
    return markdown(["model", "epochs", *header, "at its end", "seconds"], lines)


def response_figure(rows: list[Row], path: Path) -> None:
    """Errors along training, by distance in space and by separation along the chain."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for number, (name, group) in enumerate(of_task(rows, "response").items()):
        colour = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        for place, row in enumerate(group):
            epochs, values = zip(*row.more["curve"], strict=True)
            seconds = [row.seconds * epoch / row.setting("epochs") for epoch in epochs]
            axes[0].plot(seconds, values, style, color=colour, alpha=0.8, label=None if place else name)
        for axis, kind, edges in ((axes[1], "space", SPACE), (axes[2], "along", ALONG)):
            middle = [(low * high) ** 0.5 for low, high in itertools.pairwise(edges)]
            means = np.mean([row.more["errors"]["chains"][kind] for row in group], 0)
            axis.plot(middle, means, f"o{style}", color=colour, ms=3)
    axes[0].set(xlabel="seconds of training", ylabel="validation error, of that of zero", xscale="log")
    axes[1].set(xlabel="distance from the push, Å", ylabel="test error, of that of zero")
    axes[2].set(xlabel="residues from the push along the chain", xscale="log")
    for axis in axes:
        axis.axhline(1, color="gray", lw=0.8)
        axis.set(yscale="log")  # of at least this line: small proteins have no residues that count
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def changes_table(rows: list[Row]) -> str:
    """Largest relative changes of outputs in float64 where a complex is moved, turned and mirrored."""
    lines = []
    for name, group in of_task(rows, "response").items():
        lines.append([name, *(f"{max(row.more['changes'][way] for row in group):.0e}" for way in WAYS)])
    return markdown(["model", *WAYS], lines)


def hyena_beside_ewald(rows: list[Row]) -> str:
    """Errors of Ewald attention without and with Hyena after the same number of epochs, and their ratio."""
    groups, names = by_epochs(rows, "response"), ("Ewald", "Ewald + Hyena")
    both = [epochs for name, epochs in groups if (names[0], epochs) in groups and (names[1], epochs) in groups]
    if not both:
        return "Not trained yet."
    pair, lines = [groups[name, max(both)] for name in names], []
    for test in (name for name in TESTS if name in pair[0][0].more["errors"]):
        for place, far in enumerate((NEAR, FAR)):
            without, beside = ([row.more["errors"][test]["beyond"][place] for row in group] for group in pair)
            ratio = f"{np.mean(beside) / np.mean(without):.2f}"
            lines.append([f"{test}, beyond {far:g} Å", mean_and_spread(without, 3), mean_and_spread(beside, 3), ratio])
    return markdown(["test", "Ewald", "Ewald + Hyena", "ratio"], lines)


def binding_table(rows: list[Row]) -> str:
    """Share of the squared displacement left, by size of the motion of a protein."""
    lines, counts = [], []
    for name, group in of_task(rows, "binding").items():
        squares = np.array([row.more["binding"]["squares"] for row in group])  # rows, sizes, (zero, model, modes)
        counts = group[0].more["binding"]["proteins"]
        for title, place in ((name, 1), (f"{MODES} elastic modes, fitted to the answer", 2)):
            shares = [squares[:, :, place].sum(1) / squares[:, :, 0].sum(1)]
            shares += [squares[:, n, place] / squares[:, n, 0] for n in range(len(counts)) if counts[n]]
            line = [title, *(mean_and_spread(share, 3) for share in shares)]
            lines += [line] if place == 1 else []
        fitted = [title, *(f"{share[0]:.3f}" for share in shares)]
    sizes = [
        f"{low:g} to {high:g} Å ({n:.0f})" for low, high, n in zip(MOTIONS, MOTIONS[1:], counts, strict=False) if n
    ]
    zero = ["zero", *["1.000"] * (1 + len(sizes))]
    return markdown(["model", "all", *sizes], [zero, *lines, fitted])


def b_factor_table(rows: list[Row]) -> str:
    """Mean correlation of predicted and measured B-factors of a chain."""
    lines = [
        [name, mean_and_spread((row.value for row in group), 3), f"{group[0].parameters:,}",
         f"{np.mean([row.seconds for row in group]):.0f}"]
        for name, group in of_task(rows, "b-factors").items()
    ]  # fmt: skip
    return markdown(["model", "correlation", "parameters", "seconds"], lines)


def size_table(rows: list[Row]) -> str:
    """Seconds and memory of a training step by number of residues."""
    groups = grouped([row for row in rows if row.setting("tasks") == "size"], "models")
    sizes = sorted({n for (row, *_) in groups.values() for n in row.more["cost"]}, key=int)
    lines = []
    for (name,), (row, *_) in groups.items():
        cells = [row.more["cost"].get(n) for n in sizes]
        lines.append([name, *("-" if cell is None else f"{cell[0]:.1f} s, {cell[1]:,.0f} MiB" for cell in cells)])
    return markdown(["model", *(f"{int(n):,} residues" for n in sizes)], lines)
