"""Rotated digits: scikit-learn's, or the published rotated MNIST."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import study
from torch import Tensor

from .digits import sklearn_digits
from .image_files import load

Part = tuple[Tensor, Tensor]  # images and labels


def rotate(images: Tensor, angles: Tensor, size: int, scale: float) -> Tensor:
    """Enlarge (N, 1, h, w) by ``scale`` and rotate about the centre, counter-clockwise, onto size x size pixels."""
    cos, sin = angles.cos(), angles.sin()
    zoom = size / (scale * images.shape[-1])
    zero = torch.zeros_like(cos)
    rows = torch.stack([zoom * cos, -zoom * sin, zero, zoom * sin, zoom * cos, zero], -1)
    grid = F.affine_grid(rows.view(-1, 2, 3), [len(images), 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def rotated_digits(size: int, train_images: int | None) -> tuple[Part, None, Part]:
    """Training and test digits, each rotated by one angle of its own; the digit fills size / sqrt(2) pixels."""
    images, labels, train, test = sklearn_digits()
    angles = 2 * torch.pi * torch.rand(len(images), generator=torch.Generator().manual_seed(0))
    images = rotate(images, angles, size, scale=size / (8 * 2**0.5))
    train = train[:train_images]
    return (images[train], labels[train]), None, (images[test], labels[test])


def parts(settings: Any) -> tuple[Part, Part | None, Part]:
    """Images and labels to train on, to choose the epoch with where there are any, and to test on."""
    if settings.data is None:
        return rotated_digits(settings.size, settings.train_images)
    with study.refusing():
        data = load(settings.data, "rotated MNIST")
    return data.train[: settings.train_images], data.validation[:], data.test[:]
