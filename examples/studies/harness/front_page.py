"""The README's figure: three plots of cells of the tables in examples/results."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

from .settings import EXAMPLES

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def cells(name: str, *row: str) -> dict[str, str]:
    """A row of a table by column: the one that has these cells."""
    lines = (EXAMPLES / "results" / f"{name}.md").read_text().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    (found,) = [line for line in rows if all(cell in line for cell in row)]
    return dict(zip(header, found, strict=True))


def number(cell: str) -> float:
    """The first number of a cell, which is the mean."""
    return float(re.findall(r"[\d.]+", cell.replace(",", ""))[0])


def line(axis, name: str, row: tuple[str, ...], columns: dict[str, float], label: str, style: str = "o-") -> None:
    """Cells of a row of a table against a number for each column; cells without a number are left out."""
    row_cells = cells(name, *row)
    there = {x: row_cells[column] for column, x in columns.items() if row_cells[column] != "-"}
    axis.plot(list(there), [number(cell) for cell in there.values()], style, label=label, markersize=6, linewidth=2)


def draw(path: Path) -> None:
    """The figure of three plots with one message each, to this file."""
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 11}):
        figure, (pair, nodes, boxes) = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")

        columns = {f"{n} cells": n for n in (2, 4, 6)}
        line(pair, "matching/accuracy", ("relative",), columns, "attention, relative (ours)")
        line(pair, "matching/accuracy", ("frames",), columns, "attention, frames (ours)")
        line(pair, "matching/accuracy", ("G-CNN + mean",), columns, "group CNN", "s--")
        line(pair, "matching/accuracy", ("deep G-CNN + mean",), columns, "group CNN, 4 layers", "s--")
        pair.set(title="Which two patterns are equal?\nAttention compares content", ylim=(0, 104))
        pair.set(xlabel="patterns in the image", ylabel="accuracy, %", xticks=[2, 4, 6])

        columns = {"as trained": 1, "2 times the nodes": 2, "4 times the nodes": 4}
        line(nodes, "depots/displacement", ("far offsets, pairs",), columns, "far offsets, pairs (ours)")
        line(nodes, "depots/displacement", ("dense, centred",), columns, "dense attention", "s--")
        line(nodes, "depots/displacement", ("Performer, centred",), columns, "PyG's Performer", "s--")
        line(nodes, "depots/displacement", ("GATv2",), columns, "GATv2, messages alone", "s--")
        nodes.set(title="Where is the far node I look for?\nOffsets carry over to larger graphs", yscale="log")
        nodes.set(xlabel="nodes, times those of training", ylabel="share of the variance left")

        columns = {"field or force": 1, "field or force, 2 times the charges": 2}
        columns |= {f"field or force, {n} times": n for n in (4, 8)}
        line(boxes, "long_range/errors", ("forces", "EwaldAttention"), columns, "Ewald attention (ours)")
        line(boxes, "long_range/errors", ("forces", "Ewald message passing"), columns, "Ewald message passing", "s--")
        line(boxes, "long_range/errors", ("forces", "all pairs"), columns, "messages along all pairs", "s--")
        line(boxes, "long_range/errors", ("forces", "none"), columns, "near messages alone", "s--")
        boxes.set(title="Forces on charges in larger boxes\nEwald attention has the smallest error", yscale="log")
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
