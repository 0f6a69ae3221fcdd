"""Draw docs/_static/phonon_branches.png from the rows of examples/studies/polar_crystals.py.

PYTHONPATH=examples/studies python docs/phonon_branches.py
"""

from pathlib import Path

import matplotlib
import numpy as np
from harness import results, study
from polar_crystals import PARTS, PolarCrystalsStudy, best

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "DFT": ("DFT", "ko"),
    "MACE": ("MACE alone", "C0s--"),
    "charges": ("MACE with charges", "C3-"),
}


def draw(path: Path) -> None:
    """Both optical branches along Gamma-X, means over seeds."""
    rows = best(results.read(study.committed("polar_crystals"), PolarCrystalsStudy))
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axis, crystal in zip(axes, ("NaCl", "MgO"), strict=True):
        for model, (label, style) in STYLES.items():
            for kind in ("LO", "TO"):
                found = [
                    row.more["branches"][f"{kind}2"]
                    for row in rows
                    if (row.setting("crystals"), row.setting("models")) == (crystal, model)
                ]
                means = [np.mean([one[str(n)] for one in found]) for n in PARTS]
                axis.plot(
                    [1 / n for n in PARTS],
                    means,
                    style,
                    label=label if kind == "LO" else None,
                    markersize=5,
                )
                if model == "DFT":
                    axis.annotate(kind, (1 / PARTS[-1], means[-1]), (0.02, means[-1]), va="center")
        axis.set(
            title=crystal,
            xlabel="wave vector along Γ-X, 2π/a",
            ylabel="frequency, THz",
            xlim=(0, 0.52),
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).parent / "_static" / "phonon_branches.png")
