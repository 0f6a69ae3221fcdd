"""Group attention within windows as one PyTorch operator for all relations; see :mod:`.definition` for the sizes.

For backward it saves its inputs, its outputs and the log-sum-exps of scores. Scores are formed chunk by chunk, for one
query element t at a time, and recomputed in backward. Products of queries and keys are shared by all outputs.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import refuse_forward_mode
from ..second_derivatives import register_derivatives, second_derivatives
from . import hashed_dropout
from .definition import Chunk, Operands, attend_rows, runs, windowed_attention_definition, with_one
from .flat_operands import FlatOperands
from .three_factors import has_three_factors, three_factor_weights

if TYPE_CHECKING:
    from jaxtyping import Float

_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor offset_table, Tensor element_table, Tensor? index, Tensor? mask, "
    "Tensor seed, SymInt kernel_size, SymInt[] selection, bool circular, float dropout, SymInt chunk=-1"
)


@torch.library.custom_op("tg_equiattn::group_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor)")
def windowed_attention(query, key, value, offset_table, element_table, index, *rest) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exps of its scores: query (B, e, C, Q, *spatial), key (B, e, C, K, *spatial), value (B,
    e, Cv, K, *spatial) -> out (B, e, Cv, H, *spatial), lse (B, e, H, T, *spatial).

    :mod:`.definition` describes the tables and :meth:`.Elements.of` the ``index``. ``mask`` (B or 1, *spatial) is true
    at valid keys. ``chunk`` is the largest number of scores in memory at once; -1 means the default.
    """
    refuse_forward_mode()
    out, lse = _outputs(query, key, value, offset_table, element_table, index)
    with torch.no_grad(), full_precision(query.device):
        if not out.numel():
            return out, lse
        x = FlatOperands(query, key, value, offset_table, element_table, index, *rest)
        for chunk in x:
            some, images = (chunk.images, chunk.heads), _flat_images(x, chunk, query, key, value)
            for run, (part, outputs) in itertools.product(runs(x.spatial[0], chunk.rows), x.by_outputs()):
                found = _attend(part, chunk, _of_run(part, run, outputs, *images))
                for y, z in zip((out[some][:, :, :, outputs], lse[some][:, :, outputs]), found, strict=True):
                    Operands.rows(x, y, run).copy_(x.from_flat(z))
    return out, lse


def _flat_images(x: FlatOperands, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor | None]:
    """The flat images of a chunk: queries with a channel of ones, keys and values from :meth:`.Elements.of_keys`,
    penalties of masked keys, and the hashes of pixels for dropout."""
    some, penalty = (chunk.images, chunk.heads), x.penalty(chunk.images)
    seen = [x.elements.of_keys(x.padded(y[some])) for y in (key, value)]
    hashes = x.flat(x.row[some]) if x.dropout else None
    one = x.flat(with_one(query[some]).transpose(2, 3)).transpose(2, 3)  # memory order of matrix products
    return [one, *seen, penalty, hashes]


def _of_run(x: FlatOperands, run: tuple[int, int], outputs: slice, one, keys, values, penalty, hashes) -> tuple:
    """Select a run of rows of :func:`_flat_images` and some outputs; replace the hashes by dropout factors."""
    one, keys, values = x.of_outputs(outputs, one, keys, values)
    one, penalty, hashes = (None if y is None else x.rows(y, run) for y in (one, penalty, hashes))
    keep = None
    if hashes is not None:
        column = x.column.squeeze(-1)  # pixels have one axis less
        keep = hashed_dropout.keep(hashes, column, x.dropout, one.dtype)
    return one, *(x.rows(y, run, padded=True) for y in (keys, values)), penalty, keep


def _attend(
    x: FlatOperands, chunk: Chunk, operands: tuple
) -> tuple[Float[Tensor, "b e Cv H *rows"], Float[Tensor, "b e H T *rows"]]:
    """Attention of a run of flat rows and the log-sum-exps of its scores."""
    one, keys, values, penalty, keep = operands
    tables = x.offset_table[chunk.heads], x.element_table[chunk.heads]
    total, lses = None, []
    for t in range(x.elements.queries):
        of_t = x.elements.of_query(one, t)
        given = t, of_t[:, :, :-1], of_t.transpose(2, 3).flatten(4), keys, *tables, penalty
        weight, share, lse = _weights(x, *given)
        lses.append(lse)
        if x.elements.queries > 1:
            total = weight * share if total is None else total.addcmul_(weight, share)
    weight = weight if total is None else total
    if keep is not None:
        weight *= keep
    out = x.weighted(weight, values)
    return out if total is not None else out.mul_(share[:, :, None, :, 0, 0]), torch.stack(lses, 3)


def _weights(
    x: FlatOperands, *given
) -> tuple[Float[Tensor, "b e H S D *rows"], Float[Tensor, "b e H #S 1 *rows"], Float[Tensor, "b e H *rows"]]:
    """Weights without normalisation, the factor that normalises them, and the log-sum-exps of the scores of one t;
    arguments are those of :meth:`.FlatOperands.scores`."""
    found = three_factor_weights(x, *given) if has_three_factors(x) else None
    if found is not None:
        return found
    weight = x.scores(*given)
    top = weight.amax((3, 4), keepdim=True)
    mass = x.exponentials_(weight, top).sum((3, 4), keepdim=True)
    return weight, mass.reciprocal(), mass.log().add_(top)[:, :, :, 0, 0]


@windowed_attention.register_fake
def _outputs(query, key, value, offset_table, element_table, index, *rest) -> tuple[Tensor, Tensor]:
    (batch, heads), outputs, spatial = query.shape[:2], offset_table.shape[1], query.shape[4:]
    queries = index.shape[1] if index is not None and index.ndim == 3 else 1
    out = query.new_empty(batch, heads, value.shape[2], outputs, *spatial)
    return out, query.new_empty(batch, heads, outputs, queries, *spatial)


@torch.library.custom_op(
    "tg_equiattn::group_attention_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_lse, Tensor out, Tensor lse, {_OPERANDS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def windowed_attention_backward(
    grad, grad_lse, out, lse, query, key, value, offset_table, element_table, index, *rest
):  # fmt: skip
    """Gradients of query, key, value and both tables; ``grad_lse`` is that of the log-sum-exps."""
    refuse_forward_mode()
    operands = query, key, value, offset_table, element_table
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in operands]
    if not out.numel():
        return tuple(grads)
    to_query, to_key, to_value, *to_tables = grads
    with torch.no_grad(), full_precision(query.device):
        x = FlatOperands(*operands, index, *rest)
        for chunk in x:
            some, images = (chunk.images, chunk.heads), _flat_images(x, chunk, query, key, value)
            mean = -grad_lse[some]
            if x.elements.queries == 1:  # the mean of slopes; with a sum over t, _add_gradients_ computes it for each t
                mean += (grad[some] * out[some]).sum(2).unsqueeze(3)
            given = [x.flat(y) for y in (grad[some], mean, lse[some])]
            sums = [torch.zeros_like(y) for y in images[:3]]
            for run, (part, outputs) in itertools.product(runs(x.spatial[0], chunk.rows), x.by_outputs()):
                g, *of_queries = (x.rows(y, run) for y in given)
                of_outputs = g[:, :, :, outputs], *(y[:, :, outputs] for y in of_queries)
                to_one, *to_seen = part.of_outputs(outputs, *sums)
                targets = x.rows(to_one, run), *(x.rows(y, run, padded=True) for y in to_seen)
                tables = to_tables[0][chunk.heads, outputs], to_tables[1][chunk.heads]
                _add_gradients_(part, chunk, _of_run(part, run, outputs, *images), of_outputs, targets, tables)
            to_query[some] = x.from_flat(sums[0][:, :, :-1])
            to_key[some], to_value[some] = (x.from_padded(y.flatten(3, 4)) for y in sums[1:])
    return tuple(grads)


def _add_gradients_(x: FlatOperands, chunk: Chunk, operands: tuple, given, targets, to_tables) -> None:
    """Add the contributions of a run of rows to the gradients: ``targets`` of flat queries, keys and values, and
    ``to_tables`` of the tables of the chunk's heads."""
    (one, keys, values, penalty, keep), (grad, mean, lse), (to_one, to_keys, to_values) = operands, given, targets
    tables, elements = (x.offset_table[chunk.heads], x.element_table[chunk.heads]), x.elements
    total: Tensor | None = None
    weight: Any = None
    to_weight: Tensor | None = None
    for t in range(elements.queries):
        of_t = elements.of_query(one, t)
        query, flat = of_t[:, :, :-1], of_t.transpose(2, 3).flatten(4)
        given = t, query, flat, keys, *tables, penalty
        if to_weight is None:
            to_weight = x.products(grad, values, name="slope of weight")
            if keep is not None:
                to_weight *= keep
        if elements.queries == 1:
            weight = x.exponentials_(x.scores(*given), lse[:, :, :, t, None, None])
            slope = to_weight.sub_(mean[:, :, :, 0, None, None]).mul_(weight)
        else:
            weight, share, _ = _weights(x, *given)  # not from lse, which is rounded if scores are large
            slope = torch.mul(to_weight, weight.mul_(share), out=x.memory("slope", weight.shape))
            of_slopes = slope.sum((3, 4), keepdim=True).add_(mean[:, :, :, t, None, None])
            slope.addcmul_(weight, of_slopes, value=-1)
            total = weight.clone() if total is None else total.add_(weight)
        to_flat = _add_to_tables_(x, t, slope.flatten(5), flat, tables, to_tables)
        shared = slope if query.shape[3] == slope.shape[2] else slope.sum(2, keepdim=True)
        x.add_scattered_(to_keys, shared, query)
        to_query = elements.of_query(to_one, t)[:, :, :-1]
        to_query += x.weighted(shared, keys)
        to_query += to_flat.transpose(2, 3).view(to_query.shape)
    total = weight if total is None else total
    x.add_scattered_(to_values, total if keep is None else total * keep, grad)


def _add_to_tables_(
    x: FlatOperands, t: int, slope: Float[Tensor, "b e H S D pixels"], one: Float[Tensor, "b e #H C+1 pixels"], tables,
    to_tables,
) -> Float[Tensor, "b e #H C pixels"]:  # fmt: skip
    """Add to the gradients of both tables, from the gradients of scores ``slope`` and queries ``one``. Return the
    gradient of queries through the tables."""
    (offset_table, element_table), (to_offsets, to_elements) = tables, to_tables
    logits = slope if slope.shape[3] == 1 else slope.sum(3, keepdim=True)
    logits = logits.flatten(2, 4).unflatten(2, (one.shape[2], -1))
    to_offsets += torch.matmul(logits, one.mT).sum(0).view(offset_table.shape)
    table = offset_table.reshape(len(offset_table), one.shape[2], -1, offset_table.shape[-1])
    to_query = torch.matmul(table[..., :-1].mT, logits)
    if element_table.shape[1]:
        logits = x.elements.by_argument(slope.sum(4), t, 2)
        logits = logits if logits.shape[2] == one.shape[2] else logits.sum(2, keepdim=True)
        to_elements += torch.matmul(logits, one.mT).sum((0, 2))
        to_query += torch.matmul(element_table[:, None, :, :-1].mT, logits)
    return to_query


@windowed_attention_backward.register_fake
def _(grad, grad_lse, out, lse, *operands):
    return tuple(x.new_empty(x.shape) for x in operands[:5])


def _second_backward(operands, given, cotangents, *rest) -> tuple[Tensor | None, ...]:
    """The same as :func:`.second_derivatives`, chunk by chunk. If its results must be differentiable again, they are
    computed without chunks."""
    query, upstream = operands[0], given[:2]
    if torch.is_grad_enabled() or not query.numel():
        plain = lambda *y: windowed_attention_definition(*y, *rest)  # noqa: E731
        return *second_derivatives(plain, operands, upstream, cotangents), None, None
    x, totals = Operands(*operands, *rest), [torch.zeros_like(y) for y in (*operands, *upstream)]
    x.budget = x.budget * 3 // 4  # several tensors of this size must stay in the cache of a CPU

    def of_chunk(tensors, chunk: Chunk) -> list:
        cuts = [lambda y: y[some], *2 * [lambda y: x.shifts.pad(y[some], x.circular)], *2 * [lambda y: y[chunk.heads]]]
        return [None if y is None else cut(y) for y, cut in zip(tensors, cuts, strict=True)]

    def of_run(tensors, run: tuple[int, int]) -> list:
        images = [None if y is None else x.rows(y, run, padded=n > 0) for n, y in enumerate(tensors[:3])]
        return [*images, *tensors[3:]]

    with full_precision(query.device):
        for chunk in x:
            some = chunk.images, chunk.heads
            given, along = of_chunk(operands, chunk), of_chunk(cotangents, chunk)
            sums = [torch.zeros_like(y) for y in given]
            for run in runs(x.spatial[0], chunk.rows):
                found = second_derivatives(
                    functools.partial(attend_rows, x, chunk, run), of_run(given, run),
                    [x.rows(y[some], run) for y in upstream], of_run(along, run),
                )  # fmt: skip
                targets = *of_run(sums, run), *(x.rows(y[some], run) for y in totals[5:])
                for target, y in zip(targets, found, strict=True):
                    target += y
            totals[0][some] = sums[0]
            for n, y in enumerate(sums[1:3], 1):
                totals[n][some] = x.shifts.unpad(y, x.circular)
            for n, y in enumerate(sums[3:], 3):
                totals[n][chunk.heads] += y
    return *totals, None, None


register_derivatives(
    windowed_attention, windowed_attention_backward, windowed_attention_definition, 5, keep=True,
    second=_second_backward,
)  # fmt: skip
