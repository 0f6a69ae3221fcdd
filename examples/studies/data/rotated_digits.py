"""Rotated digits: scikit-learn's, or MNIST's test images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import study
from torch import Tensor

from .digits import sklearn_digits
from .image_files import Part, load_mnist_test


def rotate(images: Tensor, angles: Tensor, size: int, scale: float) -> Tensor:
    """Enlarge (N, 1, h, w) by ``scale`` and rotate about the centre, counter-clockwise, onto size x size pixels."""
    cos, sin = angles.cos(), angles.sin()
    zoom = size / (scale * images.shape[-1])
    zero = torch.zeros_like(cos)
    rows = torch.stack([zoom * cos, -zoom * sin, zero, zoom * sin, zoom * cos, zero], -1)
    grid = F.affine_grid(rows.view(-1, 2, 3), [len(images), 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def rotated_digits(size: int, train_images: int | None) -> tuple[Part, Part]:
    """Training and test digits, each rotated by one angle of its own; the digit fills size / sqrt(2) pixels."""
    images, labels, train, test = sklearn_digits()
    angles = 2 * torch.pi * torch.rand(len(images), generator=torch.Generator().manual_seed(0))
    images = rotate(images, angles, size, scale=size / (8 * 2**0.5))
    train = train[:train_images]
    return (images[train], labels[train]), (images[test], labels[test])


MNIST_TRAIN = 7000  # of the 10,000


def rotated_mnist(folder: Path, size: int, train_images: int | None) -> tuple[Part, Part]:
    """The first 7,000 of MNIST's test images to train on and the rest to test on, each rotated by one angle of its own,
    28 x 28 or averaged to 14 x 14."""
    images, labels = load_mnist_test(folder)
    angles = 2 * torch.pi * torch.rand(len(images), generator=torch.Generator().manual_seed(0))
    images = rotate(images, angles, 28, scale=1.0)
    images = images if size == 28 else F.avg_pool2d(images, 28 // size)
    cut = MNIST_TRAIN * len(images) // 10_000
    return (images[:cut][:train_images], labels[:cut][:train_images]), (images[cut:], labels[cut:])


def parts(settings: Any) -> tuple[Part, Part]:
    """Images and labels to train on and to test on."""
    if settings.data is None:
        return rotated_digits(settings.size, settings.train_images)
    with study.refusing():
        return rotated_mnist(settings.data, settings.size, settings.train_images)
