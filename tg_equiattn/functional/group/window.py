"""An odd window over grids as shifted views of padded images."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """Places of a window that fill a box: the step to the first of them, how many along every axis, and which they are
    in the order of places."""

    start: tuple[int, ...]
    counts: tuple[int, ...]
    places: slice


@dataclass(frozen=True)
class Window:
    """The places of a window, counted from its first corner, in the order of ``Neighbourhood.offsets``.

    Attributes:
        radius: pixels on either side of the middle.
        dim: axes of the grid.
        blocks: all places: a square is one box, a disk the rows it has.
    """

    radius: int
    dim: int
    blocks: tuple[Block, ...]

    def pad(self, x: Tensor, circular: bool = False) -> Tensor:
        """(..., *spatial) with as many pixels at every side as windows reach out, zeros or those of the other side."""
        sides = [self.radius] * (2 * self.dim)
        if not circular:
            return F.pad(x, sides)
        return F.pad(x.flatten(0, -self.dim - 1)[None], sides, mode="circular")[0].unflatten(0, x.shape[: -self.dim])

    def unpad(self, x: Tensor, circular: bool = False) -> Tensor:
        """The adjoint of :meth:`pad`, which adds up what went to several places."""
        for axis in range(x.ndim - self.dim, x.ndim):
            side = x.shape[axis] - 2 * self.radius
            inner = x.narrow(axis, self.radius, side)
            if circular:
                inner = inner.clone()
                inner.narrow(axis, side - self.radius, self.radius).add_(x.narrow(axis, 0, self.radius))
                inner.narrow(axis, 0, self.radius).add_(x.narrow(axis, side + self.radius, self.radius))
            x = inner
        return x

    def within(self, padded: Tensor, block: Block) -> Tensor:
        """What the places of a block hold: a view (..., *counts, *spatial) of (..., *padded spatial)."""
        first = padded.ndim - self.dim
        for axis, (start, count) in enumerate(zip(block.start, block.counts, strict=True), start=first):
            side = padded.shape[axis] - 2 * self.radius
            padded = padded.narrow(axis, start, side + count - 1).unfold(axis, side, 1)
        return padded

    def views(self, padded: Tensor) -> list[Tensor]:
        """What every place holds: views (..., *spatial) of (..., *padded spatial)."""
        return [view for block in self.blocks for view in self._split(self.within(padded, block))]

    def slices(self, padded: Tensor) -> list[Tensor]:
        """As :meth:`views`, by operations that transforms of ``torch.func`` have rules for."""
        return [self._at(padded, block, place) for block in self.blocks for place in _grid(block.counts)]

    def _at(self, padded: Tensor, block: Block, place: tuple[int, ...]) -> Tensor:
        for axis, step in enumerate(map(sum, zip(block.start, place, strict=True)), start=padded.ndim - self.dim):
            padded = padded.narrow(axis, step, padded.shape[axis] - 2 * self.radius)
        return padded

    def _split(self, x: Tensor) -> list[Tensor]:
        """(..., *counts, *spatial) into its places."""
        parts, axis = [x], -2 * self.dim
        for _ in range(self.dim):
            parts = [one for part in parts for one in part.unbind(axis)]
            axis += 1
        return parts


def _grid(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, counts))


def window(kernel_size: int, selection: Sequence[int], dim: int) -> Window:
    """The window of a side, or of the chosen places of it."""
    return _window(kernel_size, tuple(selection), dim)


@functools.lru_cache(maxsize=32)
def _window(kernel_size: int, selection: tuple[int, ...], dim: int) -> Window:
    every = list(_grid((kernel_size,) * dim))
    if not selection:
        whole = Block((0,) * dim, (kernel_size,) * dim, slice(0, len(every)))
        return Window(kernel_size // 2, dim, (whole,))
    blocks = []
    for _, row in itertools.groupby(enumerate(selection), lambda pair: pair[1] // kernel_size):  # without gaps
        places = [place for place, _ in row]
        start = every[selection[places[0]]]
        blocks.append(Block(start, (*[1] * (dim - 1), len(places)), slice(places[0], places[-1] + 1)))
    return Window(kernel_size // 2, dim, tuple(blocks))
