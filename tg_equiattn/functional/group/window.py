"""An odd window over grids as shifted views of padded images."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
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

    Images are (..., *spatial, *tail), ``tail`` 0 or 1 axes behind ``dim`` spatial ones; windows reach ``radius`` pixels
    to either side. ``blocks`` are all places: a square is one box, a disk the rows it has."""

    radius: int
    dim: int
    blocks: tuple[Block, ...]
    tail: int = 0

    def _first(self, x: Tensor) -> int:
        return x.ndim - self.tail - self.dim

    def _axes(self, x: Tensor) -> range:
        return range(self._first(x), x.ndim - self.tail)

    def pad(self, x: Tensor, circular: bool = False, outside: float = 0.0) -> Tensor:
        """Images with as many pixels at every side as windows reach out: ``outside``, or those of the other side."""
        if not circular:
            return F.pad(x, [0, 0] * self.tail + [self.radius] * (2 * self.dim), value=outside)
        for axis in self._axes(x):
            last = x.narrow(axis, x.shape[axis] - self.radius, self.radius)
            x = torch.cat([last, x, x.narrow(axis, 0, self.radius)], axis)
        return x

    def unpad(self, x: Tensor, circular: bool = False) -> Tensor:
        """The adjoint of :meth:`pad`, which adds up what went to several places."""
        for axis in self._axes(x):
            side = x.shape[axis] - 2 * self.radius
            inner = x.narrow(axis, self.radius, side)
            if circular:
                inner = inner.clone()
                inner.narrow(axis, side - self.radius, self.radius).add_(x.narrow(axis, 0, self.radius))
                inner.narrow(axis, 0, self.radius).add_(x.narrow(axis, side + self.radius, self.radius))
            x = inner
        return x

    def within(self, padded: Tensor, block: Block) -> Tensor:
        """What the places of a block hold: a view (..., *counts, *spatial, *tail) of padded images."""
        first = self._first(padded)
        for axis, start, count in zip(self._axes(padded), block.start, block.counts, strict=True):
            side = padded.shape[axis] - 2 * self.radius
            padded = padded.narrow(axis, start, side + count - 1).unfold(axis, side, 1)
        return padded.movedim(first + self.dim, -1) if self.tail else padded

    def views(self, padded: Tensor) -> list[Tensor]:
        """What every place holds: views (..., *spatial, *tail) of padded images, by operations that transforms of
        ``torch.func`` have rules for."""
        views = []
        for block in self.blocks:
            parts = [padded]
            for axis, start, count in zip(self._axes(padded), block.start, block.counts, strict=True):
                side = padded.shape[axis] - 2 * self.radius
                parts = [part.narrow(axis, step, side) for part in parts for step in range(start, start + count)]
            views += parts
        return views


def window(kernel_size: int, selection: Sequence[int], dim: int, tail: int = 0) -> Window:
    """The window of a side, or of the chosen places of it."""
    made = _window.__wrapped__ if torch.compiler.is_compiling() else _window  # dynamo warns of caches
    return made(kernel_size, tuple(selection), dim, tail)


@functools.lru_cache(maxsize=32)
def _window(kernel_size: int, selection: tuple[int, ...], dim: int, tail: int) -> Window:
    every = list(itertools.product(*[range(kernel_size)] * dim))
    if not selection:
        whole = Block((0,) * dim, (kernel_size,) * dim, slice(0, len(every)))
        return Window(kernel_size // 2, dim, (whole,), tail)
    blocks, first = [], 0
    for end in range(1, len(selection) + 1):  # rows are without gaps
        if end == len(selection) or selection[end] // kernel_size != selection[first] // kernel_size:
            counts = (*[1] * (dim - 1), end - first)
            blocks.append(Block(every[selection[first]], counts, slice(first, end)))
            first = end
    return Window(kernel_size // 2, dim, tuple(blocks), tail)


def in_square(x: Tensor, places: Window, side: int) -> Tensor:
    """What belongs to the places of a window (..., D), among those of the square around it (..., side^dim), zero at
    the others."""
    size, counts = side**places.dim, [block.places.stop - block.places.start for block in places.blocks]
    starts = [functools.reduce(lambda flat, step: flat * side + step, block.start, 0) for block in places.blocks]
    if counts == [size]:
        return x
    if torch.compiler.is_compiling():  # one expression; of a cat every part would be a launch
        each = zip(places.blocks, starts, counts, strict=True)
        rows = [F.pad(x[..., block.places], (start, size - start - count)) for block, start, count in each]
        return functools.reduce(torch.add, rows)
    none, parts, end = x.new_zeros(*x.shape[:-1], size), [], 0
    for start, row in zip(starts, x.split(counts, -1), strict=True):
        parts += [none[..., end:start], row]
        end = start + row.shape[-1]
    return torch.cat([*parts, none[..., end:]], -1)


def places_of_pairs(spatial: Sequence[int], device: torch.device, queries: slice = slice(None)) -> Tensor:
    """Where the offset of each pair (query, key) of pixels is among those of all pairs, (queries, pixels)."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in spatial), indexing="ij")
    flat: Tensor | int = 0
    for n, axis in zip(spatial, axes, strict=True):
        along = axis.flatten()
        flat = flat * (2 * n - 1) + (along[None] - along[queries, None] + n - 1)
    return torch.as_tensor(flat)
