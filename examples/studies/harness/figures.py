"""The figure that several studies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def points(
    columns: Mapping[str, Mapping[str, Sequence[float]]],
    path: Path,
    measured: str,
    along: str = "",
    legend: str = "",
    scale: str = "linear",
) -> None:
    """Every run as a point and the mean as a line of its own: a column a model or setting, a colour a series in it.

    ``measured`` and ``along`` label the axes; the legend of the series, if there is to be one, has a title; ``scale``
    is of the values' axis.
    """
    figure, axis = plt.subplots(figsize=(2.5 + len(columns), 3.5), layout="constrained")
    series = list(dict.fromkeys(name for column in columns.values() for name in column))
    for number, name in enumerate(series):
        shift = 0.7 * ((number + 0.5) / len(series) - 0.5)
        there = {
            place + shift * (len(column) > 1): column[name]
            for place, column in enumerate(columns.values())
            if column.get(name)
        }
        for place, values in there.items():
            axis.plot([place] * len(values), values, ".", color=f"C{number}", alpha=0.5)
        means = [np.mean(values) for values in there.values()]
        axis.plot(list(there), means, "_", color=f"C{number}", markersize=14, markeredgewidth=2, label=name)
    labels = [name if len(name) < 9 else name.replace(" ", "\n") for name in columns]
    axis.set_xticks(range(len(columns)), labels)
    axis.set(xlabel=along, ylabel=measured, xlim=(-0.5, len(columns) - 0.5), yscale=scale)
    if legend:
        figure.legend(fontsize="small", title=legend, title_fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)
