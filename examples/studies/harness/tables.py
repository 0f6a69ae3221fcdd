"""Tables from result rows, beside the papers' own numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable

import numpy as np

from .results import Row
from .settings import EXAMPLES, Settings

PUBLISHED = EXAMPLES / "results" / "published.csv"


def mean_and_spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    values = list(values)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *map(list, lines)))


def cells(table: str, *words: str) -> dict[str, str]:
    """A row of a table by column: the one row that has cells with these words."""
    header, _, *rows = [[text.strip() for text in line.split("|")[1:-1]] for line in table.splitlines()]
    (row,) = [row for row in rows if all(word in row for word in words)]
    return dict(zip(header, row, strict=True))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows by these settings, in the order they come."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.setting(name) for name in names), []).append(row)
    return groups


def in_order(rows: Iterable[Row], **orders: Iterable[str]) -> list[Row]:
    """Rows in the order in which values of these settings are listed."""
    listed = {name: list(order) for name, order in orders.items()}
    return sorted(rows, key=lambda row: [order.index(row.setting(name)) for name, order in listed.items()])


def validated(row: Row) -> float:
    """The best measure on validation data."""
    return row.more["validation"]


def choosing(rows: list[Row]) -> dict[float, list[Row]]:
    """By learning rate, rows of the seeds that all rates have in common: these choose the rate."""
    by_rate = {rate: group for (rate,), group in sorted(grouped(rows, "learning_rate").items())}
    common = set.intersection(*({row.setting("seeds") for row in group} for group in by_rate.values()))
    return {rate: [row for row in group if row.setting("seeds") in common] for rate, group in by_rate.items()}


def at_best_rates(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows by these settings, of each group those with the learning rate that is best on validation data.

    Best is the mean over the seeds that all rates have in common.
    """
    groups = grouped(rows, *names)
    for key, group in groups.items():
        measured = {rate: np.mean([validated(row) for row in chosen]) for rate, chosen in choosing(group).items()}
        best = (max if group[0].metric in ("accuracy", "F1", "AUC") else min)(measured, key=measured.__getitem__)
        groups[key] = [row for row in group if row.setting("learning_rate") == best]
    return groups


def check_cells(rows: Iterable[Row], kind: type[Settings]) -> None:
    """Refuse rows that would share a cell, differing in more than their seed and what the report tells apart.

    Raises:
        ValueError: naming the fields.
    """
    defaults = kind().identity()
    alike = [name for name in kind.SWEEP if name != "seeds"] + [name for name in kind.SHOWN if name == "data"]
    for key, group in grouped(rows, *alike).items():  # of other data, nothing has to be alike
        for name in defaults.keys() - {*kind.SWEEP, *kind.SHOWN}:
            values = list(dict.fromkeys(str((defaults | row.settings)[name]) for row in group))
            if len(values) > 1:
                raise ValueError(f"rows of {', '.join(map(str, key))} differ in {name}: {', '.join(values)}")


def published(table: str) -> dict[tuple[str, str], str]:
    """A paper's numbers, by row and column of its table."""
    with PUBLISHED.open() as file:
        return {(line["row"], line["column"]): line["value"] for line in csv.DictReader(file) if line["table"] == table}
