"""Digits with an empty margin, and ways to enlarge them, margin and all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .digits import sklearn_digits

Part = tuple[Tensor, Tensor]  # images and labels


def scaled_digits(train_images: int | None, test_images: int, margin: int) -> tuple[Part, Part, Part]:
    """Images (N, 1, 8 + 2 margin, 8 + 2 margin) and labels to train on, to choose settings by, and to test on."""
    images, labels, train, test = sklearn_digits(test_images)
    images = F.pad(images, 4 * (margin,))
    first, rest = train[:train_images], train[train_images:]
    training, validation, testing = ((images[part], labels[part]) for part in (first, rest, test))
    return training, validation, testing


def repeated(images: Tensor, times: int) -> Tensor:
    """Every pixel of (N, C, H, W) repeated ``times`` times along both axes."""
    return images.repeat_interleave(times, 2).repeat_interleave(times, 3)


def zoomed(images: Tensor, factor: float) -> Tensor:
    """(N, C, H, W) enlarged by bilinear interpolation, or made smaller, without aliasing."""
    if factor == 1:
        return images
    size = [round(factor * side) for side in images.shape[2:]]
    return F.interpolate(images, size, mode="bilinear", antialias=factor < 1)
