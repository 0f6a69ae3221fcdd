"""Draw docs/_static/in_a_model.png: where the layers go in models of three hosts. Takes no arguments."""

from pathlib import Path

import matplotlib
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEIGHT, GAP = 0.62, 0.28
PLAIN, OURS = "0.93", "#ffd9a8"
MODELS = {
    "escnn\nclassifier": [
        ("R2Conv,\nnorm, ReLU", 1.5, PLAIN),
        ("pool", 0.8, PLAIN),
        ("R2GroupAttention\nor R2AttentionBlock", 2.4, OURS),
        ("R2Conv,\nnorm, ReLU", 1.5, PLAIN),
        ("GroupPooling,\nclassifier", 1.7, PLAIN),
    ],
    "PyG\nmolecules": [
        ("Linear", 1.0, PLAIN),
        ("RelativeGPSBlock\n(your conv inside)", 2.4, OURS),
        ("RelativeGPSBlock\n(your conv inside)", 2.4, OURS),
        ("global pool,\nMLP", 1.7, PLAIN),
    ],
    "e3nn, MACE,\nNequIP": [
        ("embedding", 1.4, PLAIN),
        ("messages", 1.3, PLAIN),
        ("IrrepsEwaldAttention", 2.6, OURS),
        ("messages", 1.3, PLAIN),
        ("energy of\neach atom", 1.5, PLAIN),
    ],
}


def box(axis, x: float, y: float, width: float, text: str, colour: str) -> None:
    shape = "round,pad=0,rounding_size=0.08"
    axis.add_patch(
        FancyBboxPatch(
            (x, y - HEIGHT / 2), width, HEIGHT, boxstyle=shape, facecolor=colour, edgecolor="0.3"
        )
    )
    axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=10.5)


def arrow(axis, start: tuple, end: tuple, **options) -> None:
    axis.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=10,
            color="0.3",
            shrinkA=0,
            shrinkB=0,
            **options,
        )
    )


def main() -> None:
    figure, axis = plt.subplots(figsize=(9.2, 3.7), layout="constrained")
    for line, (name, layers) in enumerate(MODELS.items()):
        x, y = 1.5, -1.2 * line
        axis.text(0, y, name, va="center", fontsize=11, weight="bold")
        for number, (text, width, colour) in enumerate(layers):
            box(axis, x, y, width, text, colour)
            if number:
                arrow(axis, (x - GAP, y), (x, y))
            if text == "IrrepsEwaldAttention":  # the residual, which blocks have inside
                top = y + HEIGHT / 2 + 0.22
                axis.plot([x - GAP / 2] * 2, [y, top], color="0.3", linewidth=1.2)
                axis.plot([x - GAP / 2, x + width + GAP / 2], [top] * 2, color="0.3", linewidth=1.2)
                arrow(axis, (x + width + GAP / 2, top), (x + width + GAP / 2, y))
                axis.text(x + width + GAP / 2 + 0.08, top, "add", va="center", fontsize=10)
            x += width + GAP
    axis.set(xlim=(-0.1, 11.0), ylim=(-2.8, 0.45))
    axis.axis("off")
    figure.savefig(Path(__file__).parent / "_static" / "in_a_model.png", dpi=110)


if __name__ == "__main__":
    main()
