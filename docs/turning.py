"""Draw docs/_static/turning.png: an image, the image turned, and what layers make of both. Takes no arguments."""

from pathlib import Path

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GlobalPooling, GroupAttention, LiftingAttention

SIDE = 41


def letter() -> torch.Tensor:
    """A white R on black, (1, 1, SIDE, SIDE)."""
    figure = plt.figure(figsize=(1, 1), dpi=SIDE, facecolor="black")
    figure.text(0.5, 0.47, "R", color="white", fontsize=58, weight="bold", ha="center", va="center")
    figure.canvas.draw()
    pixels = torch.tensor(figure.canvas.buffer_rgba().tolist(), dtype=torch.float32)[..., 0] / 255
    plt.close(figure)
    return pixels[None, None]


def main() -> None:
    torch.manual_seed(5)
    group = cyclic(4)
    attention = nn.Sequential(
        LiftingAttention(group, 1, 8, heads=4, kernel_size=5),
        GroupAttention(group, 8, 8, heads=4, kernel_size=5),
        GlobalPooling(space=None, group="max"),
    )
    with torch.no_grad():
        for layer in attention[:2]:
            for parameter in layer.query.parameters():
                parameter *= 16  # scores that tell pixels apart from the start
    convolution = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2))
    image = letter()
    figure, axes = plt.subplots(2, 5, figsize=(9.2, 4.1), layout="constrained")
    layers = {"group attention": attention, "convolution": convolution}
    for line, (name, layer) in zip(axes, layers.items(), strict=True):
        with torch.no_grad():
            here, there = layer(image)[0], layer(image.rot90(1, (2, 3)))[0]
        expected = here.rot90(1, (1, 2))
        channel = int(here.flatten(1).std(1).argmax())
        error = (there - expected).abs() / expected.abs().max()
        low, high = float(here[channel].min()), float(here[channel].max())
        shown = [
            (image[0, 0], "image", {"cmap": "gray"}),
            (here[channel], "its feature map", {"vmin": low, "vmax": high}),
            (image[0, 0].rot90(1), "image turned", {"cmap": "gray"}),
            (there[channel], "its feature map", {"vmin": low, "vmax": high}),
            (error[channel], f"off by {error.max():.0e}" if error.max() < 1e-3 else f"off by {error.max():.1f}",
             {"vmin": 0, "vmax": 0.5, "cmap": "magma"}),
        ]  # fmt: skip
        for axis, (picture, title, options) in zip(line, shown, strict=True):
            axis.imshow(picture, **options)
            axis.set_title(title, fontsize=10)
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(name, fontsize=11)
    figure.savefig(Path(__file__).parent / "_static" / "turning.png", dpi=90)


if __name__ == "__main__":
    main()
