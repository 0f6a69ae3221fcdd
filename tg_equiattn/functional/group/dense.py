"""Group attention over all pixels as one PyTorch operator, by matrix products.

Scores are formed for one output element at a time, in chunks of query pixels, images and heads, and recomputed in
backward. In all matrices, channels come before pixels: if heads have few channels, products of such matrices are
several times faster on a CPU.

Sizes are those of :mod:`.definition`, with ``M`` key pixels, and ``n`` query pixels in a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import full_precision
from ..backend import refuse_forward_mode, tile_numbers
from ..chunks import checkpointed, is_whole
from ..second_derivatives import register_derivatives
from . import hashed_dropout
from .masks import MASKED_SCORE
from .shifts import offsets_of_pairs

if TYPE_CHECKING:
    from jaxtyping import Float

# Number of scores in a chunk on a CPU, small enough to stay in the cache between operations.
_CHUNK = 1 << 19
# Number of images times heads in a chunk, if there are as many: rows of the matrix products with encodings of offsets.
_HEADS = 16


class DenseChunk(NamedTuple):
    """Outputs whose scores are in memory at once: an output element, and slices of query pixels, images and heads."""

    output: int
    pixels: slice
    images: slice
    heads: slice


class DenseOperands:
    """The attention and the gradients of chunks of the operands of :func:`dense_attention`."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, offset_encoding: Tensor, space_bias: Tensor,
        element_table: Tensor, index: Tensor | None, mask: Tensor | None, seed: Tensor, dropout: float, chunk: int = -1,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        self.mask, self.dropout, self.spatial, self.outputs = mask, dropout, query.shape[4:], len(offset_encoding)
        # without autograd and transforms; on a CPU, to get memory for scores takes as long as to compute them
        self.in_place = in_place and query.device.type == "cpu"
        if index is None:  # the key element is that of the output, or the only one
            index = torch.zeros(self.outputs, 1, dtype=torch.int64, device=query.device)
        self.index = index.view(self.outputs, -1, index.shape[-1])
        self.queries, self.keys = self.index.shape[1:]
        encoded = offset_encoding.shape[1] > 0 or space_bias.shape[2] > 0
        self.pairs: Any = offsets_of_pairs(self.spatial, query.device) if encoded else None
        (batch, heads), pixels, seen = query.shape[:2], math.prod(self.spatial), self.keys * key.shape[4]
        budget = tile_numbers(query.device, _CHUNK, 6) if chunk < 0 else chunk
        self.slices = [[slice(None)]] * 3  # slices of pixels, images and heads
        if budget:
            step = max(1, min(pixels, budget // (seen * max(1, min(_HEADS, batch * heads)))))
            step = math.ceil(pixels / math.ceil(pixels / step))  # chunks of equal size
            some = max(1, budget // (step * seen))
            steps = (pixels, step), (batch, max(1, some // heads)), (heads, some)
            self.slices = [[slice(n, n + step) for n in range(0, max(size, 1), step)] for size, step in steps]
        if dropout:
            row, column = hashed_dropout.hashes(batch * heads * pixels, self.outputs * seen, seed)
            self.row, self.column = row.view(batch, heads, pixels, 1), column.view(self.outputs, seen)

    def __iter__(self) -> Iterator[list[DenseChunk]]:
        """Yield the chunks, those of one output element and of the same query pixels together."""
        pixels, images, heads = self.slices
        for output in range(self.outputs):
            for some in pixels:
                yield [DenseChunk(output, some, b, e) for b in images for e in heads]

    def cut(self, x: DenseChunk, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Views of the queries, keys and values of a chunk."""
        own, every = slice(x.output, x.output + 1), slice(None)
        of_query = own if self.queries == 1 and query.shape[3] > 1 else every
        of_key = own if self.keys == 1 and key.shape[3] > 1 else every
        query, key, value = (y[x.images, x.heads] for y in (query, key, value))
        return [query[:, :, :, of_query, x.pixels], key[:, :, :, of_key], value[:, :, :, of_key]]

    def of_pairs(
        self, x: DenseChunk, offset_encoding: Tensor, space_bias: Tensor
    ) -> list[Float[Tensor, "n C M"] | Float[Tensor, "n 1 heads 1 M"] | None]:
        """The encodings and the biases of all heads at pairs of a query pixel and a key pixel; None if there are
        none."""
        found: list[Tensor | None] = [None, None]
        if offset_encoding.shape[1]:
            found[0] = offset_encoding[x.output].mT[:, self.pairs[x.pixels]].movedim(1, 0)
        if space_bias.shape[2]:
            found[1] = space_bias[:, x.output][:, self.pairs[x.pixels]].transpose(0, 1)[:, None, :, None]
        return found

    def keep(self, x: DenseChunk, dtype: torch.dtype) -> Float[Tensor, "b e n S*M"]:
        """The dropout factors of the weights of a chunk."""
        return hashed_dropout.keep(self.row[x.images, x.heads, x.pixels], self.column[x.output], self.dropout, dtype)

    def with_elements(
        self, x: DenseChunk, t: int, key: Float[Tensor, "b e C S M"], table: Float[Tensor, "e U C+1"]
    ) -> Float[Tensor, "b e C+1 S*M"]:
        """Keys plus encodings of elements, with one more channel for biases of elements and penalties of masked
        keys."""
        keys = F.pad(key, (0, 0, 0, 0, 0, 1))
        if self.mask is not None:
            mask = (self.mask if len(self.mask) == 1 else self.mask[x.images])[:, None, None, None]
            penalty = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, MASKED_SCORE)
            keys = keys + F.pad(penalty, (0, 0, 0, 0, key.shape[2], 0))
        if table.shape[1]:
            keys = keys + table[:, self.index[x.output, t]].mT.unsqueeze(-1)
        return keys.flatten(3)

    def weights(
        self, x: DenseChunk, one: Float[Tensor, "b e C+1 n"], keys: Float[Tensor, "b e C+1 S*M"],
        rho: Float[Tensor, "n C M"] | None, bias: Float[Tensor, "n 1 heads 1 M"] | None,
    ) -> Float[Tensor, "b e n S*M"]:  # fmt: skip
        """Softmax weights of queries with a channel of ones."""
        scores, logits = one.mT @ keys, None if bias is None else bias[:, :, x.heads]
        if rho is not None:
            found = _by_pixel(one[:, :, :-1]).mT @ rho
            found = found.unflatten(1, one.shape[:2]).unsqueeze(3)  # (n, b, e, 1, M)
            logits = found if logits is None else found + logits
        if logits is not None:
            total, logits = scores.unflatten(-1, (self.keys, -1)), logits.movedim(0, 2)
            scores = (total.add_(logits) if self.in_place else total + logits).flatten(3)
        return torch.softmax(scores, -1, out=scores) if self.in_place else scores.softmax(-1)

    def attend(
        self, x: DenseChunk, query: Float[Tensor, "b e C T n"], key: Float[Tensor, "b e C S M"],
        value: Float[Tensor, "b e Cv S M"], table: Float[Tensor, "e U C+1"], *of_pairs,
    ) -> Float[Tensor, "b e Cv n"]:  # fmt: skip
        """Attention of a chunk."""
        one = with_one(query)
        total: Any = None
        for t in range(self.queries):
            weight = self.weights(x, one[:, :, :, t], self.with_elements(x, t, key, table), *of_pairs)
            total = weight if total is None else total + weight
        return value.flatten(3) @ (total * self.keep(x, total.dtype) if self.dropout else total).mT

    def add_gradients_(
        self, x: DenseChunk, grad: Float[Tensor, "b e Cv n"], mean: Float[Tensor, "b e n"], operands, of_pairs, targets,
        to_pairs,
    ) -> None:  # fmt: skip
        """Add the gradients of the operands of :meth:`attend` (queries, keys, values and the element table of a chunk)
        to the targets, and those of :meth:`of_pairs` to ``to_pairs``. ``mean`` is the scalar product of ``grad`` and
        the output."""
        (query, key, value, table), (to_query, to_key, to_value, to_table) = operands, targets
        one, to_weight = with_one(query), grad.mT @ value.flatten(3)
        total: Any = None
        keep = self.keep(x, grad.dtype) if self.dropout else None
        to_weight = to_weight if keep is None else to_weight.mul_(keep)
        for t in range(self.queries):
            of_t, keys = one[:, :, :, t], self.with_elements(x, t, key, table)
            weight = self.weights(x, of_t, keys, *of_pairs)
            if self.queries == 1:
                slope = to_weight.sub_(mean.unsqueeze(-1)).mul_(weight)
            else:
                slope = to_weight * weight
                slope.addcmul_(weight, slope.sum(-1, keepdim=True), value=-1)
            to_query[:, :, :, t] += (keys @ slope.mT)[:, :, :-1]
            to_keys = (of_t @ slope).unflatten(-1, key.shape[3:])
            to_key += to_keys[:, :, :-1]
            if table.shape[1]:
                to_table[:, self.index[x.output, t]] += to_keys.sum((0, -1)).mT
            self._add_to_pairs_(x, t, of_t, slope, of_pairs, to_pairs, to_query)
            total = weight if total is None else total.add_(weight)
        to_value += (grad @ (total if keep is None else total * keep)).view_as(value)

    def _add_to_pairs_(
        self, x: DenseChunk, t: int, one: Float[Tensor, "b e C+1 n"], slope: Float[Tensor, "b e n S*M"], of_pairs,
        to_pairs, to_query,
    ) -> None:  # fmt: skip
        """Add the gradients of encodings and biases of offsets, and those of queries through encodings."""
        (rho, bias), (to_rho, to_bias) = of_pairs, to_pairs
        if self.pairs is None:
            return
        slope = slope.unflatten(-1, (self.keys, -1)).sum(3).movedim(2, 0).contiguous()  # (n, b, e, M)
        if bias is not None:
            to_bias[:, :, x.heads] += slope.sum(1)[:, None, :, None]
        if rho is not None:
            logits = slope.flatten(1, 2)
            found = (rho @ logits.mT).unflatten(-1, one.shape[:2])  # (n, C, b, e)
            to_query[:, :, :, t] += found.permute(2, 3, 1, 0)
            to_rho += _by_pixel(one[:, :, :-1]) @ logits

    def add_to_offsets_(self, x: DenseChunk, to_pairs, to_rho: Tensor, to_bias: Tensor) -> None:
        """The adjoint of :meth:`of_pairs`: add gradients at pairs of pixels to those of offsets."""
        of_rho, of_bias = to_pairs
        if of_rho is not None:
            found = of_rho.movedim(1, 2).flatten(0, 1)  # (n M, C)
            to_rho[x.output].index_add_(0, self.pairs[x.pixels].flatten(), found)
        if of_bias is not None:
            found = of_bias[:, 0, :, 0].transpose(0, 1).flatten(1)  # (e, n M)
            to_bias[:, x.output].index_add_(1, self.pairs[x.pixels].flatten(), found)


def _by_pixel(query: Float[Tensor, "b e C n"]) -> Float[Tensor, "n C b*e"]:
    """Queries as matrices of each pixel."""
    return query.permute(3, 2, 0, 1).flatten(2).contiguous()


def with_one(query: Float[Tensor, "b e C Q n"]) -> Float[Tensor, "b e C+1 Q n"]:
    """Add a channel of ones, which multiplies the biases."""
    return torch.cat([query, torch.ones_like(query[:, :, :1])], 2)


_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor offset_encoding, Tensor space_bias, Tensor element_table, "
    "Tensor? index, Tensor? mask, Tensor seed, float dropout, SymInt chunk=-1"
)


def dense_attention_definition(
    query, key, value, offset_encoding, space_bias, element_table, index, mask, seed, dropout, chunk=-1, *,
    in_place=False,
) -> Tensor:  # fmt: skip
    """The same as :func:`dense_attention`, in standard operations of torch, which all transforms support."""
    with full_precision(query.device):
        x = DenseOperands(
            query, key, value, offset_encoding, space_bias, element_table, index, mask, seed, dropout,
            0 if is_whole(query) else chunk, in_place,
        )  # fmt: skip
        features, outputs = (query.flatten(4), key, value), []
        for chunks in x:
            of_pairs = x.of_pairs(chunks[0], offset_encoding, space_bias)
            found = [
                checkpointed(functools.partial(x.attend, y), *x.cut(y, *features), element_table[y.heads], *of_pairs)
                for y in chunks
            ]
            outputs.append(torch.cat([y.flatten(0, 1) for y in found]))  # images, or heads of one image
        out = torch.cat(outputs, -1).unflatten(-1, (x.outputs, *x.spatial))
        return out.unflatten(0, query.shape[:2])


@torch.library.custom_op("tg_equiattn::dense_attention", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def dense_attention(query, *operands) -> Tensor:
    """Attention of all query pixels to all key pixels: query (B, e, C, Q, *spatial), key (B, e, C, K, M), value (B, e,
    Cv, K, M) -> (B, e, Cv, H, *spatial).

    ``offset_encoding`` is (H, D, C) and ``space_bias`` is (e, H, D) with all D offsets of the image. If there
    are no encodings or biases, they have no offsets (D = 0). ``element_table`` (e, U, C + 1) holds encodings and biases
    of elements u, and has no rows if scores do not depend on u. ``mask`` (B or 1, M) is true at valid keys. ``chunk``
    is the largest number of scores in memory at once; -1 means the default.
    """
    refuse_forward_mode()
    with torch.no_grad():
        return dense_attention_definition(query, *operands, in_place=True)


@dense_attention.register_fake
def _(query, key, value, offset_encoding, *rest) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2], len(offset_encoding), *query.shape[4:])


@torch.library.custom_op(
    "tg_equiattn::dense_attention_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor out, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def dense_attention_backward(grad, out, *operands):
    """Gradients of query, key, value, offset_encoding, space_bias and element_table."""
    refuse_forward_mode()
    query, tables = operands[0], operands[3:6]
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in operands[:6]]
    with torch.no_grad(), full_precision(query.device):
        x, mean, grad = DenseOperands(*operands, in_place=True), (grad * out).sum(2).flatten(3), grad.flatten(4)
        features, to_features = ([y[0].flatten(4), *y[1:3]] for y in (operands, grads))
        for chunks in x:
            of_pairs = x.of_pairs(chunks[0], *tables[:2])
            to_pairs = [None if y is None else torch.zeros_like(y) for y in of_pairs]
            for y in chunks:
                given, targets = (
                    (*x.cut(y, *z), table[y.heads]) for z, table in ((features, tables[2]), (to_features, grads[5]))
                )
                of_output = (z[y.images, y.heads, ..., y.output, y.pixels] for z in (grad, mean))
                x.add_gradients_(y, *of_output, given, of_pairs, targets, to_pairs)
            x.add_to_offsets_(chunks[0], to_pairs, *grads[3:5])
    return tuple(grads)


@dense_attention_backward.register_fake
def _(grad, out, *operands):
    return tuple(x.new_empty(x.shape) for x in operands[:6])


register_derivatives(dense_attention, dense_attention_backward, dense_attention_definition, 6, keep=True)
