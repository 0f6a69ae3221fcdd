"""Images whose last two axes are one, in which the offsets of windows are shifts, and products at these offsets.

In the joined axis, *flat*, rows are as long as those of padded images. Every operation then runs over all rows of a
tile at once, which halves the time on a CPU. Results beyond the end of a row are finite and are discarded.

There are three products: :class:`Dot`, :class:`Sum`, and the adjoint of the latter, :class:`Scatter`. The derivatives
of each consist of the other two, so that they exist in any order. Features ``x`` of queries are (b, e, C, H or 1,
*flat), features ``y`` of keys (b, e, C, H or 1, S, *padded), and weights (b, e, H, S, D, *flat); see
:mod:`.definition` for the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .shifts import Block, Shifts


@dataclass(frozen=True)
class FlatImages:
    """Images of a size, with the offsets of windows; neighbouring offsets of a window are ``step`` pixels apart."""

    spatial: tuple[int, ...]
    shifts: Shifts
    circular: bool
    step: int

    @property
    def margin(self) -> int:
        """The number of pixels by which images are padded at every side."""
        return self.step * self.shifts.radius

    @property
    def width(self) -> int:
        """The number of pixels in a padded row."""
        return self.spatial[-1] + 2 * self.margin

    def flat(self, x: Tensor) -> Tensor:
        """Join the rows of images (..., *spatial), with zeros after every row."""
        return F.pad(x, (0, 2 * self.margin)).flatten(-2)

    def images(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return x.unflatten(-1, (-1, self.width)).narrow(-1, 0, self.spatial[-1])

    def padded(self, x: Tensor) -> Tensor:
        """Pad images (..., *spatial) for the windows and join their rows. Zeros at the end serve the windows of the
        discarded pixels of the last row."""
        return F.pad(self.shifts.pad(x, self.step, self.circular).flatten(-2), (0, 2 * self.margin))

    def padded_images(self, x: Tensor) -> Tensor:
        """The padded images, whose rows :meth:`padded` has joined."""
        return x.narrow(-1, 0, x.shape[-1] - 2 * self.margin).unflatten(-1, (-1, self.width))

    def rows(self, start: int, count: int) -> tuple[tuple, tuple]:
        """The indices of a run of rows in flat images, and of all rows that its windows cover in padded images."""
        end, more, outer = start + count, 2 * self.margin, self.shifts.dim - 2
        if outer:
            return (slice(start, end), slice(None)), (slice(start, end + more), slice(None))
        start, end, width = start * self.width, end * self.width, self.width
        return (slice(start, end),), (slice(start, end + more * width + more),)

    def shifted(self, y: Tensor, block: Block) -> Tensor:
        """The pixels of padded images shifted by each offset of a block: a view (..., *counts, *flat)."""
        margin, lead, strides = 2 * self.margin, y.ndim + 1 - self.shifts.dim, y.stride()
        outer = y.shape[lead:-1]
        steps = [self.step * n for n in (*strides[lead:-1], self.width, 1)]
        first = y.storage_offset() + sum(n * step for n, step in zip(block.start, steps, strict=True))
        pixels = *(n - margin for n in outer), y.shape[-1] - margin * (self.width + 1)
        return y.as_strided(
            [*y.shape[:lead], *block.counts, *pixels], [*strides[:lead], *steps, *strides[lead:]], first
        )

    def views(self, y: Tensor) -> list[Tensor]:
        """The pixels of padded images shifted by every offset: views (..., *flat)."""
        views, axis = [], y.ndim + 1 - self.shifts.dim
        for block in self.shifts.blocks:
            some = [self.shifted(y, block)]
            for _ in block.counts:
                some = [view for x in some for view in x.unbind(axis)]
            views += some
        return views


def _of_block(weight: Tensor, block: Block) -> Tensor:
    """Weights of the offsets of a block, (b, e, H, S, *counts, *flat)."""
    return weight[:, :, :, :, block.offsets].unflatten(4, block.counts)


def _by_offset(weight: Tensor) -> Sequence[Tensor]:
    """Weights of one key element for each offset, (b, e, 1, H, *flat), which broadcast with features."""
    return weight.squeeze(3).unsqueeze(2).unbind(4)


class Dot(torch.autograd.Function):
    """start + sum_c x_c y_c at every offset + penalty. It is written into the memory of ``start``."""

    @staticmethod
    def forward(ctx: Any, start: Tensor | None, x: Tensor, y: Tensor, penalty: Tensor | None, at: FlatImages) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.at, ctx.started, offsets = at, start is not None, at.shifts.blocks[-1].offsets.stop
        shape = *x.shape[:2], max(x.shape[3], y.shape[3]), y.shape[4], offsets, *x.shape[4:]
        total = x.new_empty(shape) if start is None else start.detach()  # the operation that made it has not saved it
        features = x[(slice(None),) * 4 + (None,) * (1 + at.shifts.dim)].unbind(2)
        for block in at.shifts.blocks:
            some = _of_block(total, block)
            for c, (one, other) in enumerate(zip(features, at.shifted(y, block).unbind(2), strict=True)):
                some.addcmul_(one, other) if c or ctx.started else torch.mul(one, other, out=some)
            if penalty is not None:
                some += at.shifted(penalty, block)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        to_x, to_y = Sum.apply(grad, y, ctx.at), Scatter.apply(grad, x, y.shape, ctx.at)
        to_x = to_x if x.shape[3] == grad.shape[2] else to_x.sum(3, keepdim=True)
        return grad if ctx.started else None, to_x, to_y, None, None


class Sum(torch.autograd.Function):
    """The sum over S and D of weights times y. If ``empty``, only derivatives are wanted, and values are left out."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, y: Tensor, at: FlatImages, empty: bool = False) -> Tensor:
        ctx.save_for_backward(weight, y)
        ctx.at = at
        shape = *weight.shape[:2], y.shape[2], weight.shape[2], *weight.shape[5:]
        if empty:
            return weight.new_empty(shape)
        if weight.shape[3] == 1:
            out = weight.new_zeros(shape)
            for one, view in zip(_by_offset(weight), at.views(y.squeeze(4)), strict=True):
                out.addcmul_(one, view)
            return out
        out, products = weight.new_empty(shape), torch.empty_like(weight)
        blocks = [(_of_block(weight, x), _of_block(products, x), at.shifted(y, x).unbind(2)) for x in at.shifts.blocks]
        for c, total in enumerate(out.unbind(2)):
            for one, product, channels in blocks:
                torch.mul(one, channels[c], out=product)
            torch.sum(products, (3, 4), out=total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, y = ctx.saved_tensors
        return Dot.apply(None, grad, y, None, ctx.at), Scatter.apply(weight, grad, y.shape, ctx.at), None, None


class Scatter(torch.autograd.Function):
    """The adjoint of :class:`Sum` in y: weights times x, added to padded images of a shape."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, shape: torch.Size, at: FlatImages) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.at, y = at, weight.new_zeros(shape)
        if weight.shape[3] == 1 and shape[3] == weight.shape[2]:
            for one, view in zip(_by_offset(weight), at.views(y.squeeze(4)), strict=True):
                view.addcmul_(one, x)
            return y
        sums = weight.new_zeros(*weight.shape[:2], x.shape[2], *weight.shape[3:])
        x = x.expand(*x.shape[:3], weight.shape[2], *x.shape[4:])[:, :, :, :, None, None]
        for one, other in zip(weight.unsqueeze(2).unbind(3), x.unbind(3), strict=True):
            sums.addcmul_(one, other)
        for view, one in zip(at.views(y.squeeze(3)), sums.unbind(4), strict=True):
            view += one
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, x = ctx.saved_tensors
        to_x = Sum.apply(weight, grad, ctx.at)
        to_x = to_x if x.shape[3] == weight.shape[2] else to_x.sum(3, keepdim=True)
        return Dot.apply(None, x, grad, None, ctx.at), to_x, None, None
