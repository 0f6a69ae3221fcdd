"""Windows over grids as shifted views of padded images."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import cached

if TYPE_CHECKING:
    from jaxtyping import Int, Num


class Block(NamedTuple):
    """Offsets of a window that fill a box.

    ``start`` is the first offset, ``counts`` the number of offsets along every axis, and ``offsets`` the slice of these
    offsets among all offsets of the window.
    """

    start: tuple[int, ...]
    counts: tuple[int, ...]
    offsets: slice


@dataclass(frozen=True)
class Shifts:
    """The offsets of a window, counted from its first corner, in the order of ``Window.offsets``.

    Images are (..., *spatial) with ``dim`` spatial axes. Windows reach ``radius`` pixels to either side. ``blocks``
    contain all offsets: a square is one block; a disk has one block for each of its rows.
    """

    radius: int
    dim: int
    blocks: tuple[Block, ...]

    def _axes(self, x: Tensor) -> range:
        return range(x.ndim - self.dim, x.ndim)

    def pad(self, x: Tensor, circular: bool = False) -> Tensor:
        """Pad images by ``radius`` pixels at every side: with zeros, or with pixels of the opposite side
        (``circular``)."""
        if not circular:
            return F.pad(x, [self.radius] * (2 * self.dim))
        for axis in self._axes(x):
            last = x.narrow(axis, x.shape[axis] - self.radius, self.radius)
            x = torch.cat([last, x, x.narrow(axis, 0, self.radius)], axis)
        return x

    def unpad(self, x: Tensor, circular: bool = False) -> Tensor:
        """The adjoint of :meth:`pad`: gradients of padding are added to those of the pixels it was copied from."""
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
        """The image shifted by every offset: views (..., *spatial) of padded images. All operations here support
        ``torch.func``."""
        views = []
        for block in self.blocks:
            found = [padded]
            for axis, start, count in zip(self._axes(padded), block.start, block.counts, strict=True):
                side = padded.shape[axis] - 2 * self.radius
                found = [x.narrow(axis, step, side) for x in found for step in range(start, start + count)]
            views += found
        return views


def shifts(kernel_size: int, selection: Sequence[int], dim: int) -> Shifts:
    """The shifts of a square window, or of the offsets of ``selection`` in it (flat indices; empty means all)."""
    return _shifts(kernel_size, tuple(selection), dim)


@cached(maxsize=32)
def _shifts(kernel_size: int, selection: tuple[int, ...], dim: int) -> Shifts:
    every = list(itertools.product(*[range(kernel_size)] * dim))
    if not selection:
        whole = Block((0,) * dim, (kernel_size,) * dim, slice(0, len(every)))
        return Shifts(kernel_size // 2, dim, (whole,))
    blocks, first = [], 0
    for end in range(1, len(selection) + 1):  # offsets of a row are contiguous
        if end == len(selection) or selection[end] // kernel_size != selection[first] // kernel_size:
            counts = (*[1] * (dim - 1), end - first)
            blocks.append(Block(every[selection[first]], counts, slice(first, end)))
            first = end
    return Shifts(kernel_size // 2, dim, tuple(blocks))


def in_square(x: Num[Tensor, "... offsets"], shifts: Shifts, side: int) -> Num[Tensor, "... square"]:
    """Place values of a window's offsets in the square around it, which has side^dim offsets, with zeros at others."""
    size, counts = side**shifts.dim, [block.offsets.stop - block.offsets.start for block in shifts.blocks]
    starts = [functools.reduce(lambda flat, step: flat * side + step, block.start, 0) for block in shifts.blocks]
    if counts == [size]:
        return x
    each = zip(shifts.blocks, starts, counts, strict=True)
    return functools.reduce(
        torch.add, [F.pad(x[..., block.offsets], (start, size - start - count)) for block, start, count in each]
    )


def offsets_of_pairs(spatial: Sequence[int], device: torch.device) -> Int[Tensor, "query_pixels key_pixels"]:
    """The index of the offset of each pair of pixels among all offsets of a global window."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in spatial), indexing="ij")
    flat: Tensor | int = 0
    for n, axis in zip(spatial, axes, strict=True):
        along = axis.flatten()
        flat = flat * (2 * n - 1) + (along[None] - along[:, None] + n - 1)
    return torch.as_tensor(flat)
