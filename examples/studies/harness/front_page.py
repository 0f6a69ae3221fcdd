"""The README's figure: four plots of what stands in the tables of examples/results."""

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


def draw(path: Path) -> None:
    """The figure of four plots, to this file."""
    figure, (pair, length, time, boxes) = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")

    models = {"relative": "ours, relative", "frames": "ours, frames", "G-CNN + mean": "G-CNN + mean"}
    models["deep G-CNN + mean"] = "G-CNN + mean, 4 layers"
    for model, label in models.items():
        row = cells("matching/accuracy", model)
        there = {int(column.split()[0]): cell for column, cell in row.items() if "cells" in column and cell != "-"}
        pair.plot(list(there), [number(cell) for cell in there.values()], ".-", label=label)
    pair.set(title="which two patterns are equal", xlabel="patterns", ylabel="accuracy, %", ylim=(0, 102))
    pair.set_xticks([2, 4, 6])

    for model in ("SE(3)-Hyena", "SE(3)-Hyena, as published", "SE(3)-Transformer", "Transformer"):
        row = cells("associative_recall/errors", "random", model)
        there = {int(tokens.split()[0]): cell for tokens, cell in list(row.items())[2:] if cell != "-"}
        label = "SE(3)-Hyena, short convolution (ours)" if model == "SE(3)-Hyena" else model
        length.plot(list(there), [number(cell) for cell in there.values()], ".-", label=label)
    length.set(title="associative recall", xlabel="tokens", ylabel="MSE", xscale="log", yscale="log")

    for layer, label in {"window": "ours, near pairs", "PyG Performer": "PyG's Performer", "SDPA": "exact"}.items():
        row = cells("benchmarks/linear_attention_training", layer)
        there = {int(column.split()[0]) ** 2: cell for column, cell in row.items() if column.endswith("ms")}
        time.plot(list(there), [number(cell) for cell in there.values()], ".-", label=label)
    time.set(title="attention over pixels", xlabel="pixels", ylabel="training step, ms", xscale="log", yscale="log")

    for model, label in {"EwaldAttention": "ours", "Ewald message passing": "", "all pairs": "", "none": ""}.items():
        row = cells("long_range/errors", "forces", model)
        columns = ("potential or energy", *(f"potential or energy, {n} times" for n in ("2", "4", "8")))
        row = {column.removesuffix(" the charges"): cell for column, cell in row.items()}
        there = {2**n: row[column] for n, column in enumerate(columns) if row[column] != "-"}
        boxes.plot(list(there), [number(cell) for cell in there.values()], ".-", label=label or model)
    boxes.set(title="energies of charges", ylabel="share of the variance left", xscale="log", yscale="log")
    boxes.set_xlabel("charges, times those of training")
    boxes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    boxes.minorticks_off()
    for axis in (pair, length, time, boxes):
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=75)
    plt.close(figure)
