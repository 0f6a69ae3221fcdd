"""Train GE-ViTs on rotated handwritten digits and look at where they are equivariant.

Real digits (scikit-learn's 1797 images of 8 x 8) are enlarged and rotated by uniform angles, one angle an image, and
split by image. Models are built from escnn field types: Z2_SA (translations), R4_SA and R8_SA (4 and 8 rotations) and
R4M_SA (4 rotations and reflections), each with one or several relations of the group encoding. Prints a table like
GE-ViT's Table 2 and writes figures like its Figures 4 to 7.

    python examples/rotated_digits.py                                    # a few minutes on two cores
    python examples/rotated_digits.py --models Z2_SA R8_SA --seeds 0 1 2
    python examples/rotated_digits.py --data ~/rotmnist --full --device cuda   # the paper's data and setting
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from devices import add_device
from equivariance_figures import draw_all
from torch import Tensor
from torch.utils.data import TensorDataset
from training import Classifier, batches, fit, mean_and_spread, sklearn_digits

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.escnn import GEViT

MODELS = {
    "Z2_SA": gspaces.trivialOnR2(),
    "R4_SA": gspaces.rot2dOnR2(4),
    "R8_SA": gspaces.rot2dOnR2(8),
    "R4M_SA": gspaces.flipRot2dOnR2(4),
}
ROTMNIST_FILES = {
    "train": "mnist_all_rotation_normalized_float_train_valid.amat",
    "test": "mnist_all_rotation_normalized_float_test.amat",
}


def rotate(images: Tensor, angles: Tensor, size: int, scale: float) -> Tensor:
    """Enlarge (N, 1, h, w) by ``scale`` and rotate about the centre, counter-clockwise, onto size x size pixels."""
    cos, sin = angles.cos(), angles.sin()
    zoom = size / (scale * images.shape[-1])
    zero = torch.zeros_like(cos)
    rows = torch.stack([zoom * cos, -zoom * sin, zero, zoom * sin, zoom * cos, zero], -1)
    grid = F.affine_grid(rows.view(-1, 2, 3), [len(images), 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def rotated_sklearn_digits(size: int, train_images: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test digits, each rotated by one angle of its own; the digit fills size / sqrt(2) pixels."""
    images, labels, train, test = sklearn_digits()
    angles = 2 * torch.pi * torch.rand(len(images), generator=torch.Generator().manual_seed(0))
    images = rotate(images, angles, size, scale=size / (8 * 2**0.5))
    train = train[:train_images]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def rotmnist(folder: Path, train_images: int | None) -> tuple[TensorDataset, TensorDataset]:
    """The published rotated MNIST: a line of 784 grey values and a label an image; 10,000 to train, 50,000 to test."""
    sets = []
    for part, name in ROTMNIST_FILES.items():
        path = folder / name
        if not path.is_file():
            raise SystemExit(
                f"{path} is missing: --data must name a folder with {' and '.join(ROTMNIST_FILES.values())}, "
                "the rotated MNIST of Larochelle et al. (2007), in mnist_rotation_new.zip"
            )
        table = np.loadtxt(path, dtype=np.float32)
        if table.ndim != 2 or table.shape[1] != 785:
            raise SystemExit(f"{path} must hold 785 numbers a line, got {table.shape}")
        table = table[: train_images or 10_000] if part == "train" else table
        images = torch.from_numpy(table[:, :-1]).view(-1, 1, 28, 28)
        sets.append(TensorDataset(images, torch.from_numpy(table[:, -1]).long()))
    return sets[0], sets[1]


def build(model: str, relation: str, options: argparse.Namespace) -> GEViT:
    """A GE-ViT from trivial fields of the model's gspace."""
    gspace = MODELS[model]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="relation='gsa'")
        if options.full:
            return GEViT.rotmnist(gspace, relation=relation)
        return GEViT(
            nn.FieldType(gspace, [gspace.trivial_repr]),
            10,
            channels=(options.channels,) * options.blocks,
            heads=options.heads,
            head_channels=options.head_channels,
            kernel_size=options.kernel_size,
            relation=relation,
            encoding=options.encoding,
            norm=options.norm,
            pools=(0,),
        )


def predict(model: GEViT, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch."""
    images, labels = batch
    return model(model.in_type(images)).tensor.flatten(1), labels


def train(model: str, relation: str, seed: int, data, options: argparse.Namespace) -> tuple[GEViT, float]:
    """One trained model and its test accuracy in percent."""
    lightning.seed_everything(seed, verbose=False)
    classifier = Classifier(
        build(model, relation, options), predict, options.learning_rate, weight_decay=1e-4, constant=options.full
    )
    training = batches(data[0], options.batch, options.device, shuffle=True, drop_last=True)
    testing = batches(data[1], 256, options.device)
    accuracy = fit(classifier, training, testing, options.epochs, options.device)
    return classifier.model, accuracy


def table(accuracies: dict[tuple[str, str], list[float]], options: argparse.Namespace) -> str:
    """Mean accuracy, and spread over seeds, of each model and relation."""
    relations = options.relation
    lines = [f"| model | {' | '.join(relations)} |", "|---" * (1 + len(relations)) + "|"]
    for model in options.models:
        cells = []
        for relation in relations:
            values = accuracies[model, "ge_vit" if model == "Z2_SA" else relation]
            cells.append(mean_and_spread(values))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["Z2_SA", "R4_SA", "R4M_SA"])
    parser.add_argument("--relation", nargs="+", choices=["ge_vit", "gsa", "lifted", "relative"],
                        default=["ge_vit", "gsa"], help="relations of the group encoding to compare")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, help="default 8, or 300 with --full")
    parser.add_argument("--batch", type=int, help="default 16, or 8 with --full")
    parser.add_argument("--learning-rate", type=float, help="default 0.02, or 0.001 with --full")
    parser.add_argument("--size", type=int, default=16, help="pixels a side (default 16; 28 with --full)")
    parser.add_argument("--train-images", type=int, help="use only the first of the training images")
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-channels", type=int, default=4)
    parser.add_argument("--kernel-size", type=int, default=3, help="odd window (default 3; the paper's is 5)")
    parser.add_argument("--encoding", choices=["axial", "joint", "full"], default="joint")
    parser.add_argument("--norm", choices=["batch", "layer"], default="batch",
                        help="layer normalisation is the paper's, and needs far more steps to train")  # fmt: skip
    parser.add_argument("--data", type=Path, help="folder with the rotated MNIST files (.amat)")
    add_device(parser)
    parser.add_argument("--output", type=Path, default=Path("out/rotated_digits"))
    parser.add_argument("--full", action="store_true", help="the paper's architecture and schedule")
    options = parser.parse_args()
    if options.full:
        for name in ("channels", "blocks", "heads", "head_channels", "kernel_size", "encoding", "norm"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} does not go with --full, which is the paper's architecture")
    for name in ("epochs", "batch", "learning_rate", "train_images"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    options.epochs = options.epochs or (300 if options.full else 8)
    options.batch = options.batch or (8 if options.full else 16)
    options.learning_rate = options.learning_rate or (0.001 if options.full else 0.02)
    options.size = 28 if options.full or options.data else options.size
    if options.train_images is not None and options.train_images < options.batch:
        parser.error(f"--train-images must be at least the batch of {options.batch}, got {options.train_images}")
    if options.size % 2:
        parser.error(f"--size must be even (the models pool 2 x 2), got {options.size}")
    return options


def main() -> None:
    options = parse()
    start = time.perf_counter()
    if options.data:
        data = rotmnist(options.data, options.train_images)
    else:
        data = rotated_sklearn_digits(options.size, options.train_images)
    print(f"{len(data[0])} digits to train, {len(data[1])} to test, {options.size} x {options.size} pixels")
    accuracies: dict[tuple[str, str], list[float]] = {}
    trained: dict[tuple[str, str], GEViT] = {}
    for model in options.models:
        for relation in ["ge_vit"] if model == "Z2_SA" else options.relation:  # one element has only one relation
            for seed in options.seeds:
                print(f"{model}, relation {relation}, seed {seed}")
                trained[model, relation], accuracy = train(model, relation, seed, data, options)
                accuracies.setdefault((model, relation), []).append(accuracy)
    report = table(accuracies, options)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "accuracy.md").write_text(report + "\n")
    print(f"\nTest accuracy in percent, {len(options.seeds)} seed(s), {options.epochs} epochs:\n\n{report}\n")
    errors = draw_all({k: m.cpu() for k, m in trained.items()}, data[1][3][0][None], options.output)
    (options.output / "equivariance.md").write_text(errors + "\n")
    print(
        "Equivariance error of the trained networks' features (mean |error|, and max relative to max |feature|):"
        f"\n\n{errors}\n"
    )
    print(f"figures and tables are in {options.output.resolve()} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
