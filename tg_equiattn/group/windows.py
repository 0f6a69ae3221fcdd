"""Windows over images: masks, offsets as shifts of padded images, and images whose rows are joined.

Sizes are those of :mod:`.definition`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, hashed_dropout
from ..grids import Window
from ..shapes import Bool, Float, Int
from ..torch_state import cached, is_jit_traced

# Score of a masked key. It is finite because minus infinity gives NaN for queries whose window has no valid key.
MASKED_SCORE = -1e30


class Checked(NamedTuple):
    """A mask that is checked, as modules within a block get it."""

    pixels: Bool[Tensor, "#B *spatial"]


Mask = Tensor | Checked | None


def enter(x: Tensor, mask: Mask, axis: int = 3, name: str = "mask") -> tuple[Tensor, Checked | None]:
    """Set masked pixels of features to zero, and check the mask unless it is checked. Pixel axes begin at ``axis``."""
    if mask is not None and not isinstance(mask, Checked):
        checks.pixel_mask(mask, x.shape[0], x.shape[axis:], x.device, name)
        mask = Checked(mask)
    return zero_where_masked(x, mask), mask


def leave(x: Tensor, mask: Mask) -> Tensor:
    """Set masked pixels of an output to zero. Within a block, the next module does so at its start."""
    return x if isinstance(mask, Checked) else zero_where_masked(x, mask)


def fill_where_masked(x: Tensor, mask: Mask, value: float) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to a value; ``mask``, (B or 1, *spatial), is true at valid
    pixels."""
    if mask is None:
        return x
    pixels = mask.pixels if isinstance(mask, Checked) else mask
    return x.masked_fill(~pixels.view(pixels.shape[0], *[1] * (x.ndim - pixels.ndim), *pixels.shape[1:]), value)


def zero_where_masked(x: Tensor, mask: Mask) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to zero."""
    return x if mask is None else fill_where_masked(x, mask, 0.0)


def every_second(x: Tensor, first: tuple[int, ...]) -> Tensor:
    """Every second pixel of images (..., *spatial), from the pixel ``first`` on. Odd sides are padded by a zero."""
    x = F.pad(x, [n for side in x.shape[: -len(first) - 1 : -1] for n in (0, side % 2)])
    every: list[Any] = [slice(n, None, 2) for n in first]
    return x[(..., *every)]


def interleaved(parts: Sequence[Tensor], spatial: Sequence[int]) -> Tensor:
    """The images of which :func:`every_second` gives the parts, in the order of their first pixels."""
    dim = len(spatial)
    x = torch.stack(list(parts), -1).unflatten(-1, [2] * dim)
    lead = x.ndim - 2 * dim
    x = x.permute([*range(lead), *(lead + axis + dim * n for axis in range(dim) for n in (0, 1))])
    for axis, side in enumerate(spatial, lead):
        x = x.flatten(axis, axis + 1).narrow(axis, 0, side)
    return x


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

    Images are (..., *spatial). Windows have ``sides`` pixels along each axis; neighbouring offsets are ``step`` pixels
    apart, so that a window reaches ``reach`` pixels to either side. ``blocks`` contain all offsets: a square is one
    block; a disk has one block for each of its rows.
    """

    sides: tuple[int, ...]
    blocks: tuple[Block, ...]
    step: int
    reach: tuple[int, ...]
    dim: int

    def pad(self, x: Tensor, circular: bool = False, value: float = 0.0, rows: int = 0) -> Tensor:
        """Pad images for the windows: with a value, or with pixels of the opposite side (``circular``). Add some rows
        at the end."""
        reach = self.reach
        if circular:
            for axis, n in enumerate(reach, x.ndim - self.dim):
                x = torch.cat([x.narrow(axis, x.shape[axis] - n, n), x, x.narrow(axis, 0, n)], axis)
            reach = (0,) * self.dim
        *depth, height, width = reach
        return F.pad(x, (width, width, height, height + rows, *depth, *depth), value=value)

    def to_square(self, x: Float[Tensor, "*lead D"], outside: float = 0.0) -> Float[Tensor, "*lead *window"]:
        """Place values of the window's offsets in the square around the window, with a number at other offsets."""
        if self.blocks[-1].offsets.stop < math.prod(self.sides):
            x = F.pad(x, (0, 1), value=outside).index_select(-1, _order_in_square(self, x.device))
        return x.unflatten(-1, self.sides)


@cached(maxsize=32)
def _order_in_square(shifts: Shifts, device: torch.device) -> Int[Tensor, " square"]:
    """The number of each offset of the square among the offsets of the window; other offsets have the number after the
    last."""
    order = torch.full(shifts.sides, shifts.blocks[-1].offsets.stop, device=device)
    for block in shifts.blocks:
        box = tuple(slice(start, start + count) for start, count in zip(block.start, block.counts, strict=True))
        order[box] = torch.arange(block.offsets.start, block.offsets.stop, device=device).view(block.counts)
    return order.flatten()


@cached(maxsize=32)
def shifts(sides: tuple[int, ...], selection: tuple[int, ...], step: int = 1) -> Shifts:
    """The shifts of a square window, or of the offsets of ``selection`` in it (flat indices; empty means all)."""
    every, dim, side = list(itertools.product(*map(range, sides))), len(sides), sides[-1]
    reach = tuple(step * (side // 2) for side in sides)
    if len(selection) in (0, len(every)):
        return Shifts(sides, (Block((0,) * dim, sides, 0),), step, reach, dim)
    blocks: list[Block] = []
    for row in dict.fromkeys(n // side for n in selection):
        some = [n for n in selection if n // side == row]  # they are contiguous
        blocks.append(Block(every[some[0]], (*[1] * (dim - 1), len(some)), selection.index(some[0])))
    return Shifts(sides, tuple(blocks), step, reach, dim)


def offsets_of_pairs(spatial: Sequence[int], device: torch.device) -> Int[Tensor, "query_pixels key_pixels"]:
    """The index of the offset of each pair of pixels among all offsets of a global window."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in spatial), indexing="ij")
    flat: Tensor | int = 0
    for n, axis in zip(spatial, axes, strict=True):
        along = axis.flatten()
        flat = flat * (2 * n - 1) + (along[None] - along[:, None] + n - 1)
    return torch.as_tensor(flat)


def key_elements(index: Tensor | None) -> int:
    """The size S of the axis of key elements."""
    return 1 if index is None else index.shape[-1]


def query_elements(index: Tensor | None) -> int:
    """The size T of the axis of query elements."""
    return 1 if index is None or index.ndim == 2 else index.shape[1]


def key_penalty(
    query: Tensor, mask: Bool[Tensor, "#B *pixels"] | None, circular: bool = True
) -> Float[Tensor, "#B *pixels"] | None:
    """Numbers that are added to the scores of keys; None if all windows have valid keys only."""
    if mask is not None:
        return query.new_zeros(mask.shape).masked_fill(~mask, MASKED_SCORE)
    return None if circular else query.new_zeros(1, *query.shape[4:])


def pixel_hashes(
    query: Tensor, weights: Sequence[int], seed: Tensor | None
) -> tuple[Int[Tensor, "B e *spatial"], Int[Tensor, "*weights"]] | tuple[None, None]:
    """The hashes of queries and of the ``weights`` of each for dropout; None without a seed."""
    if seed is None:
        return None, None
    (batch, heads), spatial = query.shape[:2], query.shape[4:]
    row, column = hashed_dropout.hashes(batch * heads * math.prod(spatial), math.prod(weights), seed)
    return row.view(batch, heads, *spatial), column.view(weights)


@dataclass(frozen=True)
class FlatImages:
    """Images whose last two axes are one, *flat*, in which the offsets of windows are shifts.

    Rows are as long as those of padded images, ``width`` pixels. Every operation then runs over all rows of a tile at
    once, which halves the time on a CPU. Results beyond the end of a row are finite and are discarded. ``spatial`` is
    the size of an image.
    """

    spatial: tuple[int, ...]
    shifts: Shifts
    circular: bool
    width: int

    def flat(self, x: Tensor) -> Tensor:
        """Join the rows of images (..., *spatial), with zeros after every row."""
        return F.pad(x, (0, 2 * self.shifts.reach[-1])).flatten(-2)

    def images(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return x.unflatten(-1, (-1, self.width)).narrow(-1, 0, self.spatial[-1])

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Pad images (..., *spatial) for the windows and join their rows. One more row at the end serves the windows of
        the discarded pixels of the last row."""
        return self.shifts.pad(x, self.circular, value, 1).flatten(-2)

    def padded_images(self, x: Tensor) -> Tensor:
        """The padded images, whose rows :meth:`padded` has joined."""
        return x.unflatten(-1, (-1, self.width)).narrow(-2, 0, x.shape[-1] // self.width - 1)

    def rows(self, start: int, count: int) -> tuple[tuple, tuple]:
        """The indices of some rows in flat images, and of all rows that their windows cover in padded images."""
        end, more = start + count, 2 * self.shifts.reach[0]
        if self.shifts.dim == 3:
            return (slice(start, end), slice(None)), (slice(start, end + more), slice(None))
        start, end, width = start * self.width, end * self.width, self.width
        return (slice(start, end),), (slice(start, end + (more + 1) * width),)

    def shifted(self, y: Tensor, block: Block) -> Tensor:
        """The pixels of padded images shifted by each offset of a block: a view (..., *counts, *flat)."""
        at, strides = self.shifts, y.stride()
        lead, outer = y.ndim + 1 - at.dim, 2 * at.reach[0]
        steps = [at.step * n for n in (*strides[lead:-1], self.width, 1)]
        first = y.storage_offset() + sum(map(operator.mul, block.start, steps))
        pixels = *[n - outer for n in y.shape[lead:-1]], y.shape[-1] - (2 * at.reach[-2] + 1) * self.width
        return y.as_strided(
            [*y.shape[:lead], *block.counts, *pixels], [*strides[:lead], *steps, *strides[lead:]], first
        )

    def apart(self, y: Float[Tensor, "*lead D *padded"], block: Block) -> Float[Tensor, "*lead *counts *flat"]:
        """The view of :meth:`shifted` if each offset of the window has a padded image of its own."""
        axis = y.ndim - self.shifts.dim
        view, each = self.shifted(y.select(axis, 0), block), y.stride(axis)
        strides, dim = list(view.stride()), self.shifts.dim
        for n in range(dim):
            strides[axis + n] += each * math.prod(block.counts[n + 1 :])
        return y.as_strided(view.shape, strides, view.storage_offset() + each * block.first)

    def views(self, y: Tensor) -> list[Tensor]:
        """The pixels of padded images shifted by every offset: views (..., *flat)."""
        views, axis = [], y.ndim + 1 - self.shifts.dim
        for block in self.shifts.blocks:
            each = [self.shifted(y, block)]
            for _ in block.counts:
                each = [view for x in each for view in x.unbind(axis)]
            views += each
        return views


def flat_images(
    spatial: Sequence[int], sides: Sequence[int], selection: Sequence[int], circular: bool, step: int
) -> FlatImages:
    at = shifts(tuple(sides), tuple(selection), step)
    return FlatImages(tuple(spatial), at, circular, spatial[-1] + 2 * at.reach[-1])


def flat_operands(query, key, value, offset_table, element_table, index, mask, seed, window: Window, step=1) -> tuple:
    """The first operands of :func:`.windowed.attention_by_tiles`: images with joined rows, and the window."""
    spatial = [int(n) for n in query.shape[4:]] if is_jit_traced() else query.shape[4:]  # has no lists of sizes
    geometry: Any = spatial, window.sides, window.selection, window.circular, step
    at, axis = flat_images(*geometry), 4 if index is None else 3
    ones = 0, 2 * at.shifts.reach[-1], *[0] * (2 * window.dim - 1), 1  # one channel is one
    flat = F.pad(query.transpose(2, 3), ones, value=1.0).flatten(-2)
    keys, values = at.padded(key).unsqueeze(axis), at.padded(value).unsqueeze(axis)
    penalty = key_penalty(query, mask, window.circular)
    penalty = None if penalty is None else at.padded(penalty, MASKED_SCORE)[:, None, None, None]
    weights = offset_table.shape[1], key_elements(index), offset_table.shape[2]
    row, column = pixel_hashes(query, weights, seed)
    if row is not None and column is not None:
        row, column = at.flat(row)[:, :, None, None, None], column[(...,) + (None,) * (window.dim - 1)]
    return flat, keys, values, offset_table, element_table, index, penalty, row, column, *geometry
