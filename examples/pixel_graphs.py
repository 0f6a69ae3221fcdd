"""Classify images as graphs of pixels with linear-time attention, and look at what shifts do to it.

Real digits (scikit-learn's 1797 images of 8 x 8) are put in the middle of a larger canvas and become pixel graphs.
Trains the Relative Performer with no positions, absolute ones, and the relative "sinusoid", "clipped" and "window";
then shifts the test images pixel by pixel, as far as no bright pixel leaves. Prints a table like the paper's Table 1
and draws a figure like its Figure 1, accuracy against shift. What falls with relative positions is the border's work:
with --periodic the canvas has none.

    python examples/pixel_graphs.py                                      # some minutes on two cores
    python examples/pixel_graphs.py --positions sinusoid window --seeds 0 1 2
    python examples/pixel_graphs.py --data ~/fashion --full --device cuda   # the paper's model, a published data set
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import lightning
import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from devices import add_device
from image_files import load
from tg_equiattn.integrations.pyg import PixelGraph, PixelGraphClassifier
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from tqdm import tqdm
from training import Classifier, fit, mean_and_spread, sklearn_digits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {
    "none": "Performer (No Pos.)", "absolute": "Performer (Absolute)", "sinusoid": "Performer (Rel. S1)",
    "clipped": "Performer (Rel. S2)", "window": "Performer (Window)",
}  # fmt: skip
Images = tuple[Tensor, Tensor]


def digits(size: int, train_images: int | None) -> tuple[Images, Images]:
    """scikit-learn's digits in the middle of a canvas."""
    images, labels, train, test = sklearn_digits()
    left = (size - 8) // 2
    images = F.pad(images, (left, size - 8 - left, left, size - 8 - left))
    train = train[:train_images]
    return (images[train], labels[train]), (images[test], labels[test])


def published(folder: Path, size: int | None, train_images: int | None) -> tuple[Images, Images]:
    """A published data set, resized if asked for (the paper resizes MNIST and Fashion-MNIST to 32 x 32)."""
    data = load(folder)
    train, test = ((_resized(images, size), labels) for images, labels in (data["train"], data["test"]))
    return (train[0][:train_images], train[1][:train_images]), test


def _resized(images: Tensor, size: int | None) -> Tensor:
    if size is None or tuple(images.shape[2:]) == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def graphs(images: Tensor, labels: Tensor, transform: PixelGraph) -> list[Data]:
    return [transform(Data(image=image, y=label)) for image, label in zip(images, labels, strict=True)]


def predict(model: PixelGraphClassifier, data: Batch) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch of graphs."""
    return model(data.x, data.edge_index, data.edge_attr, data.pos, data.batch, batch_size=data.num_graphs), data.y


def build(position: str, channels: int, options: argparse.Namespace) -> PixelGraphClassifier:
    return PixelGraphClassifier(
        channels, 10, channels=options.channels, num_layers=options.layers, heads=options.heads,
        embedding=options.embedding, position=None if position == "none" else position,
        max_distance=options.max_distance, redraw_interval=options.redraw_interval,
        attention_dropout=options.dropout, dropout=options.dropout, norm=options.norm,
    )  # fmt: skip


def shiftable(images: Tensor, limit: int) -> Tensor:
    """Which images have nothing but black in the ``limit`` columns at either side."""
    return (images[..., :limit].flatten(1).amax(1) == 0) & (images[..., -limit:].flatten(1).amax(1) == 0)


def shifted(images: Tensor, columns: int) -> Tensor:
    """Move images to the right by whole columns; black comes in."""
    width = images.shape[-1]
    return F.pad(images, (max(columns, 0), max(-columns, 0)))[..., max(-columns, 0) : max(-columns, 0) + width]


@torch.no_grad()
def accuracies_at_shifts(
    model: PixelGraphClassifier, images: Images, transform: PixelGraph, shifts: range, options: argparse.Namespace
) -> Iterator[float]:
    """Percent of images classified right at each shift."""
    model.to(options.device).eval()
    for shift in tqdm(shifts, desc="shifts", leave=False):
        right = 0
        for batch in DataLoader(graphs(shifted(images[0], shift), images[1], transform), 256):
            logits, labels = predict(model, batch.to(options.device))
            right += int((logits.argmax(1) == labels).sum())
        yield 100 * right / len(images[0])


def table(accuracies: dict[str, list[float]], parameters: dict[str, int], name: str) -> str:
    """The layout of the paper's Table 1."""
    rows = [f"| model | {name} | params |", "|---|---|---|"]
    for position, values in accuracies.items():
        count = f"{parameters[position] / 1e6:.1f}M" if parameters[position] >= 1e5 else f"{parameters[position]:,}"
        rows.append(f"| {NAMES[position]} | {mean_and_spread(values)} | {count} |")
    return "\n".join(rows)


def shift_table(curves: dict[str, np.ndarray], shifts: range) -> str:
    """Mean accuracy at every shift."""
    rows = [f"| shift in pixels | {' | '.join(map(str, shifts))} |", "|---" * (len(shifts) + 1) + "|"]
    for position, curve in curves.items():
        rows.append(f"| {NAMES[position]} | " + " | ".join(f"{a:.1f}" for a in curve.mean(0)) + " |")
    return "\n".join(rows)


def draw(curves: dict[str, np.ndarray], shifts: range, path: Path) -> None:
    """Accuracy against shift, mean and standard deviation over seeds."""
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for position, curve in curves.items():
        mean, spread = curve.mean(0), curve.std(0, ddof=1) if len(curve) > 1 else np.zeros(len(shifts))
        axes.plot(shifts, mean, marker="o", label=NAMES[position])
        axes.fill_between(shifts, mean - spread, mean + spread, alpha=0.2)
    axes.set(xlabel="shift along x in pixels", ylabel="accuracy in percent", ylim=(0, 100), xticks=list(shifts))
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, help="default 32, or 22 with --full")
    parser.add_argument("--learning-rate", type=float, help="default 0.003, or 0.0005 with --full")
    parser.add_argument("--size", type=int, help="pixels a side; default 14, or 32 with --data")
    parser.add_argument("--train-images", type=int, help="use only the first of the training images")
    parser.add_argument("--test-images", type=int, help="use only the first of the test images")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--embedding", choices=["linear", "mlp", "lookup"], default="linear")
    parser.add_argument("--max-distance", type=int, help="default 4, or 6 with --full")
    parser.add_argument("--norm", choices=["layer", "batch"], help="default batch, or layer with --full")
    parser.add_argument("--redraw-interval", type=int, help="steps between draws; default 1000, or 100 with --full")
    parser.add_argument("--periodic", action="store_true", help="opposite borders of the canvas touch")
    parser.add_argument("--dropout", type=float, help="default 0, or 0.1 with --full")
    parser.add_argument("--shift", type=int, help="largest shift in pixels; default 3, or 8 with --data")
    parser.add_argument("--label", type=int, help="shift only images of this class (the paper: 1)")
    parser.add_argument("--data", type=Path, help="folder with MNIST, Fashion-MNIST or CIFAR-10 files")
    add_device(parser)
    parser.add_argument("--output", type=Path, default=Path("out/pixel_graphs"))
    parser.add_argument("--full", action="store_true", help="the paper's model and hyperparameters")
    options = parser.parse_args()
    if options.full:
        for name in ("channels", "layers", "heads"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name} does not go with --full, which is the paper's model")
        options.channels, options.layers, options.heads = 256, 6, 8
    names = ("batch", "learning_rate", "max_distance", "dropout", "norm", "redraw_interval")
    small, full = (32, 0.003, 4, 0.0, "batch", 1000), (22, 0.0005, 6, 0.1, "layer", 100)
    for name, value in zip(names, full if options.full else small, strict=True):
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    options.size = (32 if options.data else 14) if options.size is None else options.size
    options.shift = (8 if options.data else 3) if options.shift is None else options.shift
    for name in ("epochs", "batch", "learning_rate", "train_images", "test_images", "shift", "max_distance"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if options.size < 8:
        parser.error(f"--size must be at least 8, got {options.size}")
    if options.train_images is not None and options.train_images < options.batch:
        parser.error(f"--train-images must be at least the batch of {options.batch}, got {options.train_images}")
    return options


def main() -> None:
    options = parse()
    start = time.perf_counter()
    if options.data:
        train, test = published(options.data, options.size, options.train_images)
    else:
        train, test = digits(options.size, options.train_images)
    test = tuple(t[: options.test_images] for t in test)
    movable = shiftable(test[0], options.shift)
    if options.label is not None:
        movable &= test[1] == options.label
    transform = PixelGraph(options.max_distance, periodic=options.periodic)
    print(f"{len(train[0])} images to train, {len(test[0])} to test, {options.size} x {options.size} pixels; "
          f"{int(movable.sum())} can be shifted by {options.shift} pixels either way")  # fmt: skip
    testing = DataLoader(graphs(*test, transform), 256)
    shifts = range(-options.shift, options.shift + 1)
    accuracies, curves, parameters = {}, {}, {}
    for position in options.positions:
        for seed in options.seeds:
            print(f"{NAMES[position]}, seed {seed}")
            lightning.seed_everything(seed, verbose=False)
            model = build(position, train[0].shape[1], options)
            parameters[position] = sum(p.numel() for p in model.parameters())
            training = DataLoader(graphs(*train, transform), options.batch, shuffle=True, drop_last=True)
            classifier = Classifier(model, predict, options.learning_rate, constant=options.full)
            accuracy = fit(classifier, training, testing, options.epochs, options.device)
            accuracies.setdefault(position, []).append(accuracy)
            if movable.any():
                images = test[0][movable], test[1][movable]
                curve = list(accuracies_at_shifts(model, images, transform, shifts, options))
                curves.setdefault(position, []).append(curve)
    options.output.mkdir(parents=True, exist_ok=True)
    report = table(accuracies, parameters, options.data.name if options.data else "digits")
    (options.output / "accuracy.md").write_text(report + "\n")
    print(f"\nTest accuracy in percent, {len(options.seeds)} seed(s), {options.epochs} epochs:\n\n{report}\n")
    if curves:
        stacked = {position: np.array(values) for position, values in curves.items()}
        moved = shift_table(stacked, shifts)
        (options.output / "shifts.md").write_text(moved + "\n")
        draw(stacked, shifts, options.output / "shifts.png")
        print(f"Accuracy in percent of shifted test images, mean over seeds:\n\n{moved}\n")
    else:
        print("No test image can be shifted so far without losing bright pixels; --shift sets how far.")
    print(f"figure and tables are in {options.output.resolve()} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
