"""Tables of the study of proteins."""

from __future__ import annotations

import numpy as np
from baselines.protein_models import Model
from data.protein_errors import MODES, MOTIONS
from data.protein_graphs import FAR, NEAR

from .results import Row
from .tables import at_best_rates, grouped, markdown, mean_and_spread

TESTS = "chains", "larger", "complexes", "complexes, without index", "gaps", "gaps, without index"


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


def size_table(rows: list[Row]) -> str:
    """Seconds and memory of a training step by number of residues."""
    groups = grouped([row for row in rows if row.setting("tasks") == "size"], "models")
    sizes = sorted({n for (row, *_) in groups.values() for n in row.more["cost"]}, key=int)
    lines = []
    for (name,), (row, *_) in groups.items():
        cells = [row.more["cost"].get(n) for n in sizes]
        lines.append([name, *("-" if cell is None else f"{cell[0]:.1f} s, {cell[1]:,.0f} MiB" for cell in cells)])
    return markdown(["model", *(f"{int(n):,} residues" for n in sizes)], lines)
