"""Digits as graphs of superpixels, as PyG's MNISTSuperpixels has them: about 75 nodes at real positions."""

from __future__ import annotations

import functools
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from .digits import sklearn_digits
from .image_files import floats, load
from .superpixels import Superpixels

SIDE, BOX = 28, 20  # of the canvas and of the digit in its middle, as in MNIST


def enlarged(digits: Tensor) -> Tensor:
    """Digits of 8 x 8 pixels enlarged to 20 x 20 by bilinear interpolation, in the middle of 28 x 28."""
    border = (SIDE - BOX) // 2
    return F.pad(F.interpolate(digits, (BOX, BOX), mode="bilinear"), 4 * (border,))


def pictures(folder: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (N, 1, 28, 28) and labels to train and to test: of MNIST's files, or scikit-learn's digits."""
    if folder is not None:
        data = load(folder, "MNIST or Fashion-MNIST")
        train, test = ((floats(images), labels) for images, labels in (data.train[:], data.test[:]))
        return train, test
    images, labels, *parts = sklearn_digits()
    images = enlarged(images)
    train, test = ((images[part], labels[part]) for part in parts)
    return train, test


@functools.lru_cache(maxsize=1)
def graphs(
    folder: Path | None, segments: int, k: int, train: int | None, test: int | None, progress: bool = True
) -> tuple[list[Data], list[Data]]:
    """Graphs of the first images to train and to test, with the image itself as ``pixels`` (1, 28, 28)."""
    transform, parts = Superpixels(segments, k), []
    for (images, labels), count in zip(pictures(folder), (train, test), strict=True):
        pairs = list(zip(images[:count], labels[:count], strict=True))
        pairs = tqdm(pairs, desc="superpixels", leave=False, disable=not progress)
        parts.append([transform(Data(image=image, pixels=image, y=label)) for image, label in pairs])
    train_graphs, test_graphs = parts
    return train_graphs, test_graphs
