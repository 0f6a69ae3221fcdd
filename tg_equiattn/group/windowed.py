"""Group attention within windows, tile by tile; see :mod:`.definition` for the formula and the sizes.

Nothing but the operands, the outputs and the log-sum-exps of scores is kept for backward, which computes scores again.
Products of queries and keys are shared by all outputs.

There are three products: :class:`Dot`, :class:`Sum`, and the adjoint of the latter, :class:`Scatter`. The derivatives
of each consist of the other two, so that they exist in any order. They take images with joined rows, those of
:class:`.FlatImages`: features ``x`` of queries are (b, e, C, H or 1, *flat), features ``y`` of keys (b, e, C, H or 1,
S, *padded), and weights (b, e, H, S, D, *flat).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .. import hashed_dropout
from ..operators import Plan, are_few, tile_numbers, tile_operator
from ..shapes import Float, Int
from ..tiles import WHOLE, Call, Shape, Tile, joined
from ..torch_state import is_transformed
from .definition import attend
from .windows import Block, FlatImages, flat_images, flat_operands, key_elements, query_elements

# Number of scores of one t in a tile on a CPU: few enough for its cache, and so many that operations take longer than
# their launch.
_TILE = 1 << 21


def _of_block(weight: Tensor, block: Block, dim: int) -> Tensor:
    """Weights of the offsets of a block, (..., *counts, *flat)."""
    axis = weight.ndim - dim
    return weight.narrow(axis, block.first, math.prod(block.counts)).unflatten(axis, block.counts)


def _channels_at_once(weight: Tensor, channels: int) -> int:
    """The number of channels whose products with weights are in memory before they are added up. It is 0 on a CPU if an
    operation for each offset is faster, and positive on accelerators, where this has fewer launches."""
    if weight.device.type == "cpu":
        return channels if are_few(channels * weight.numel() // max(1, weight.shape[5]), weight.device) else 0
    return max(1, min(channels, tile_numbers(weight.device, 0, 12) // max(1, weight.numel())))


class Dot(torch.autograd.Function):
    """start + sum_c x_c y_c at every offset. It is written into the memory of ``start``."""

    @staticmethod
    def forward(ctx: Any, start: Tensor | None, x: Tensor, y: Tensor, at: FlatImages) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.at, ctx.started, dim = at, start is not None, at.shifts.dim
        shape = *x.shape[:2], max(x.shape[3], y.shape[3]), y.shape[4], at.shifts.blocks[-1].offsets.stop, *x.shape[4:]
        total = x.new_empty(shape) if start is None else start.detach()  # the operation that made it has not saved it
        queries = x[(slice(None),) * 4 + (None,) * (1 + dim)]
        # to add products up takes a CPU longer
        at_once = x.device.type != "cpu" and _channels_at_once(total, x.shape[2]) == x.shape[2]
        if at_once:
            products = total.new_empty(*shape[:2], x.shape[2], *shape[2:])
            for block in at.shifts.blocks:
                torch.mul(queries, at.shifted(y, block), out=_of_block(products, block, dim))
            total = total.add_(products.sum(2)) if ctx.started else torch.sum(products, 2, out=total)
        for block in at.shifts.blocks:
            scores, keys = _of_block(total, block, dim), at.shifted(y, block).unbind(2)
            for c, (query, key) in enumerate(() if at_once else zip(queries.unbind(2), keys, strict=True)):
                scores.addcmul_(query, key) if c or ctx.started else torch.mul(query, key, out=scores)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        to_x, to_y = Sum.apply(grad, y, ctx.at).sum_to_size(x.shape), Scatter.apply(grad, x, y.shape, ctx.at)
        return grad if ctx.started else None, to_x, to_y, None


class Sum(torch.autograd.Function):
    """The sum over S and D of weights times y. If ``empty``, only derivatives are wanted, and values are left out."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, y: Tensor, at: FlatImages, empty: bool = False) -> Tensor:
        ctx.save_for_backward(weight, y)
        ctx.at, dim, channels = at, at.shifts.dim, y.shape[2]
        shape = *weight.shape[:2], channels, weight.shape[2], *weight.shape[5:]
        if empty:
            return weight.new_empty(shape)
        weight = weight.unsqueeze(2)
        if step := _channels_at_once(weight, channels):
            products = weight.new_empty(*shape[:2], step, *weight.shape[3:])
            blocks = [
                (_of_block(weight, x, dim), at.shifted(y, x), _of_block(products, x, dim)) for x in at.shifts.blocks
            ]
            out = weight.new_empty(shape)
            for c in range(0, channels, step):
                for weights, keys, product in blocks:
                    torch.mul(weights, keys[:, :, c : c + step], out=product[:, :, : channels - c])
                torch.sum(products[:, :, : channels - c], (4, 5), out=out[:, :, c : c + step])
            return out
        out = weight.new_zeros(shape)
        for weights, keys in zip(weight.unbind(4), y.unbind(4), strict=True):
            for of_offset, view in zip(weights.unbind(4), at.views(keys), strict=True):
                out.addcmul_(of_offset, view)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, y = ctx.saved_tensors
        return Dot.apply(None, grad, y, ctx.at), Scatter.apply(weight, grad, y.shape, ctx.at), None, None


class Scatter(torch.autograd.Function):
    """The adjoint of :class:`Sum` in y: weights times x, added to padded images of a shape."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, shape: torch.Size, at: FlatImages) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.at, dim, weight = at, at.shifts.dim, weight.unsqueeze(2)
        if step := _channels_at_once(weight, channels := x.shape[2]):
            products = weight.new_zeros(*x.shape[:2], step, *weight.shape[3:6], *shape[5:])
            blocks = [(_of_block(weight, block, dim), at.apart(products, block)) for block in at.shifts.blocks]
            features = x[(slice(None),) * 4 + (None,) * (1 + dim)]
            axes = (5,) if shape[3] == weight.shape[3] else (3, 5)
            y = weight.new_empty([n for axis, n in enumerate((*x.shape[:3], *products.shape[3:])) if axis not in axes])
            for c in range(0, channels, step):
                for weights, product in blocks:
                    torch.mul(weights, features[:, :, c : c + step], out=product[:, :, : channels - c])
                torch.sum(products[:, :, : channels - c], axes, out=y[:, :, c : c + step])
            return y.view(shape)
        y = weight.new_zeros(shape)
        if shape[3] > 1:
            parts = [(weight.squeeze(4), x, y.squeeze(4))]
        else:  # outputs share their keys
            parts = [
                (weights, x[:, :, :, h % x.shape[3], None], y.squeeze(3)) for h, weights in enumerate(weight.unbind(3))
            ]
        for weights, features, images in parts:
            for of_offset, view in zip(weights.unbind(4), at.views(images), strict=True):
                view.addcmul_(of_offset, features)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, x = ctx.saved_tensors
        to_x = Sum.apply(weight, grad, ctx.at).sum_to_size(x.shape)
        return Dot.apply(None, x, grad, ctx.at), to_x, None, None


class _Softmax(torch.autograd.Function):
    """Softmax over S and D, in the memory of the scores, and the log-sum-exps (b, e, H, 1, 1, *flat). If these are
    known, scores are given without them.

    The clamp avoids subnormal numbers, which slow a CPU down several times. They are negligible beside the sum, which
    is at least 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, least = scores.detach(), 2 / 3 * math.log(torch.finfo(scores.dtype).tiny)
        ctx.owns_grad = lse is not None  # there is one query, and nothing else reads what Sum or dropout has made
        if lse is None:
            top = scores.amax((3, 4), keepdim=True)
            mass = weight.sub_(top).clamp_(min=least).exp_().sum((3, 4), keepdim=True)
            weight.div_(mass)
            lse = mass.log() + top
        else:
            weight.clamp_(min=least).exp_()
        ctx.save_for_backward(weight)
        return weight, lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        slope = grad.mul_(weight) if ctx.owns_grad else grad * weight
        mean = slope.sum((3, 4), keepdim=True) - grad_lse
        return slope - weight * mean if torch.is_grad_enabled() else slope.addcmul_(weight, mean, value=-1), None


def _tile(
    settings: tuple[FlatImages, float], query: Float[Tensor, "b e #H C+1 *flat"],
    key: Float[Tensor, "b e C #H S *padded"], value: Float[Tensor, "b e Cv #H S *padded"],
    table: Float[Tensor, "e H D C+1"], elements: Float[Tensor, "e U C+1"],
    index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None, penalty: Float[Tensor, "#b 1 1 1 *padded"] | None,
    row: Int[Tensor, "b e 1 1 1 *flat"] | None, column: Int[Tensor, "H S D *1"] | None, *,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "b e Cv H *flat"], Float[Tensor, "b e H T *flat"]]:  # fmt: skip
    """Attention of some rows, from queries with a channel of ones. If the results are ``known``, only derivatives are
    wanted."""
    at, dropout = settings
    if is_transformed():  # which has begun since the forward pass: views by strides have no rules there
        return _by_definition(at, dropout, query, key, value, table, elements, index, penalty, row, column)
    # derivatives of higher order are those of the form below
    if _has_three_factors(value, index, row) and not (known is None and torch.is_grad_enabled()):
        results = _three_factors(at, query, key, value, table, elements, index, penalty, known is not None)
        if results is not None:
            return results
    (outputs, offsets), queries, pixels = table.shape[1:3], query_elements(index), query.shape[4:]
    own, lses = queries == 1, []
    total: Any = None
    for t in range(queries):
        of_t = query if own else query.narrow(2, t, 1)
        flat = of_t.flatten(4)
        scores = torch.matmul(table.reshape(len(table), of_t.shape[2], -1, table.shape[-1]), flat)
        # autograd would replace the gradient of a view, which is written to below, by a slow one of strides
        scores = torch.ops.aten._unsafe_view(scores, [*query.shape[:2], outputs, 1, offsets, *pixels])
        if penalty is not None:
            for block in at.shifts.blocks:
                _of_block(scores.detach(), block, at.shifts.dim).add_(at.shifted(penalty, block))
        # with several queries their share of a sum would suffer from the rounding of large log-sum-exps
        lse = known[1][:, :, :, t, None, None] if known and own else None
        if elements.shape[1] and index is not None:
            rho = elements.index_select(1, index.view(outputs, queries, -1)[:, t].flatten())
            logits = torch.matmul(rho.view(len(rho), of_t.shape[2], -1, rho.shape[-1]), flat)
            logits = logits.view(*query.shape[:2], outputs, -1, 1, *pixels)
            scores = scores + (logits if lse is None else logits - lse)
        elif lse is not None:
            scores.detach().sub_(lse)
        features = of_t[:, :, :, :-1].transpose(2, 3)
        if (of_t.shape[2], key.shape[4]) == (outputs, scores.shape[3]):
            scores = Dot.apply(scores, features, key, at)
        else:  # products that all outputs share
            scores = scores + Dot.apply(None, features, key, at)
        weight, lse = _Softmax.apply(scores, lse)
        total = weight if total is None else total + weight
        lses.append(lse.flatten(3, 4))
    if row is not None and column is not None:
        total = total * hashed_dropout.keep(row, column, dropout, query.dtype)
    return Sum.apply(total, value, at, known is not None), joined(lses, 3)


def _has_three_factors(value: Tensor, index: Tensor | None, row: Tensor | None) -> bool:
    """True on a CPU for relations with a sum over t, without dropout."""
    return row is None and value.device.type == "cpu" and query_elements(index) > 1


def _exp_or_zero(x: Tensor) -> Tensor:
    """exp(x) in place for x up to 0, and zero where products of two results would be subnormal: a CPU takes many times
    as long for such numbers, and for exponentials of numbers so small."""
    least = 0.5 * math.log(torch.finfo(x.dtype).tiny)
    return torch.threshold_(x.clamp_(min=least).exp_(), 2 * math.exp(least), 0.0)


class _ThreeFactors(torch.autograd.Function):
    """Softmax weights (b, e, H, S, D, *flat), added up over t, and log-sum-exps (b, e, H, T, *flat), with first
    derivatives.

    Scores are sums of three terms: of a query and a key, (b, e, T, S, D, *flat), of a query and an offset,
    (b, e, T, H, D, *flat), and of a query and an element u, (b, e, T, H, S, *flat). So weights are products of three
    exponentials, and a pixel has |H|^2 (2 D + |H|) of these instead of |H|^3 D. They are kept in the memory of the
    terms, divided by their maxima. Where a sum of products is then so small that it has lost precision, the log-sum-exp
    is minus infinity.
    """

    @staticmethod
    def forward(ctx: Any, *terms: Tensor) -> tuple[Tensor, Tensor]:
        tops = [x.amax(axes, keepdim=True) for x, axes in zip(terms, ((3, 4), (4,), (4,)), strict=True)]
        content, offset, element = (_exp_or_zero(x.detach().sub_(top)) for x, top in zip(terms, tops, strict=True))
        total = content.new_zeros(*offset.shape[:2], *element.shape[3:5], *content.shape[4:])
        product, sums, masses = torch.empty_like(total), [], []
        for of_content, of_offset, share in zip(*(x.unbind(2) for x in (content, offset, element)), strict=True):
            torch.mul(of_content.unsqueeze(2), of_offset.unsqueeze(3), out=product)
            sums.append(product.sum(4))
            masses.append((sums[-1] * share).sum(3))
            total.addcmul_(product, share.div_(masses[-1].unsqueeze(3)).unsqueeze(4))
        ctx.save_for_backward(content, offset, element, *sums)
        mass, least = torch.stack(masses, 3), 1e-9 if total.dtype == torch.float32 else 1e-130
        lse = mass.log() + sum(tops[1:], tops[0]).squeeze(4).transpose(2, 3)
        return total, lse.masked_fill_(mass <= least, -torch.inf)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        factors, sums = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        grads, product, slope = [torch.empty_like(x) for x in factors], torch.empty_like(grad), torch.empty_like(grad)
        each = (x.unbind(2) for x in (*factors, *grads))
        for t, (content, offset, share, to_content, to_offset, to_element) in enumerate(zip(*each, strict=True)):
            torch.mul(content.unsqueeze(2), offset.unsqueeze(3), out=product)
            by_element = torch.mul(product, grad, out=slope).sum(4)
            mean = (by_element * share).sum(3, keepdim=True) - grad_lse[:, :, :, t, None]
            torch.mul(by_element.addcmul_(sums[t], mean, value=-1), share, out=to_element)
            slope.addcmul_(product, mean.unsqueeze(4), value=-1).mul_(share.unsqueeze(4))
            torch.sum(slope, 2, out=to_content)
            torch.sum(slope, 3, out=to_offset)
        return tuple(grads)


def _three_factors(at, query, key, value, table, elements, index, penalty, empty) -> tuple[Tensor, Tensor] | None:
    """:func:`_tile` for relations with a sum over t, with first derivatives; ``None`` where precision would be lost."""
    (outputs, queries, keys), offsets, pixels = index.shape, table.shape[2], query.shape[4:]
    flat, lead, start = query.flatten(4), query.shape[:3], None
    offset = torch.matmul(table.flatten(1, 2)[:, None], flat).view(*lead, outputs, offsets, *pixels)
    if penalty is not None:  # of both terms, so that their maxima are those of valid keys
        start = query.new_zeros(*lead, keys, offsets, *pixels)
        for block in at.shifts.blocks:
            for x in (start, offset.detach()):
                _of_block(x, block, at.shifts.dim).add_(at.shifted(penalty, block))
    content = Dot.apply(start, query[:, :, :, :-1].transpose(2, 3), key, at)
    order = index.transpose(0, 1) + elements.shape[1] * torch.arange(queries, device=index.device)[:, None, None]
    element = torch.matmul(elements[:, None], flat).flatten(2, 3).index_select(2, order.flatten())
    total, lse = _ThreeFactors.apply(content, offset, element.view(*lead, outputs, keys, *pixels))
    return (Sum.apply(total, value, at, empty), lse) if bool(lse.amin() > -torch.inf) else None


def _by_definition(
    at, dropout, query, key, value, table, elements, index, penalty, row, column
) -> tuple[Tensor, Tensor]:
    """:func:`_tile` in standard operations of torch."""
    query = at.images(query[:, :, :, :-1].transpose(2, 3))
    key, value = (at.padded_images(x.squeeze(4 if index is None else 3)) for x in (key, value))
    penalty = None if penalty is None else at.padded_images(penalty[:, 0, 0, 0])
    if row is not None:
        row, column = at.images(row[:, :, 0, 0, 0]), column.flatten(2)
    out, lse = attend(query, key, value, table, elements, index, penalty, row, column, at.shifts, dropout)
    return at.flat(out), at.flat(lse)


def _plan(query, key, value, table, elements, index, penalty, row, column, *settings) -> Plan:
    """The arguments of :func:`.tiled`. A tile holds whole images if their scores fit, otherwise some heads of an image,
    otherwise some rows of a head, otherwise some outputs of a row."""
    *geometry, dropout, chunk = settings
    at, outputs, queries = flat_images(*geometry), table.shape[1], query_elements(index)
    batch, heads = query.shape[:2]
    sizes = outputs, at.spatial[0], heads, batch
    each = key_elements(index) * table.shape[2] * math.prod(at.spatial[1:])  # scores of a row of an output
    if _has_three_factors(value, index, row):  # which are formed for all t and outputs at once
        chunk = max(chunk // 2, each * outputs)
    elif queries > 1:  # their weights are added up in memory of their own
        chunk //= 2
    steps = [max(1, min(size, chunk // (each * math.prod(sizes[:n])))) for n, size in enumerate(sizes)]
    steps = [-(-size // -(-size // step)) for size, step in zip(sizes, steps, strict=True)]  # tiles of equal sizes
    tensors = query, key, value, table, elements, index, penalty, row, column
    lead, flat = query.shape[:2], query.shape[4:]
    shapes = Shape((*lead, value.shape[2], outputs, *flat), True), Shape((*lead, outputs, queries, *flat), True)
    every, setting, tiles = slice(None), (at, dropout), []
    if steps == [*sizes]:
        return Call(_tile, (Tile(setting, (WHOLE,) * 9, (WHOLE,) * 2),), shapes, (False,) * 9, True), tensors
    own_query, own_key = queries == 1 and query.shape[2] > 1, index is None and key.shape[3] > 1
    for starts in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        output, _, head, image = (slice(start, start + step) for start, step in zip(starts, steps, strict=True))
        of_query, of_key = at.rows(starts[1], min(steps[1], sizes[1] - starts[1]))
        cut_query = image, head, output if own_query else every, every, *of_query
        cut_key = image, head, every, output if own_key else every, every, *of_key
        masked = image if penalty is not None and len(penalty) > 1 else every, every, every, every, *of_key
        hashes = image, head, every, every, every, *of_query
        cut = cut_query, cut_key, cut_key, (head, output), head, output, masked, hashes, output
        place = (image, head, every, output, *of_query), (image, head, output, every, *of_query)
        tiles.append(Tile(setting, cut, place))
    return Call(_tile, tuple(tiles), shapes, (False,) * 9, True), tensors


def _outputs(query, key, value, table, elements, index, *rest) -> tuple[Tensor, ...]:
    sizes = (value.shape[2], table.shape[1]), (table.shape[1], query_elements(index))
    return tuple(query.new_empty(*query.shape[:2], *some, *query.shape[4:]) for some in sizes)


attention_by_tiles = tile_operator(
    "tg_equiattn::group_attention",
    "Tensor query, Tensor key, Tensor value, Tensor table, Tensor elements, Tensor? index, Tensor? penalty, "
    "Tensor? row, Tensor? column, SymInt[] spatial, SymInt[] sides, SymInt[] selection, bool circular, "
    "SymInt step, float dropout, SymInt chunk",
    _plan, _outputs, num_gradients=5, num_results=2,
)  # fmt: skip


def windowed_attention(
    query, key, value, offset_table, element_table, index, mask, seed, window, dropout, step=1, chunk=-1
) -> tuple[Tensor, Tensor]:
    """The same as :func:`.definition.windowed_attention_definition`, tile by tile.

    ``chunk`` is the largest number of scores of one t in memory at once; -1 means the default of the device.
    """
    chunk = tile_numbers(query.device, _TILE, 6) if chunk < 0 else chunk
    operands = flat_operands(query, key, value, offset_table, element_table, index, mask, seed, window, step)
    at = flat_images(*operands[9:])
    out, lse = attention_by_tiles(*operands, dropout, chunk)
    return at.images(out), at.images(lse)
