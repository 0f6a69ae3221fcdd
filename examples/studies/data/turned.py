"""Digits and volumes of adrenal glands, turned by any angle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .digits import sklearn_digits
from .image_files import Part, load_mnist_test

SIDE = 32  # voxels to a side of a volume, averaged from 64


def turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate each image or volume (N, C, *spatial) about its middle, by a random rotation of its own."""
    dim = images.ndim - 2
    factor, triangle = torch.linalg.qr(torch.randn(len(images), dim, dim, generator=generator))
    factor = factor * triangle.diagonal(dim1=1, dim2=2).sign()[:, None]
    factor[:, 0] *= factor.det().sign()[:, None]
    matrices = torch.cat([factor, torch.zeros(len(images), dim, 1)], 2).to(images)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def digits(folder: Path | None, train: int) -> list[Part]:
    """Upright digits to train on; turned ones to validate and to test on. From MNIST's 10,000 test images 7,000, 500
    and 2,500; without a folder scikit-learn's, on 16 x 16 pixels."""
    if folder is None:
        images, labels, chosen, rest = sklearn_digits()
        images, labels = (x[np.concatenate([chosen, rest])] for x in (images, labels))
        images = F.interpolate(images, size=16, mode="bilinear")
    else:
        images, labels = load_mnist_test(folder)
    cuts = [7 * len(images) // 10, 3 * len(images) // 4]
    parts = [(x, y) for x, y in zip(images.tensor_split(cuts), labels.tensor_split(cuts), strict=True)]
    return [(parts[0][0][:train], parts[0][1][:train]), *_held_out(parts[1:])]


def adrenal(file: Path, train: int) -> list[Part]:
    """MedMNIST's volumes (adrenalmnist3d_64.npz) of adrenal glands, normal or not, on 32 voxels to a side."""
    with np.load(file) as arrays:
        parts = [
            (
                F.avg_pool3d(torch.tensor(arrays[f"{name}_images"][:, None]).float() / 255, 64 // SIDE),
                torch.tensor(arrays[f"{name}_labels"][:, 0]).long(),
            )
            for name in ("train", "val", "test")
        ]
    return [(parts[0][0][:train], parts[0][1][:train]), *_held_out(parts[1:])]


def _held_out(parts: list[Part]) -> list[Part]:
    generator = torch.Generator().manual_seed(0)
    return [(turned(images, generator), labels) for images, labels in parts]
