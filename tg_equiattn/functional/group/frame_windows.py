"""Attention of group elements in their own frames within windows, as one PyTorch operator; backward makes scores
again from the logarithms of their sums.

Sizes: ``e`` heads, ``H`` output elements, ``T`` elements of queries, keys and values, ``H`` or one (lifting), ``D``
places of the window, ``C`` channels. Queries are scaled. The table (e, H, D, C + 1) holds the encoding of every place
and, last, its bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import refuse_forward_mode, tile_numbers
from ..second_derivatives import register_derivatives
from . import hashed_dropout
from .plan import HIDDEN
from .window import window

# Scores of a chunk on a CPU, where they stay in a cache from one operation to the next.
_CHUNK = 1 << 19


class Chunk(NamedTuple):
    """Images and heads whose scores are held at once."""

    images: slice
    heads: slice


def chunks(batch: int, heads: int, each: int, budget: int) -> Iterator[Chunk]:
    """Whole images where the scores of one fit in a budget, ``each`` of every head, else some heads of one."""
    some, images = min(heads, max(1, budget // each)), max(1, budget // (each * heads))
    for b in range(0, batch, images):
        for e in range(0, heads, some):
            yield Chunk(slice(b, b + images), slice(e, e + some))


class _Operands:
    """Queries, keys, values and tables in chunks."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor | None, seed: Tensor,
        kernel_size: int, selection: Sequence[int], circular: bool, dropout: float,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value, self.table, self.mask = query, key, value, table, mask
        self.spatial = tuple(query.shape[4:])
        self.window, self.circular, self.dropout = window(kernel_size, selection, len(self.spatial)), circular, dropout
        pixels = query.new_ones(1, *self.spatial)
        self.border = None if circular or mask is not None else self._hidden(pixels)
        if dropout:
            heads, elements, places = table.shape[:3]
            row, column = hashed_dropout.places(query.shape[0] * heads * pixels.numel(), elements * places, seed)
            self.row = row.view(-1, heads, 1, 1, *self.spatial)
            self.column = column.view(elements, places, *[1] * len(self.spatial))

    def __iter__(self) -> Iterator[Chunk]:
        each = max(1, torch.Size((*self.table.shape[1:3], *self.spatial)).numel())
        return chunks(self.query.shape[0], self.query.shape[1], each, tile_numbers(self.query.device, _CHUNK, 4))

    def padded(self, x: Tensor, chunk: Chunk) -> Tensor:
        return self.window.pad(x[chunk], self.circular)

    def _hidden(self, there: Tensor) -> Tensor:
        """What is added to the scores of keys (b, *spatial) that are not there, or out of the image."""
        inside = torch.stack(self.window.views(self.window.pad(there, self.circular)), 1)
        return (1 - inside).mul_(HIDDEN)[:, None, None]

    def hidden(self, chunk: Chunk) -> Tensor | None:
        """(b or 1, 1, 1, D, *spatial)."""
        if self.mask is None:
            return self.border
        there = self.mask if len(self.mask) == 1 else self.mask[chunk.images]
        return self._hidden(there.to(self.query.dtype))

    def keep(self, chunk: Chunk) -> Tensor | None:
        """Dropout factors of the chunk's weights."""
        if not self.dropout:
            return None
        return hashed_dropout.keep(self.row[chunk], self.column, self.dropout, self.query.dtype)

    def with_one(self, query: Tensor) -> Tensor:
        """(b, e, T, C + 1, pixels): a channel of ones, which biases are multiplied with, behind the others."""
        query = query.transpose(2, 3).flatten(4)
        return torch.cat([query, torch.ones_like(query[..., :1, :])], 3)

    def scores(self, chunk: Chunk, query: Tensor, with_one: Tensor, key: Tensor) -> Tensor:
        """(b, e, H, D, *spatial), of the chunk's queries and padded keys."""
        scores = torch.matmul(self.table[chunk.heads], with_one).unflatten(-1, self.spatial)
        self.add_products_(scores, query, key)
        if (hidden := self.hidden(chunk)) is not None:
            scores += hidden
        return scores

    def add_products_(self, scores: Tensor, x: Tensor, padded: Tensor) -> None:
        """Add to scores the products <x(i), y(i + D)> of features x (b, e, C, T or H, *spatial) and padded ones y."""
        for block in self.window.blocks:
            some = scores[:, :, :, block.places].unflatten(3, block.counts)
            for c in range(x.shape[2]):
                one = x[:, :, c][(slice(None),) * 3 + (None,) * self.window.dim]
                some.addcmul_(one, self.window.within(padded[:, :, c], block))

    def weighted(self, weight: Tensor, padded: Tensor) -> Tensor:
        """The sum over places of weights (b, e, H, D, *spatial) times padded features: (b, e, C, H, *spatial)."""
        out = weight.new_zeros(*weight.shape[:2], padded.shape[2], weight.shape[2], *self.spatial)
        for one, view in zip(weight.unsqueeze(2).unbind(4), self.window.views(padded), strict=True):
            out.addcmul_(one, view)
        return out

    def scattered(self, weight: Tensor, x: Tensor, elements: int) -> Tensor:
        """Features (b, e, C, H, *spatial) times weights, added up where the places of the window are; with one element
        over H, too."""
        sides = [side + 2 * self.window.radius for side in self.spatial]
        out = x.new_zeros(*x.shape[:3], elements, *sides)
        for one, part in zip(weight.unsqueeze(2).unbind(4), self.window.views(out), strict=True):
            if elements == x.shape[3]:
                part.addcmul_(one, x)
            else:
                part += (one * x).sum(3, keepdim=True)
        return self.window.unpad(out, self.circular)


_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor table, Tensor? mask, Tensor seed, SymInt kernel_size, "
    "SymInt[] selection, bool circular, float dropout"
)


@torch.library.custom_op("tg_equiattn::frame_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor)")
def frame_attention_op(query, key, value, table, *rest) -> tuple[Tensor, Tensor]:
    """query, key (B, e, C, T, *spatial), value (B, e, Cv, T, *spatial), table (e, H, D, C + 1) -> out
    (B, e, Cv, H, *spatial) and the logarithms (B, e, H, *spatial) of the sums of exponentials of a query's scores;
    ``mask`` (B or 1, *spatial) is true where there are keys."""
    refuse_forward_mode()
    out, level = _outputs(query, key, value, table)
    with torch.no_grad(), full_precision(query.device):
        if not out.numel():
            return out, level
        x = _Operands(query, key, value, table, *rest)
        for chunk in x:
            q = query[chunk]
            weight = x.scores(chunk, q, x.with_one(q), x.padded(key, chunk))
            top = weight.amax(3, keepdim=True)
            weight.sub_(top).exp_()
            total = weight.sum(3)
            level[chunk] = total.log().add_(top.squeeze(3))
            if (keep := x.keep(chunk)) is not None:
                weight *= keep
            torch.div(x.weighted(weight, x.padded(value, chunk)), total[:, :, None], out=out[chunk])
    return out, level


def _outputs(query, key, value, table, *rest) -> tuple[Tensor, Tensor]:
    (batch, heads), spatial, elements = query.shape[:2], query.shape[4:], table.shape[1]
    out = query.new_empty(batch, heads, value.shape[2], elements, *spatial)
    return out, query.new_empty(batch, heads, elements, *spatial)


@torch.library.custom_op(
    "tg_equiattn::frame_attention_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_level, Tensor out, Tensor level, {_OPERANDS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def frame_attention_backward_op(grad, grad_level, out, level, query, key, value, table, *rest):
    """Gradients of query, key, value and table; ``grad_level`` is that of the level."""
    refuse_forward_mode()
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, table)]
    to_query, to_key, to_value, to_table = grads
    with torch.no_grad(), full_precision(query.device):
        if not out.numel():
            return tuple(grads)
        x = _Operands(query, key, value, table, *rest)
        elements, alone = query.shape[3], query.shape[3] < table.shape[1]
        for chunk in x:
            q, g = query[chunk], grad[chunk]
            one, k = x.with_one(q), x.padded(key, chunk)
            weight = x.scores(chunk, q, one, k).sub_(level[chunk].unsqueeze(3)).exp_()
            slope = torch.zeros_like(weight)
            x.add_products_(slope, g, x.padded(value, chunk))
            kept = weight
            if (keep := x.keep(chunk)) is not None:
                slope *= keep
                kept = weight * keep
            to_value[chunk] = x.scattered(kept, g, elements)
            mean = (g * out[chunk]).sum(2).sub_(grad_level[chunk])
            slope.sub_(mean.unsqueeze(3)).mul_(weight)
            logits, rho = slope.flatten(4), table[chunk.heads]
            to_table[chunk.heads] += torch.matmul(logits, one.mT).sum(0)
            position = torch.matmul(rho[..., :-1].mT, logits).unflatten(-1, x.spatial)  # (b, e, H, C, *spatial)
            if alone:
                slope, position = slope.sum(2, keepdim=True), position.sum(2, keepdim=True)
            to_query[chunk] = x.weighted(slope, k).add_(position.transpose(2, 3))
            to_key[chunk] = x.scattered(slope, q, elements)
    return tuple(grads)


@frame_attention_backward_op.register_fake
def _(grad, grad_level, out, level, *operands):
    return tuple(x.new_empty(x.shape) for x in operands[:4])


def plain_frame_attention(query, key, value, table, *rest) -> tuple[Tensor, Tensor]:
    """As :func:`frame_attention_op`, in torch's own operations, which every transform understands."""
    with full_precision(query.device):
        x = _Operands(query, key, value, table, *rest)
        everything = Chunk(slice(None), slice(None))
        scores = torch.matmul(table, x.with_one(query)).unflatten(-1, x.spatial)
        padded, values = (x.window.views(x.padded(y, everything)) for y in (key, value))
        scores = scores + torch.stack([(query * view).sum(2) for view in padded], 3)
        if (hidden := x.hidden(everything)) is not None:
            scores = scores + hidden
        level = scores.logsumexp(3)
        weight = (scores - level.unsqueeze(3)).exp()
        if (keep := x.keep(everything)) is not None:
            weight = weight * keep
        return sum(one * view for one, view in zip(weight.unsqueeze(2).unbind(4), values, strict=True)), level


frame_attention_op.register_fake(_outputs)
register_derivatives(frame_attention_op, frame_attention_backward_op, plain_frame_attention, 4, keep=True)
