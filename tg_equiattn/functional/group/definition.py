"""Group attention within windows by its definition, in standard operations of torch, which all transforms support.

Sizes: ``B`` images, ``b`` of them in a chunk; ``e`` heads; ``C`` channels; ``Q`` query elements and ``K`` key elements;
``(H, T, S)`` elements of scores, see :class:`.elements.Elements`; ``U`` arguments of encodings; ``D`` offsets of the
window. In annotations, ``#H`` is H or 1.

    score(h, t, s, D) = <q(i, t), k(i + D, s)> + <[q(i, t), 1], offset_table[h, D] + element_table[u]>
    out(i, h) = sum_t sum_{s, D} softmax_{s, D}(score) v(i + D, s),    u = index[h, t, s]

The tables hold encodings, with biases as their last channel. ``offset_table`` is (e, H, D, C + 1) and
``element_table`` (e, U, C + 1), without rows if scores do not depend on u. Queries are already multiplied by the
scale c.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import full_precision
from ..backend import are_few, tile_numbers
from ..chunks import checkpointed, is_whole, joined
from . import hashed_dropout
from .elements import Elements
from .masks import MASKED_SCORE
from .shifts import shifts

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Number of scores of one t in a chunk on a CPU, small enough to stay in the cache between operations.
_CHUNK = 1 << 19


class Chunk(NamedTuple):
    """The images and heads whose scores are in memory at once, and the number of their rows (slices of the first
    spatial axis) that are processed at a time."""

    images: slice
    heads: slice
    rows: int


def chunks(batch: int, heads: int, rows: int, each: int, budget: int) -> Iterator[Chunk]:
    """Split the scores into chunks within ``budget``: whole images if the scores of one image fit, otherwise some heads
    of one image, otherwise some rows of one head. One row of one head has ``each`` scores."""
    few = max(1, min(rows, budget // each))
    some = max(1, min(heads, budget // (each * rows)))
    images = max(1, budget // (each * rows * heads))
    for b in range(0, batch, images):
        for e in range(0, heads, some):
            yield Chunk(slice(b, b + images), slice(e, e + some), few)


def runs(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``count`` rows into runs of at most ``size``; yield the start and the length of each run."""
    if count <= size:  # a range would fix the number of rows in a traced program
        return iter(((0, count),))
    return ((start, min(size, count - start)) for start in range(0, count, size))


class Operands:
    """Operands of attention, with the parts that the definition and the operator share: chunks, logits of encodings,
    masks and dropout.

    ``chunk`` is the largest number of scores of one t in a chunk: 0 means a single chunk, -1 the default of the device.
    """

    def __init__(
        self, query: Float[Tensor, "B e C Q *spatial"], key: Float[Tensor, "B e C K *spatial"],
        value: Float[Tensor, "B e Cv K *spatial"], offset_table: Float[Tensor, "e H D C+1"],
        element_table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
        mask: Bool[Tensor, "#B *spatial"] | None, seed: Int[Tensor, ""], kernel_size: int, selection: Sequence[int],
        circular: bool, dropout: float, chunk: int = -1,
    ) -> None:  # fmt: skip
        self.query, self.offset_table, self.element_table, self.mask = query, offset_table, element_table, mask
        self.spatial, self.circular, self.dropout = tuple(query.shape[4:]), circular, dropout
        self.elements = Elements.of(index, query, offset_table.shape[1])
        self.shifts = shifts(kernel_size, selection, len(self.spatial))
        self.budget = tile_numbers(query.device, _CHUNK, 6) if chunk < 0 else chunk
        self.column: Any = None
        if dropout:
            shape = self.elements.outputs, self.elements.keys, offset_table.shape[2]
            pixels = math.prod(self.spatial)
            row, column = hashed_dropout.hashes(math.prod(query.shape[:2]) * pixels, math.prod(shape), seed)
            self.row = row.view(*query.shape[:2], 1, 1, 1, *self.spatial)
            self.column = column.view(*shape, *[1] * len(self.spatial))

    @property
    def scores_of_row(self) -> int:
        """The number of scores of one t in one row of one head."""
        elements, pixels = self.elements, math.prod(self.spatial[1:])
        return max(1, elements.outputs * elements.keys * self.offset_table.shape[2] * pixels)

    def __iter__(self) -> Iterator[Chunk]:
        (batch, heads), rows = self.query.shape[:2], self.spatial[0]
        if not self.budget:
            return iter((Chunk(slice(None), slice(None), rows),))
        return chunks(batch, heads, rows, self.scores_of_row, self.budget)

    def rows(self, x: Tensor, run: tuple[int, int], padded: bool = False) -> Tensor:
        """Select a run of rows of images (..., *spatial). If the images are ``padded``, select all rows that windows of
        the run reach."""
        start, count = run
        if count == self.spatial[0]:
            return x
        return x.narrow(x.ndim - len(self.spatial), start, count + (2 * self.shifts.radius if padded else 0))

    def valid(self, images: slice) -> Float[Tensor, "#b *spatial"] | None:
        """A mask with ones at valid keys and zeros at others; None if all windows have valid keys only."""
        if self.mask is None:
            return None if self.circular else self.query.new_ones(1, *self.spatial)
        return (self.mask if len(self.mask) == 1 else self.mask[images]).to(self.query.dtype)

    def penalty(self, images: slice) -> Float[Tensor, "#b 1 1 1 square *spatial"] | None:
        """Scores to add for keys that are masked or outside of the image, in the square around the window."""
        mask = self.valid(images)
        if mask is None:
            return None
        outside = (1 - self.shifts.pad(mask, self.circular)) * MASKED_SCORE
        return self.shifts.windows(outside).flatten(1, self.shifts.dim)[:, None, None, None]

    def on_square(self, table: Float[Tensor, "e H D C+1"]) -> Float[Tensor, "e H square C+1"]:
        """The table of offsets, extended to the square around the window. The other offsets get weight zero, since
        their bias is below that of masked keys."""
        bias = table.new_full((*table.shape[:2], 1, 1), 2 * MASKED_SCORE)
        return self.shifts.to_square(table, 2, F.pad(bias, (table.shape[-1] - 1, 0)))

    def position(
        self, one: Float[Tensor, "b e #H C+1 pixels"], table: Float[Tensor, "e H D C+1"]
    ) -> Float[Tensor, "b e H 1 D pixels"]:
        """Logits of offsets, from queries :func:`with_one` and the table of their heads."""
        logits = torch.matmul(table.reshape(len(table), one.shape[2], -1, table.shape[-1]), one)
        return logits.view(*one.shape[:2], table.shape[1], 1, table.shape[2], one.shape[-1])

    def argument(
        self, one: Float[Tensor, "b e #H C+1 pixels"], table: Float[Tensor, "e U C+1"], t: int
    ) -> Float[Tensor, "b e H S pixels"]:
        """Logits of u, from queries :func:`with_one` and the table of their heads."""
        return self.elements.by_key(torch.matmul(table[:, None], one), t, 2)


def with_one(query: Float[Tensor, "b e C Q *spatial"]) -> Float[Tensor, "b e C+1 Q *spatial"]:
    """Add a channel of ones, which multiplies the biases."""
    return torch.cat([query, torch.ones_like(query[:, :, :1])], 2)


def windowed_attention_definition(
    query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular, dropout,
    chunk=-1, *, with_lse=True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as :func:`.operator.windowed_attention`, in standard operations of torch.

    Under torch.compile, export and tracing, all scores are formed at once, so that one program serves images of all
    sizes. Otherwise scores are formed chunk by chunk and, unless they are few, recomputed in backward.

    Without ``with_lse`` the second tensor is empty.
    """
    whole = is_whole(query)
    with full_precision(query.device):
        x = Operands(
            query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular,
            dropout, 0 if whole else chunk,
        )  # fmt: skip
        # as for group_attention_impl, which then chooses this form
        few = not whole and are_few(math.prod(query.shape[:2]) * x.scores_of_row * x.spatial[0] // 4)
        outs, lses = [], []  # one entry a chunk: whole images, or some heads of one image
        for chunk in x:
            part = chunk.images, chunk.heads
            given = [query[part], *(x.shifts.pad(y[part], circular) for y in (key, value))]
            tables = offset_table[chunk.heads], element_table[chunk.heads]
            found = []
            for run in runs(x.spatial[0], chunk.rows):
                attend = functools.partial(attend_rows, x, chunk, run, with_lse=with_lse)
                rows = *(x.rows(y, run, padded=n > 0) for n, y in enumerate(given)), *tables
                found.append(attend(*rows) if few else checkpointed(attend, *rows, preserve_rng_state=True))
            out, lse = (joined(y, -len(x.spatial)).flatten(0, 1) for y in zip(*found, strict=True))
            outs.append(out)
            lses.append(lse)
        return joined(outs).unflatten(0, query.shape[:2]), joined(lses).unflatten(0, query.shape[:2])


def attend_rows(
    x: Operands, chunk: Chunk, run: tuple[int, int], query: Float[Tensor, "b e C Q *rows"],
    key: Float[Tensor, "b e C K *padded"], value: Float[Tensor, "b e Cv K *padded"],
    offset_table: Float[Tensor, "e H D C+1"], element_table: Float[Tensor, "e U C+1"], *, with_lse: bool = True,
) -> tuple[Float[Tensor, "b e Cv H *rows"], Float[Tensor, "b e H T *rows"]]:  # fmt: skip
    """Attention of a run of rows and the log-sum-exps of its scores, from padded keys and values. Without ``with_lse``
    the second tensor has T = 0."""
    rows, elements, penalty = query.shape[4:], x.elements, x.penalty(chunk.images)
    offset_table, square = x.on_square(offset_table), [2 * x.shifts.radius + 1] * len(rows)
    keys, values = (x.shifts.windows(elements.of_keys(y)).unbind(2) for y in (key, value))  # channels
    weight: Any = None
    lses = []
    for t in range(elements.queries):
        q = elements.of_query(query, t)
        one = with_one(q).transpose(2, 3).flatten(4)
        scores = x.position(one, offset_table)
        if element_table.shape[1]:
            scores = scores + x.argument(one, element_table, t).unsqueeze(4)
        features = q[(slice(None),) * 4 + (None,) * (1 + len(rows))].unbind(2)
        scores = scores.unflatten(-1, rows) + _products(features, keys).flatten(4, 3 + len(rows))
        if penalty is not None:
            scores = scores + x.rows(penalty, run)
        flat = scores.flatten(3, 4)
        share = flat.softmax(3).view_as(scores)  # softmax's derivatives round less than those of exp
        weight = share if weight is None else weight + share
        if with_lse:
            lses.append(flat.logsumexp(3))
    if x.dropout:
        row = x.rows(x.row[chunk.images, chunk.heads], run)
        column = x.shifts.to_square(x.column, 2)
        weight = weight * hashed_dropout.keep(row, column, x.dropout, weight.dtype)
    weight = weight.unflatten(4, square)
    out = torch.stack([(weight * channel).sum(tuple(range(3, 4 + len(rows)))) for channel in values], 2)
    return out, torch.stack(lses, 3) if with_lse else out.new_empty(*out.shape[:2], out.shape[3], 0, *rows)


def _products(features: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
    """The sum over channels of features times ``seen``."""
    total = features[0] * seen[0]
    for pair in zip(features[1:], seen[1:], strict=True):
        total = torch.addcmul(total, *pair)
    return total
