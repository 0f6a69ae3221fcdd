"""Draw docs/_static/accuracy_by_time.png from the rows of examples/studies/vision_transformers.py.

PYTHONPATH=examples/studies python docs/accuracy_by_time.py
"""

from pathlib import Path

import matplotlib
from harness import results, study
from harness.tables import at_best_rates
from vision_transformers import VisionTransformers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "frames C4": ("frames (ours)", "C3-"),
    "G-CNN C4": ("group CNN", "C2-"),
    "convolutions + frames C4": ("convolutions + frames (ours)", "C4-"),
    "convolutions + plain, equal parameters": ("convolutions + plain, equal parameters", "C5--"),
    "plain, equal parameters": ("plain, equal parameters", "C0--"),
    "plain, equal width": ("plain, equal width", "C1--"),
}


def draw(path: Path) -> None:
    """Accuracy on validation images of each run of a quarter of an hour at the best rate of its model."""
    rows = results.read(study.committed("vision_transformers"), VisionTransformers)
    wanted = {"data": "mnist", "minutes": 15.0, "train": 7000}
    rows = [row for row in rows if all(row.setting(key) == x for key, x in wanted.items())]
    found = at_best_rates(rows, "models")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, (label, style) in STYLES.items():
        for number, row in enumerate(found[(name,)]):
            seconds, accuracy = zip(*row.more["curve"], strict=True)
            axis.plot([s / 60 for s in seconds], accuracy, style, label=None if number else label)
    axis.set(
        xlabel="minutes of the processor in training",
        ylabel="accuracy on validation images, %",
        xlim=(0, None),
        ylim=(0, 100),
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).parent / "_static" / "accuracy_by_time.png")
