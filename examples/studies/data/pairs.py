"""Canvases on which two of several patterns are equal up to a quarter turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 4
"""pixels a side of a pattern"""


class Canvases(NamedTuple):
    """Pictures (N, 1, 4 S, 4 S), of S x S cells; the cells that hold patterns, (N, cells); which pair is equal, (N,):
    its number in :func:`pairs`, and of two cells whether they are."""

    images: Tensor
    places: Tensor
    labels: Tensor


def pairs(cells: int) -> Tensor:
    """All pairs of cells, (pairs, 2)."""
    return torch.combinations(torch.arange(cells), 2)


def draw(count: int, cells: int, side: int, seed: int) -> Canvases:
    """New canvases of side x side cells, ``cells`` of which, anywhere, hold 4 x 4 pixels of normal noise; the others
    are empty. One pair is equal up to a turn by 0, 90, 180 or 270 degrees; of two cells half are, and half are not."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(count, cells, SIDE, SIDE, generator=generator)
    if cells == 2:
        labels = torch.randint(2, (count,), generator=generator)
        chosen, equal = torch.tensor([[0, 1]]).expand(count, 2), labels == 1
    else:
        labels = torch.randint(len(pairs(cells)), (count,), generator=generator)
        chosen, equal = pairs(cells)[labels], torch.ones(count, dtype=torch.bool)
    turns, each = torch.randint(4, (count,), generator=generator), torch.arange(count)
    first, second = chosen.T
    turned = torch.stack([patterns[each, first].rot90(quarters, (1, 2)) for quarters in range(4)], 1)[each, turns]
    patterns[each[equal], second[equal]] = turned[equal]
    places = torch.rand(count, side * side, generator=generator).argsort(1)[:, :cells]
    canvas = torch.zeros(count, side * side, SIDE, SIDE)
    canvas[each[:, None], places] = patterns
    images = canvas.unflatten(1, (side, side)).transpose(2, 3).reshape(count, 1, SIDE * side, SIDE * side)
    return Canvases(images, places, labels)
