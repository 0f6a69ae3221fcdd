"""Windows over grids as shifted views of padded images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import cached

if TYPE_CHECKING:
    from jaxtyping import Int


class Block(NamedTuple):
    """Offsets of a window that fill a box.

    ``start`` is the first offset, ``counts`` the number of offsets along every axis, and ``first`` the number of the
    first offset among all offsets of the window.
    """

    start: tuple[int, ...]
    counts: tuple[int, ...]
    first: int

    @property
    def offsets(self) -> slice:
        """The slice of these offsets among all offsets of the window."""
        return slice(self.first, self.first + math.prod(self.counts))


@dataclass(frozen=True)
class Shifts:
    """The offsets of a window, counted from its first corner, in the order of ``Window.offsets``.

    Images are (..., *spatial) with ``dim`` spatial axes. Windows reach ``radius`` pixels to either side. ``blocks``
    contain all offsets: a square is one block; a disk has one block for each of its rows.
    """

    radius: int
    dim: int
    blocks: tuple[Block, ...]

    def pad(self, x: Tensor, step: int = 1, circular: bool = False) -> Tensor:
        """Pad images by ``step * radius`` pixels at every side: with zeros, or with pixels of the opposite side
        (``circular``)."""
        reach = step * self.radius
        if not circular:
            return F.pad(x, [reach] * (2 * self.dim))
        for axis in range(x.ndim - self.dim, x.ndim):
            last = x.narrow(axis, x.shape[axis] - reach, reach)
            x = torch.cat([last, x, x.narrow(axis, 0, reach)], axis)
        return x

    def to_square(self, x: Tensor, axis: int, fill: Tensor | None = None) -> Tensor:
        """Place values of the window's offsets, which are along an axis, in the square around the window.

        Other offsets of the square get ``fill``, of size 1 along the axis; ``None`` means zeros.
        """
        if len(self.blocks) == 1:
            return x
        fill = torch.zeros_like(x.narrow(axis, 0, 1)) if fill is None else fill
        return torch.cat([x, fill], axis).index_select(axis, _order_in_square(self, x.device))


@cached(maxsize=32)
def _order_in_square(shifts: Shifts, device: torch.device) -> Int[Tensor, " square"]:
    """The number of each offset of the square among the offsets of the window; other offsets have the number after the
    last."""
    side, (*_, last) = 2 * shifts.radius + 1, shifts.blocks
    order = torch.full([side] * shifts.dim, last.offsets.stop, device=device)
    for block in shifts.blocks:
        box = tuple(slice(start, start + count) for start, count in zip(block.start, block.counts, strict=True))
        order[box] = torch.arange(block.offsets.start, block.offsets.stop, device=device).view(block.counts)
    return order.flatten()


def shifts(kernel_size: int, selection: Sequence[int], dim: int) -> Shifts:
    """The shifts of a square window, or of the offsets of ``selection`` in it (flat indices; empty means all)."""
    return _shifts(kernel_size, tuple(selection), dim)


@cached(maxsize=32)
def _shifts(kernel_size: int, selection: tuple[int, ...], dim: int) -> Shifts:
    every = list(itertools.product(*[range(kernel_size)] * dim))
    if len(selection) in (0, len(every)):
        whole = Block((0,) * dim, (kernel_size,) * dim, 0)
        return Shifts(kernel_size // 2, dim, (whole,))
    blocks, first = [], 0
    for end in range(1, len(selection) + 1):  # offsets of a row are contiguous
        if end == len(selection) or selection[end] // kernel_size != selection[first] // kernel_size:
            counts = (*[1] * (dim - 1), end - first)
            blocks.append(Block(every[selection[first]], counts, first))
            first = end
    return Shifts(kernel_size // 2, dim, tuple(blocks))


def offsets_of_pairs(spatial: Sequence[int], device: torch.device) -> Int[Tensor, "query_pixels key_pixels"]:
    """The index of the offset of each pair of pixels among all offsets of a global window."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in spatial), indexing="ij")
    flat: Tensor | int = 0
    for n, axis in zip(spatial, axes, strict=True):
        along = axis.flatten()
        flat = flat * (2 * n - 1) + (along[None] - along[:, None] + n - 1)
    return torch.as_tensor(flat)
