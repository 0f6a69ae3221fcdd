"""Draw docs/_static/front_page.png, the README's figure: three plots of cells of the tables in examples/results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "examples" / "results"
sys.path.insert(0, str(RESULTS.with_name("studies")))
from harness import tables  # noqa: E402


def cells(name: str, *row: str) -> dict[str, str]:
    """A row of a table by column: the one that has these cells."""
    return tables.cells((RESULTS / f"{name}.md").read_text(), *row)


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
    with plt.rc_context({"font.size": 14, "axes.titlesize": 15, "legend.fontsize": 13}):
        figure, (pair, nodes, ions) = plt.subplots(1, 3, figsize=(11.6, 5), layout="constrained")

        columns = {f"{n} cells": n for n in (2, 4, 6)}
        names = {"relative, rotary": "attention, relative (ours)"}
        names |= {"frames, rotary": "attention, frames (ours)"}
        names |= {"G-CNN + mean": "group CNN", "deep G-CNN + mean": "group CNN, 4 layers"}
        lines(pair, "matching/accuracy", (), names, columns)
        pair.set(title="Which two patterns are equal?", ylim=(0, 104))
        pair.set(xlabel="patterns in the image", ylabel="accuracy, %", xticks=[2, 4, 6])

        columns = {"as trained": 1, "2 times the nodes": 2, "4 times the nodes": 4}
        names = {"far offsets, pairs": "far offsets, pairs (ours)"}
        names |= {"far offsets": "far offsets, features (ours)"}
        names |= {"dense, centred": "GPSConv, centred positions"}
        names |= {"Performer, centred": "the same, Performer"}
        lines(nodes, "depots/displacement", (), names, columns)
        nodes.set(title="Where is the distant node?", yscale="log", xscale="log")
        nodes.set(xlabel="nodes, times those of training", ylabel="share of the variance left")
        nodes.set_xticks(list(columns.values()), ["1", "2", "4"])
        nodes.minorticks_off()

        models = {"searched": ('charges, learn="scale" (ours)', "C0")}
        models |= {
            "torch-pme": ("MACE, charges of DFT by hand", "0.5"),
            "MACE": ("MACE alone", "0.8"),
        }
        for place, (name, (label, color)) in enumerate(models.items()):
            for x, crystal in enumerate(("NaCl", "MgO")):
                height = number(cells("polar_crystals/phonons", crystal, name)["512 atoms"])
                bar = ions.bar(
                    x + 0.27 * (place - 1),
                    height,
                    0.27,
                    color=color,
                    label=label if x == 0 else None,
                )
                ions.bar_label(bar, fmt="%.1f", fontsize=12)
        ions.set(title="Forces in cells of 512 atoms", yscale="log", ylim=(1, 50))
        ions.set(ylabel="error, meV/Å")
        ions.set_xticks(range(2), ("NaCl", "MgO"))
        for axis in (pair, nodes, ions):
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=90)
        plt.close(figure)


if __name__ == "__main__":
    draw(DOCS / "_static" / "front_page.png")
