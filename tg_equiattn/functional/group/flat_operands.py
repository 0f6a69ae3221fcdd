"""Operands of the group attention operator, with the rows of images joined to one flat axis.

The last two axes of images are one axis, *flat*, in which rows are as long as those of padded images. An offset of a
window is then a shift along this axis, and every operation runs over all rows of a chunk at once. This halves the time
on a CPU. Results beyond the end of a row are finite and are discarded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tiles import joined
from .definition import Operands, runs
from .masks import MASKED_SCORE
from .shifts import Block

if TYPE_CHECKING:
    from jaxtyping import Float

_FEW = 1 << 14  # number of weights up to which calling operations takes longer than the operations


class FlatOperands(Operands):
    """Operands with flat rows, and the products and sums of attention, computed in place.

    Arguments ``seen`` are padded keys or values from :meth:`.Elements.of_keys`. In annotations, ``*rows`` are flat rows
    and ``*padded`` flat padded rows.
    """

    def __init__(self, *operands, **options) -> None:
        super().__init__(*operands, **options)
        self._memory: dict[str, Tensor] = {}

    def memory(self, name: str, shape: Sequence[int]) -> Tensor:
        """Memory for a tensor, which the next call with this name writes over.

        The allocator of a CPU may return large memory to the system, and getting it again takes longer than an
        operation on it. Without reuse, a training step takes up to 1.4 times as long.
        """
        size = math.prod(shape)
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = self.query.new_empty(size)
        return self._memory[name][:size].view(shape)

    def by_outputs(self) -> Iterator[tuple[FlatOperands, slice]]:
        """Yield operands for slices of the output elements. Each slice is as large as the budget of scores allows for
        one row of one head."""
        outputs = self.elements.outputs
        few = outputs * self.budget // self.scores_of_row if self.budget else outputs
        if few >= outputs:
            yield self, slice(None)
            return
        for start, count in runs(outputs, max(1, few)):
            some, x = slice(start, start + count), copy.copy(self)
            x.elements, x.offset_table = self.elements.of_outputs(some), self.offset_table[:, some]
            x.column = self.column[some] if self.dropout else None
            yield x, some

    def of_outputs(
        self, outputs: slice, one: Float[Tensor, "b e C Q *flat"], *seen: Float[Tensor, "b e C #H S *padded"]
    ) -> list[Tensor]:
        """Select the queries ``one`` and the keys or values ``seen`` of some output elements."""
        one = one[:, :, :, outputs] if self.elements.paired else one
        return [one, *(x[:, :, :, outputs] if x.shape[3] > 1 else x for x in seen)]

    @property
    def width(self) -> int:
        """The number of pixels in a padded row."""
        return self.spatial[-1] + 2 * self.shifts.radius

    def flat(self, x: Tensor) -> Tensor:
        """Join the rows of images (..., *spatial), with zeros after every row."""
        return F.pad(x, [0, 2 * self.shifts.radius]).flatten(-2)

    def from_flat(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`flat`: images (..., *spatial)."""
        return x.unflatten(-1, (-1, self.width)).narrow(-1, 0, self.spatial[-1])

    def padded(self, x: Tensor) -> Tensor:
        """Pad images (..., *spatial) for the windows and join their rows. Zeros at the end serve the windows of the
        discarded pixels of the last row."""
        reach = self.shifts.radius
        if self.circular:
            return F.pad(self.shifts.pad(x, circular=True).flatten(-2), [0, 2 * reach])
        outer = [reach, reach] * (self.shifts.dim - 2)
        rows = F.pad(x, [reach, reach, reach, reach + 1, *outer]).flatten(-2)  # one row more, cut below
        return rows.narrow(-1, 0, rows.shape[-1] - self.width + 2 * reach)

    def from_padded(self, x: Tensor) -> Tensor:
        """The adjoint of :meth:`padded`."""
        whole = x.narrow(-1, 0, x.shape[-1] - 2 * self.shifts.radius)
        return self.shifts.unpad(whole.unflatten(-1, (-1, self.width)), self.circular)

    def penalty(self, images: slice) -> Float[Tensor, "#b 1 1 1 D *flat"] | None:
        mask = self.valid(images)
        if mask is None:
            return None
        outside = (1 - self.padded(mask)) * MASKED_SCORE
        blocks = [self.shifted(outside, block).flatten(1, self.shifts.dim) for block in self.shifts.blocks]
        return joined(blocks, 1)[:, None, None, None]

    def rows(self, x: Tensor, run: tuple[int, int], padded: bool = False) -> Tensor:
        """Select a run of rows of flat images. If they are ``padded``, select all rows that windows of the run
        reach."""
        start, count = run
        more = 2 * self.shifts.radius if padded else 0
        if len(self.spatial) > 2:
            return x.narrow(-2, start, count + more)
        return x.narrow(-1, start * self.width, (count + more) * self.width + more)

    def shifted(self, seen: Tensor, block: Block) -> Tensor:
        """The pixels of ``seen`` shifted by each offset of a block: a view (..., *counts, *flat rows)."""
        reach, outer = 2 * self.shifts.radius, len(self.spatial) - 2
        sizes, strides = list(seen.shape), list(seen.stride())
        steps = *strides[len(strides) - 1 - outer : -1], self.width, 1
        pixels = *(n - reach for n in sizes[len(sizes) - 1 - outer : -1]), sizes[-1] - reach * (self.width + 1)
        first = seen.storage_offset() + sum(n * step for n, step in zip(block.start, steps, strict=True))
        features = len(sizes) - 1 - outer
        return seen.as_strided(
            [*sizes[:features], *block.counts, *pixels], [*strides[:features], *steps, *strides[features:]], first
        )

    def views(self, seen: Tensor) -> list[Tensor]:
        """The pixels of ``seen`` shifted by every offset: views (..., *flat rows)."""
        views = []
        for block in self.shifts.blocks:
            some = [self.shifted(seen, block)]
            for _ in range(self.shifts.dim):
                some = [view for x in some for view in x.unbind(seen.ndim - self.shifts.dim + 1)]
            views += some
        return views

    def scores(
        self, t: int, query: Float[Tensor, "b e C #H *rows"], one: Float[Tensor, "b e #H C+1 pixels"],
        keys: Float[Tensor, "b e C #H S *padded"], table: Float[Tensor, "e H D C+1"],
        elements: Float[Tensor, "e U C+1"], penalty: Float[Tensor, "#b 1 1 1 D *rows"] | None,
    ) -> Float[Tensor, "b e H S D *rows"]:  # fmt: skip
        """Scores of the t-th queries, with the tables of their heads."""
        rows = query.shape[4:]
        scores = self.position(one, table).unflatten(-1, rows)
        if elements.shape[1]:
            argument = self.argument(one, elements, t).unflatten(-1, rows).unsqueeze(4)
            shape = torch.broadcast_shapes(scores.shape, argument.shape)
            scores = torch.add(scores, argument, out=self.memory("weight", shape))
        if query.shape[3] == scores.shape[2]:
            return self.products(query, keys, scores if penalty is None else scores.add_(penalty))
        shared = self.products(query, keys)  # by several outputs
        return scores.add_(shared if penalty is None else shared.add_(penalty))

    def exponentials_(self, scores: Tensor, top: Tensor) -> Tensor:
        """exp(scores - top) in place, clamped to at least 5e-26 in single precision.

        The sum of the exponentials is at least 1, and smaller numbers are negligible beside it. Without the clamp,
        subnormal numbers would slow down a CPU several times.
        """
        return scores.sub_(top).clamp_(min=2 / 3 * math.log(torch.finfo(scores.dtype).tiny)).exp_()

    def products(
        self, x: Float[Tensor, "b e C #H *rows"], seen: Float[Tensor, "b e C #H S *padded"],
        total: Float[Tensor, "b e #H S D *rows"] | None = None, name: str = "content",
    ) -> Float[Tensor, "b e #H S D *rows"]:  # fmt: skip
        """Scalar products of features x with ``seen`` at every offset, added to ``total`` or in the :meth:`memory` of a
        name."""
        features = x[(slice(None),) * 4 + (None,) * (1 + self.shifts.dim)].unbind(2)
        if fresh := total is None:
            outputs, keys, offsets = max(x.shape[3], seen.shape[3]), seen.shape[4], self.offset_table.shape[2]
            total = self.memory(name, (*x.shape[:2], outputs, keys, offsets, *x.shape[4:]))
        for some, *channels in self._blocks(seen, total):
            for c, (one, other) in enumerate(zip(features, channels, strict=True)):
                torch.mul(one, other, out=some) if fresh and not c else some.addcmul_(one, other)
        return total

    def _blocks(
        self, seen: Float[Tensor, "b e C #H S *padded"], *weights: Float[Tensor, "b e #H S D *rows"]
    ) -> Iterator[list[Tensor]]:
        """Yield, for each block of offsets, the weights (b, e, H or 1, S, *counts, *flat rows) and the shifted pixels
        of every channel."""
        for block in self.shifts.blocks:
            some = [x[:, :, :, :, block.offsets].unflatten(4, block.counts) for x in weights]
            yield [*some, *self.shifted(seen, block).unbind(2)]

    def weighted(
        self, weight: Float[Tensor, "b e #H S D *rows"], seen: Float[Tensor, "b e C #H S *padded"]
    ) -> Float[Tensor, "b e C #H *rows"]:
        """Sums over key elements and offsets of weights times ``seen``."""
        shape = *weight.shape[:2], seen.shape[2], weight.shape[2], *weight.shape[5:]
        if weight.shape[3] == 1 and weight.numel() > _FEW:
            out = weight.new_zeros(shape)
            for one, view in zip(weight.squeeze(3).unsqueeze(2).unbind(4), self.views(seen.squeeze(4)), strict=True):
                out.addcmul_(one, view)
            return out
        out = weight.new_empty(shape)
        products = self.memory("products", weight.shape)
        blocks = list(self._blocks(seen, weight, products))
        for c, total in enumerate(out.unbind(2)):
            for some, product, *channels in blocks:
                torch.mul(some, channels[c], out=product)
            torch.sum(products, (3, 4), out=total)
        return out

    def add_scattered_(
        self, seen: Float[Tensor, "b e C #H S *padded"], weight: Float[Tensor, "b e #H S D *rows"],
        x: Float[Tensor, "b e C #H *rows"],
    ) -> None:  # fmt: skip
        """The adjoint of :meth:`weighted`: add weights times features x to ``seen``, which holds gradients of keys or
        values. If outputs share keys, their terms are summed."""
        if seen.shape[3] == weight.shape[2] and seen.shape[4] == 1:
            views = self.views(seen.squeeze(4))
            for view, one in zip(views, weight.squeeze(3).unsqueeze(2).unbind(4), strict=True):
                view.addcmul_(one, x)
            return
        products = self.memory("products", weight.shape)
        sums = weight.new_empty(*weight.shape[:2], x.shape[2], *weight.shape[3:])
        for c, channel in enumerate(x.unbind(2)):
            torch.sum(torch.mul(weight, channel[:, :, :, None, None], out=products), 2, out=sums[:, :, c])
        for view, one in zip(self.views(seen), sums.unsqueeze(3).unbind(5), strict=True):
            view += one
