"""Draw docs/_static/copied_regions.png: test images with copied regions, and the pixels that models mark.

PYTHONPATH=examples/studies python docs/copied_regions.py --data nuclei_256.npz --output out

examples/studies/micrographs.py trains the models, in the folder --output. The picture shows those of the last seed, and
copies that are rotated by more than in training.
"""

import argparse
import dataclasses
from pathlib import Path

import matplotlib
import torch
from harness.tables import at_best_rates
from harness.training import with_best_weights
from micrographs import Micrographs, Model, best_f1, build, held_out, predicted
from report import rows_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODELS = [name for name in Model.__args__ if name != "SIFT"]
IMAGES = 6


def draw(path: Path, data: Path, output: Path) -> None:
    """The first test images that have a copy, and the first that has none."""
    best = at_best_rates(rows_of("micrographs"), "models", "copies", "epochs")
    _, validation, tests = held_out(Micrographs(data=data))
    images, masks = (torch.cat(x)[:, 0] for x in zip(*tests["rotated"], strict=True))
    forged = masks.amax((1, 2)).bool()
    shown = [*forged.nonzero()[: IMAGES - 1, 0], int((~forged).nonzero()[0])]
    panels = [("image", images), ("copied", masks)]
    for name in MODELS:
        row = max(best[name, "near", Micrographs().epochs], key=lambda row: row.setting("seeds"))
        run = dataclasses.replace(
            Micrographs(),
            models=(name,),
            seeds=(row.setting("seeds"),),
            learning_rate=row.setting("learning_rate"),
            output=output,
        )
        model = with_best_weights(build(run), run)
        _, threshold = best_f1(*predicted(model, validation))
        panels.append((name, predicted(model, tests["rotated"])[0][:, 0] >= threshold))
    figure, axes = plt.subplots(
        len(panels), IMAGES, figsize=(2 * IMAGES, 2 * len(panels)), layout="constrained"
    )
    for line, (name, pictures) in zip(axes, panels, strict=True):
        line[0].set_ylabel(name)
        for axis, n in zip(line, shown, strict=True):
            axis.imshow(pictures[n], cmap="gray")
            axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=75)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--data", "--output"):
        parser.add_argument(flag, type=Path, required=True)
    given = parser.parse_args()
    target = Path(__file__).parent / "_static" / "copied_regions.png"
    draw(target, given.data, given.output)
