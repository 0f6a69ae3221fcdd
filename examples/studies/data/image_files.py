"""MNIST's test images from the files they are published in; nothing is downloaded."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # images in [0, 1], (N, 1, 28, 28), and labels


def _idx(path: Path, header: int) -> np.ndarray:
    """Bytes after a header, perhaps packed by gzip."""
    packed = path.with_name(f"{path.name}.gz")
    with gzip.open(packed) if packed.is_file() else path.open("rb") as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def load_mnist_test(folder: Path) -> Part:
    """MNIST's 10,000 test images from a folder that may hold these alone.

    Raises:
        FileNotFoundError: if a file is missing; says which, and where it comes from.
        ValueError: if a file is damaged.
    """
    paths = [Path(folder).expanduser() / f"t10k-{name}-ubyte" for name in ("images-idx3", "labels-idx1")]
    try:
        images, labels = _idx(paths[0], 16), _idx(paths[1], 8)
    except FileNotFoundError as error:
        source = "MNIST: ossci-datasets.s3.amazonaws.com/mnist"
        raise FileNotFoundError(f"{error.filename} is missing. {source}") from error
    if images.size != 784 * len(labels) or not np.isin(labels, range(10)).all():
        raise ValueError(f"{paths[0]} and {paths[1]} must hold images of 28 x 28 and as many labels from 0 to 9")
    return torch.tensor(images.reshape(-1, 1, 28, 28)).float() / 255, torch.tensor(labels.astype(np.int64))
