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

from ...modes import cached


class Block(NamedTuple):
    """Offsets of a window that fill a box.

    ``start`` is the first of them, ``counts`` their number along every axis, ``offsets`` their slice in the order of
    the window's offsets.
    """

    start: tuple[int, ...]
    counts: tuple[int, ...]
    offsets: slice


@dataclass(frozen=True)
class Shifts:
    """The offsets of a window, counted from its first corner, in the order of ``Window.offsets``.

    Images are (..., *spatial) with ``dim`` spatial axes; windows reach ``radius`` pixels to either side. ``blocks``
    cover all offsets: a square is one block, a disk has one for each of its rows.
    """

    radius: int
    dim: int
    blocks: tuple[Block, ...]

    def _axes(self, x: Tensor) -> range:
        return range(x.ndim - self.dim, x.ndim)

    def pad(self, x: Tensor, circular: bool = False) -> Tensor:
        """Images with as many pixels at every side as windows reach out: zeros, or those of the other side."""
        if not circular:
            return F.pad(x, [self.radius] * (2 * self.dim))
        for axis in self._axes(x):
            last = x.narrow(axis, x.shape[axis] - self.radius, self.radius)
            x = torch.cat([last, x, x.narrow(axis, 0, self.radius)], axis)
        return x

    def unpad(self, x: Tensor, circular: bool = False) -> Tensor:
        """The adjoint of :meth:`pad`, which adds up what went to several pixels."""
        for axis in self._axes(x):
            side = x.shape[axis] - 2 * self.radius
            inner = x.narrow(axis, self.radius, side)
            if circular:
                inner = inner.clone()
                inner.narrow(axis, side - self.radius, self.radius).add_(x.narrow(axis, 0, self.radius))
                inner.narrow(axis, 0, self.radius).add_(x.narrow(axis, side + self.radius, self.radius))
            x = inner
        return x

    def views(self, padded: Tensor) -> list[Tensor]:
        """What every offset sees: views (..., *spatial) of padded images, by operations that transforms of
        ``torch.func`` have rules for."""
        views = []
        for block in self.blocks:
            found = [padded]
            for axis, start, count in zip(self._axes(padded), block.start, block.counts, strict=True):
                side = padded.shape[axis] - 2 * self.radius
                found = [x.narrow(axis, step, side) for x in found for step in range(start, start + count)]
            views += found
        return views


def shifts(kernel_size: int, selection: Sequence[int], dim: int) -> Shifts:
    """The window of a side, or of the chosen offsets of it."""
    return _shifts(kernel_size, tuple(selection), dim)


@cached(maxsize=32)
def _shifts(kernel_size: int, selection: tuple[int, ...], dim: int) -> Shifts:
    every = list(itertools.product(*[range(kernel_size)] * dim))
    if not selection:
        whole = Block((0,) * dim, (kernel_size,) * dim, slice(0, len(every)))
        return Shifts(kernel_size // 2, dim, (whole,))
    blocks, first = [], 0
    for end in range(1, len(selection) + 1):  # rows are without gaps
        if end == len(selection) or selection[end] // kernel_size != selection[first] // kernel_size:
            counts = (*[1] * (dim - 1), end - first)
            blocks.append(Block(every[selection[first]], counts, slice(first, end)))
            first = end
    return Shifts(kernel_size // 2, dim, tuple(blocks))


def in_square(x: Tensor, shifts: Shifts, side: int) -> Tensor:
    """Values of the offsets of a window (..., D), among those of the square around it (..., side^dim), zero at the
    others."""
    size, counts = side**shifts.dim, [block.offsets.stop - block.offsets.start for block in shifts.blocks]
    starts = [functools.reduce(lambda flat, step: flat * side + step, block.start, 0) for block in shifts.blocks]
    if counts == [size]:
        return x
    if torch.compiler.is_compiling():  # one expression; of a cat every operand would be a launch
        each = zip(shifts.blocks, starts, counts, strict=True)
        rows = [F.pad(x[..., block.offsets], (start, size - start - count)) for block, start, count in each]
        return functools.reduce(torch.add, rows)
    none, pieces, end = x.new_zeros(*x.shape[:-1], size), [], 0
    for start, row in zip(starts, x.split(counts, -1), strict=True):
        pieces += [none[..., end:start], row]
        end = start + row.shape[-1]
    return torch.cat([*pieces, none[..., end:]], -1)


def offsets_of_pairs(spatial: Sequence[int], device: torch.device) -> Tensor:
    """The number of each pair's offset, (query pixels, key pixels), among the offsets of all pairs of pixels."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in spatial), indexing="ij")
    flat: Tensor | int = 0
    for n, axis in zip(spatial, axes, strict=True):
        along = axis.flatten()
        flat = flat * (2 * n - 1) + (along[None] - along[:, None] + n - 1)
    return torch.as_tensor(flat)
