r"""Attention of group elements in their own frames within windows, as one PyTorch operator.

The scores of a chunk of images and heads are one tensor (b, e, H, D, \*spatial), made by a matrix product and one
operation a channel; backward makes them again from the logarithms of their sums, so that nothing of that size is kept.

Sizes: ``e`` heads, ``H`` output elements, ``T`` elements of queries, keys and values, ``H`` or one (lifting), ``D``
places of the window, ``C`` channels. Queries are scaled. The table (e, H, D, C + 1) holds the encoding of every place
and, last, its bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...precision import full_precision
from ...transforms import transformed
from ..backend import refuse_forward_mode
from ..second_derivatives import second_derivatives
from . import hashed_dropout
from .plan import HIDDEN
from .window import window

# Scores of a chunk. On a CPU they stay in a cache from one operation to the next; a GPU wants few launches.
_CHUNK = {"cpu": 1 << 19, "other": 1 << 28}


class _Chunk(NamedTuple):
    """Images and heads whose scores are held at once."""

    images: slice
    heads: slice


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

    def __iter__(self) -> Iterator[_Chunk]:
        """Whole images where the scores of one fit, else some heads of one."""
        batch, heads = self.query.shape[:2]
        budget = _CHUNK["cpu" if self.query.device.type == "cpu" else "other"]
        each = max(1, torch.Size((*self.table.shape[1:3], *self.spatial)).numel())
        some = min(heads, max(1, budget // each))
        images = max(1, budget // (each * heads))
        for b in range(0, batch, images):
            for e in range(0, heads, some):
                yield _Chunk(slice(b, b + images), slice(e, e + some))

    def padded(self, x: Tensor, chunk: _Chunk) -> Tensor:
        return self.window.pad(x[chunk], self.circular)

    def _hidden(self, there: Tensor) -> Tensor:
        """What is added to the scores of keys (b, *spatial) that are not there, or out of the image."""
        inside = torch.stack(self.window.slices(self.window.pad(there, self.circular)), 1)
        return (1 - inside).mul_(HIDDEN)[:, None, None]

    def hidden(self, chunk: _Chunk) -> Tensor | None:
        """(b or 1, 1, 1, D, *spatial)."""
        if self.mask is None:
            return self.border
        there = self.mask if len(self.mask) == 1 else self.mask[chunk.images]
        return self._hidden(there.to(self.query.dtype))

    def keep(self, chunk: _Chunk) -> Tensor | None:
        """Dropout factors of the chunk's weights."""
        if not self.dropout:
            return None
        return hashed_dropout.keep(self.row[chunk], self.column, self.dropout, self.query.dtype)

    def with_one(self, query: Tensor) -> Tensor:
        """(b, e, T, C + 1, pixels): a channel of ones, which biases are multiplied with, behind the others."""
        query = query.transpose(2, 3).flatten(4)
        return torch.cat([query, torch.ones_like(query[..., :1, :])], 3)

    def scores(self, chunk: _Chunk, query: Tensor, with_one: Tensor, key: Tensor) -> Tensor:
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


@torch.library.custom_op("tg_equiattn::frame_attention", mutates_args=())
def frame_attention_op(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor | None, seed: Tensor, kernel_size: int,
    selection: Sequence[int], circular: bool, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query, key (B, e, C, T, *spatial), value (B, e, Cv, T, *spatial), table (e, H, D, C + 1) -> out
    (B, e, Cv, H, *spatial) and the logarithms (B, e, H, *spatial) of the sums of exponentials of a query's scores;
    ``mask`` (B or 1, *spatial) is true where there are keys."""
    refuse_forward_mode()
    out, level = _outputs(query, value, table)
    with torch.no_grad(), full_precision(query.device):
        if not out.numel():
            return out, level
        x = _Operands(query, key, value, table, mask, seed, kernel_size, selection, circular, dropout)
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


def _outputs(query: Tensor, value: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    (batch, heads), spatial, elements = query.shape[:2], query.shape[4:], table.shape[1]
    out = query.new_empty(batch, heads, value.shape[2], elements, *spatial)
    return out, query.new_empty(batch, heads, elements, *spatial)


@frame_attention_op.register_fake
def _(query, key, value, table, *rest):
    return _outputs(query, value, table)


@torch.library.custom_op("tg_equiattn::frame_attention_backward", mutates_args=())
def frame_attention_backward_op(
    grad: Tensor, grad_level: Tensor | None, out: Tensor, level: Tensor, query: Tensor, key: Tensor, value: Tensor,
    table: Tensor, mask: Tensor | None, seed: Tensor, kernel_size: int, selection: Sequence[int], circular: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and table; ``grad_level`` is that of the level."""
    refuse_forward_mode()
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, table)]
    to_query, to_key, to_value, to_table = grads
    with torch.no_grad(), full_precision(query.device):
        if not out.numel():
            return to_query, to_key, to_value, to_table
        x = _Operands(query, key, value, table, mask, seed, kernel_size, selection, circular, dropout)
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
            mean = (g * out[chunk]).sum(2)
            if grad_level is not None:
                mean -= grad_level[chunk]
            slope.sub_(mean.unsqueeze(3)).mul_(weight)
            logits, rho = slope.flatten(4), table[chunk.heads]
            to_table[chunk.heads] += torch.matmul(logits, one.mT).sum(0)
            position = torch.matmul(rho[..., :-1].mT, logits).unflatten(-1, x.spatial)  # (b, e, H, C, *spatial)
            if alone:
                slope, position = slope.sum(2, keepdim=True), position.sum(2, keepdim=True)
            to_query[chunk] = x.weighted(slope, k).add_(position.transpose(2, 3))
            to_key[chunk] = x.scattered(slope, q, elements)
    return to_query, to_key, to_value, to_table


@frame_attention_backward_op.register_fake
def _(grad, grad_level, out, level, query, key, value, table, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, table))


def plain_frame_attention(
    query, key, value, table, mask, seed, kernel_size, selection, circular, dropout
) -> tuple[Tensor, Tensor]:
    """As :func:`frame_attention_op`, in torch's own operations, which every transform understands."""
    with full_precision(query.device):
        x = _Operands(query, key, value, table, mask, seed, kernel_size, selection, circular, dropout)
        everything = _Chunk(slice(None), slice(None))
        padded, values = x.padded(key, everything), x.padded(value, everything)
        scores = torch.matmul(table, x.with_one(query)).unflatten(-1, x.spatial)
        scores = scores + torch.stack([(query * view).sum(2) for view in x.window.slices(padded)], 3)
        if (hidden := x.hidden(everything)) is not None:
            scores = scores + hidden
        level = scores.logsumexp(3)
        weight = (scores - level.unsqueeze(3)).exp()
        if (keep := x.keep(everything)) is not None:
            weight = weight * keep
        weights = weight.unsqueeze(2).unbind(4)
        return sum(one * view for one, view in zip(weights, x.window.slices(values), strict=True)), level


def _setup_context(ctx, inputs, output):
    *tensors, kernel_size, selection, circular, dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = kernel_size, selection, circular, dropout
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_level):
    out, level, *operands = ctx.saved_tensors
    if grad is None and grad_level is None:
        return (None,) * 10
    grad = torch.zeros_like(out) if grad is None else grad
    if transformed():  # since the forward pass
        rest = *operands[4:], *ctx.settings
        again, pullback = torch.func.vjp(lambda *x: plain_frame_attention(*x, *rest), *operands[:4])
        grads = pullback((grad, torch.zeros_like(again[1]) if grad_level is None else grad_level))
    else:
        grads = frame_attention_backward_op(grad, grad_level, out, level, *operands, *ctx.settings)
    return *grads, *[None] * 6


def _save_backward(ctx, inputs, output):
    grad, grad_level, _, _, *operands, kernel_size, selection, circular, dropout = inputs
    ctx.save_for_backward(grad, grad_level, *operands)
    ctx.settings = kernel_size, selection, circular, dropout
    ctx.set_materialize_grads(False)


def _second_backward(ctx, *cotangents):
    grad, grad_level, query, key, value, table, mask, seed = ctx.saved_tensors
    if all(c is None for c in cotangents):
        return (None,) * 14
    upstream = [grad] if grad_level is None else [grad, grad_level]
    grads = second_derivatives(
        lambda *x: plain_frame_attention(*x, mask, seed, *ctx.settings)[: len(upstream)],
        (query, key, value, table), upstream, cotangents,
    )  # fmt: skip
    to_grad, *to_level = grads[4:]
    return to_grad, to_level[0] if to_level else None, None, None, *grads[:4], *[None] * 6


frame_attention_op.register_autograd(_backward, setup_context=_setup_context)
frame_attention_backward_op.register_autograd(_second_backward, setup_context=_save_backward)
