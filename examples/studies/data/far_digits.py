"""Pairs of scikit-learn's digits far apart on one canvas: each is to be told whether it is the greater of the two."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .digits import sklearn_digits

DIGIT = 8  # pixels a side


class Canvases(NamedTuple):
    """Canvases, or a batch of them."""

    images: Tensor  # (N, 1, size, size), in [0, 1]
    masks: Tensor  # (N, 2, size, size), 1 where the first digit's box is, and the second's
    classes: Tensor  # (N, 2), which are never equal

    @property
    def labels(self) -> Tensor:
        """(N, 2), 1 for the greater of the two and 0 for the other."""
        return (self.classes > self.classes.flip(1)).long()


def pairs(images: Tensor, classes: Tensor, count: int, size: int, gap: int, seed: int) -> Canvases:
    """Draw pairs of digits of different classes and put them on canvases.

    One is left and one right, or one above and one below the other, with at least ``gap`` empty columns or rows between
    them; all else about their places is drawn uniformly. Which is the first is drawn, too, so that places tell nothing.
    """
    room = size - 2 * DIGIT - gap  # rows or columns that are left to move in
    if room < 0:
        raise ValueError(f"size must be at least {2 * DIGIT + gap} for two digits with a gap of {gap}, got {size}")
    random = np.random.default_rng(seed)
    canvases, masks, chosen = torch.zeros(count, 1, size, size), torch.zeros(count, 2, size, size), []
    while len(chosen) < count:
        two = random.choice(len(images), 2, replace=False)
        if classes[two[0]] != classes[two[1]]:
            chosen.append(two)
    for number, two in enumerate(chosen):
        before, after = np.sort(random.integers(0, room + 1, 2))
        along = random.permutation([before, after + DIGIT + gap])  # distances that differ by a digit and the gap
        across = random.integers(0, size - DIGIT + 1, 2)
        corners = np.stack([along, across] if random.integers(2) else [across, along], 1)
        for digit, (index, (row, column)) in enumerate(zip(two, corners, strict=True)):
            box = np.s_[row : row + DIGIT, column : column + DIGIT]
            canvases[number, 0][box] = images[index, 0]
            masks[number, digit][box] = 1
    return Canvases(canvases, masks, classes[torch.tensor(np.array(chosen))])


@functools.lru_cache(maxsize=1)
def far_digits(train: int, validation: int, test: int, size: int, gap: int) -> tuple[Canvases, Canvases, Canvases]:
    """Canvases to train, to validate and to test, with no digit in two of them."""
    images, classes, known, unknown = sklearn_digits()
    fourth = len(known) // 4
    parts = (known[fourth:], train), (known[:fourth], validation), (unknown, test)
    training, validating, testing = (
        pairs(images[part], classes[part], count, size, gap, seed) for seed, (part, count) in enumerate(parts)
    )
    return training, validating, testing


def turned(canvases: Canvases, quarters: int) -> Canvases:
    """Canvases turned to the left by so many quarters."""
    images, masks = (x.rot90(quarters, (2, 3)) for x in canvases[:2])
    return Canvases(images, masks, canvases.classes)


def from_one_digit(training: Canvases, testing: Canvases) -> float:
    """Percent of test digits that are labelled right by what is most frequent in training for a digit of its class."""
    counts = torch.zeros(10, 2)
    counts.index_put_((training.classes.flatten(), training.labels.flatten()), torch.tensor(1.0), accumulate=True)
    return 100 * float((counts.argmax(1)[testing.classes] == testing.labels).float().mean())
