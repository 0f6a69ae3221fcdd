"""Draw docs/_static/front_page.png, the README's figure: three plots of cells of the tables in examples/results."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "examples" / "results"


def cells(name: str, *row: str) -> dict[str, str]:
    """A row of a table by column: the one that has these cells."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    (found,) = [line for line in rows if all(cell in line for cell in row)]
    return dict(zip(header, found, strict=True))


def number(cell: str) -> float:
    """The first number of a cell, which is the mean."""
    return float(re.findall(r"[\d.]+", cell.replace(",", ""))[0])


def lines(
    axis, table: str, row: tuple[str, ...], names: dict[str, str], columns: dict[str, float]
) -> None:
    """Rows of a table, by name, against a number for each column; cells without a number are left out."""
    for name, label in names.items():
        found = cells(table, *row, name)
        there = {x: number(found[column]) for column, x in columns.items() if found[column] != "-"}
        style = "o-" if "(ours)" in label else "s--"
        axis.plot(list(there), list(there.values()), style, label=label, markersize=6, linewidth=2)


def draw(path: Path) -> None:
    """The figure of three plots with one message each, to this file."""
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 11}):
        figure, (pair, nodes, boxes) = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")

        columns = {f"{n} cells": n for n in (2, 4, 6)}
        names = {"relative": "attention, relative (ours)", "frames": "attention, frames (ours)"}
        names |= {"G-CNN + mean": "group CNN", "deep G-CNN + mean": "group CNN, 4 layers"}
        lines(pair, "matching/accuracy", (), names, columns)
        pair.set(title="Which two patterns are equal?\nAttention compares content", ylim=(0, 104))
        pair.set(xlabel="patterns in the image", ylabel="accuracy, %", xticks=[2, 4, 6])

        columns = {"as trained": 1, "2 times the nodes": 2, "4 times the nodes": 4}
        names = {
            "far offsets, pairs": "far offsets, pairs (ours)",
            "dense, centred": "dense attention",
        }
        names |= {"Performer, centred": "PyG's Performer", "GATv2": "GATv2, messages alone"}
        lines(nodes, "depots/displacement", (), names, columns)
        nodes.set(
            title="Where is the far node I look for?\nOffsets carry over to larger graphs",
            yscale="log",
        )
        nodes.set(xlabel="nodes, times those of training", ylabel="share of the variance left")

        columns = {"field or force": 1, "field or force, 2 times the charges": 2}
        columns |= {f"field or force, {n} times": n for n in (4, 8)}
        names = {
            "EwaldAttention": "Ewald attention (ours)",
            "Ewald message passing": "Ewald message passing",
        }
        names |= {"all pairs": "messages along all pairs", "none": "near messages alone"}
        lines(boxes, "long_range/errors", ("forces",), names, columns)
        boxes.set(
            title="Forces on charges in larger boxes\nEwald attention has the smallest error",
            yscale="log",
        )
        boxes.set(xlabel="charges, times those of training", ylabel="share of the variance left")
        for axis, ticks in ((nodes, (1, 2, 4)), (boxes, (1, 2, 4, 8))):
            axis.set_xscale("log")
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
        for axis in (pair, nodes, boxes):
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=75)
        plt.close(figure)


if __name__ == "__main__":
    draw(DOCS / "_static" / "front_page.png")
