"""Draw docs/_static/surface_potentials.png: the potential around a test protein and the errors of two models.

PYTHONPATH=examples/studies python docs/surface_potentials.py --data surfaces.npz --output out

The models are those of seed 0 that examples/studies/surfaces.py left in the folder --output.
"""

import argparse
import dataclasses
from pathlib import Path

import matplotlib
import torch
from data.surfaces import read, surface
from harness.tables import at_best_rates
from harness.training import with_best_weights
from report import rows_of
from surfaces import SurfacesStudy, build

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TITLES = {
    "distance attention": "error, distance attention",
    "messages, potentials": "error, messages and five\nhand-made potentials",
    "Ewald (e3nn), no messages": "error, Ewald attention",
}


def draw(path: Path, data: Path, output: Path, name: str) -> None:
    """Residues of the surface at their centres; errors are predictions less labels."""
    rows = [row for group in at_best_rates(rows_of("surfaces"), "models").values() for row in group]
    found = read(data)
    known = torch.cat([x[x.isfinite()] for _, _, x in found["training"]])
    spread, mean = torch.std_mean(known)
    protein, centre, label = next(
        one for part in found.values() for one in part if one[0].name == name
    )
    there = label.isfinite()
    panels = [("potential", label)]
    for model, title in TITLES.items():
        row = next(
            row for row in rows if (row.setting("models"), row.setting("seeds")) == (model, 0)
        )
        chosen = {key: row.setting(key) for key in ("epochs", "learning_rate")}
        run = dataclasses.replace(SurfacesStudy(), models=(model,), output=output, **chosen)
        net = with_best_weights(build(run), run)
        with torch.no_grad():
            out = net(surface(protein, centre, label, SurfacesStudy().neighbors))[:, 0]
        panels.append((title, out * spread + mean - label))
    x, y, z = torch.pca_lowrank(centre - centre.mean(0), 3)[2].T @ (centre - centre.mean(0)).T
    size = float(label[there].abs().quantile(0.98))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(12, 3.6), layout="constrained", sharey=True
    )
    order = z.argsort()[there[z.argsort()]]  # nearest last
    for axis, (title, value) in zip(axes, panels, strict=True):
        depth = 40 + 160 * (z - z.min()) / (z.max() - z.min())
        axis.plot(x, y, color="0.85", zorder=0, linewidth=1)
        colours = {"c": value[order], "cmap": "RdBu", "vmin": -size, "vmax": size}
        dots = axis.scatter(
            x[order], y[order], s=depth[order], edgecolors="0.4", linewidths=0.3, **colours
        )
        axis.set(title=title, aspect="equal")
        axis.axis("off")
    figure.colorbar(dots, ax=axes, label="kT/e", shrink=0.8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--data", "--output"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--protein", default="1UDI")
    given = parser.parse_args()
    target = Path(__file__).parent / "_static" / "surface_potentials.png"
    draw(target, given.data, given.output, given.protein)
