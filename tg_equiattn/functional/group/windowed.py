"""Group attention within windows, tile by tile; see :mod:`.definition` for the formula and the sizes.

Nothing but the operands, the outputs and the log-sum-exps of scores is kept for backward, which computes scores again.
Products of queries and keys are shared by all outputs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...modes import full_precision, in_functorch_transform
from .. import hashed_dropout
from ..operators import Kernels, Plan, tile_numbers, tile_operator
from ..tiles import WHOLE, Call, Shape, Tile
from .definition import attend, key_elements, pixel_hashes, query_elements, valid_keys
from .flat_images import Dot, FlatImages, Sum
from .masks import MASKED_SCORE
from .shifts import shifts

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Number of scores of one t in a tile on a CPU, small enough to stay in the cache between operations.
_TILE = 1 << 19


def windowed_attention(
    query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular, dropout,
    step=1, chunk=-1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as :func:`.definition.windowed_attention_definition`, tile by tile.

    ``chunk`` is the largest number of scores of one t in memory at once; -1 means the default of the device.
    """
    operands = flat_operands(
        query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular, dropout,
        step, tile_numbers(query.device, _TILE, 6) if chunk < 0 else chunk,
    )  # fmt: skip
    at = _images(*operands[9:14])
    out, lse = attention_by_tiles(*operands)
    return at.images(out), at.images(lse)


def _images(spatial, kernel_size, selection, circular, step) -> FlatImages:
    return FlatImages(tuple(spatial), shifts(kernel_size, selection, len(spatial)), circular, step)


def flat_operands(
    query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular, dropout, step,
    chunk,
) -> tuple:  # fmt: skip
    """The operands of :func:`attention_by_tiles`."""
    spatial = [int(n) for n in query.shape[4:]] if torch.jit.is_tracing() else query.shape[4:]  # has no lists of sizes
    geometry = spatial, kernel_size, selection, circular, step
    at, valid = _images(*geometry), valid_keys(query, mask, circular)
    with full_precision(query.device):
        one = at.flat(torch.cat([query, torch.ones_like(query[:, :, :1])], 2).transpose(2, 3))
        keys, values = (at.padded(x).unsqueeze(4 if index is None else 3) for x in (key, value))
        penalty = None if valid is None else (1 - at.padded(valid))[:, None, None, None] * MASKED_SCORE
    row, column = pixel_hashes(query, offset_table, key_elements(index), seed, dropout)
    if row is not None and column is not None:
        row, column = at.flat(row)[:, :, None, None, None], column[(...,) + (None,) * (at.shifts.dim - 1)]
    return one, keys, values, offset_table, element_table, index, penalty, row, column, *geometry, dropout, chunk


class _Settings(NamedTuple):
    at: FlatImages
    dropout: float


def _tile(
    settings: _Settings, one: Float[Tensor, "b e #H C+1 *flat"], keys: Float[Tensor, "b e C #H S *padded"],
    values: Float[Tensor, "b e Cv #H S *padded"], table: Float[Tensor, "e H D C+1"],
    elements: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    penalty: Float[Tensor, "#b 1 1 1 *padded"] | None, row: Int[Tensor, "b e 1 1 1 *flat"] | None,
    column: Int[Tensor, "H S D *1"] | None, *, known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "b e Cv H *flat"], Float[Tensor, "b e H T *flat"]]:  # fmt: skip
    """Attention of some rows, from queries with a channel of ones. If the results are ``known``, only derivatives are
    wanted."""
    at, dropout = settings
    if in_functorch_transform():  # which has begun since the forward pass: views by strides have no rules there
        return _by_definition(at, dropout, one, keys, values, table, elements, index, penalty, row, column)
    (outputs, offsets), queries, pixels = table.shape[1:3], query_elements(index), one.shape[4:]
    own, lses = queries == 1, []
    total: Any = None
    for t in range(queries):
        query = one if own else one.narrow(2, t, 1)
        flat = query.flatten(4)
        scores = torch.matmul(table.reshape(len(table), query.shape[2], -1, table.shape[-1]), flat)
        scores = scores.view(*query.shape[:2], outputs, 1, offsets, *pixels)
        if elements.shape[1] and index is not None:
            logits = _by_key(torch.matmul(elements[:, None], flat), index.view(outputs, queries, -1)[:, t])
            scores = scores + logits.unflatten(-1, pixels).unsqueeze(4)
        features = query[:, :, :, :-1].transpose(2, 3)
        if (query.shape[2], keys.shape[4]) == (outputs, scores.shape[3]):
            scores = Dot.apply(scores, features, keys, penalty, at)
        else:  # products that all outputs share
            scores = scores + Dot.apply(None, features, keys, penalty, at)
        # with several queries their share of a sum would suffer from the rounding of large log-sum-exps
        weight, lse = _Softmax.apply(scores, known[1][:, :, :, t] if known and own else None)
        total = weight if total is None else total + weight
        lses.append(lse)
    if row is not None and column is not None:
        total = total * hashed_dropout.keep(row, column, dropout, one.dtype)
    return Sum.apply(total, values, at, known is not None), torch.stack(lses, 3)


def _by_definition(
    at, dropout, one, keys, values, table, elements, index, penalty, row, column
) -> tuple[Tensor, Tensor]:
    """:func:`_tile` in standard operations of torch."""
    query = at.images(one[:, :, :, :-1].transpose(2, 3))
    key, value = (at.padded_images(x.squeeze(4 if index is None else 3)) for x in (keys, values))
    penalty = None if penalty is None else at.padded_images(penalty[:, 0, 0, 0])
    if row is not None:
        row, column = at.images(row[:, :, 0, 0, 0]), column.flatten(2)
    found = attend(query, key, value, table, elements, index, penalty, row, column, at.shifts, at.step, dropout)
    return at.flat(found[0]), at.flat(found[1])


def _by_key(x: Float[Tensor, "b e #H U pixels"], order: Int[Tensor, "H S"]) -> Float[Tensor, "b e H S pixels"]:
    """Gather logits of u into logits of key elements."""
    if x.shape[2] == len(order):
        order = order + x.shape[3] * torch.arange(len(order), device=x.device)[:, None]
    return x.flatten(2, 3).index_select(2, order.flatten()).unflatten(2, (len(order), -1))


class _Softmax(torch.autograd.Function):
    """Softmax over S and D, in the memory of the scores, and the log-sum-exps (b, e, H, *flat), unless they are known.

    The clamp avoids subnormal numbers, which slow a CPU down several times. They are negligible beside the sum, which
    is at least 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        top = scores.amax((3, 4), keepdim=True) if lse is None else lse[:, :, :, None, None]
        weight = scores.detach().sub_(top).clamp_(min=2 / 3 * math.log(torch.finfo(scores.dtype).tiny)).exp_()
        if lse is None:
            mass = weight.sum((3, 4), keepdim=True)
            lse = (mass.log() + top)[:, :, :, 0, 0]
            weight.mul_(mass.reciprocal_())
        else:
            lse = lse.clone()
        ctx.save_for_backward(weight)
        return weight, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        slope = grad * weight
        mean = slope.sum((3, 4), keepdim=True) - grad_lse[:, :, :, None, None]
        return slope - weight * mean if torch.is_grad_enabled() else slope.addcmul_(weight, mean, value=-1), None


def _plan(one, keys, values, table, elements, index, penalty, row, column, *settings) -> Plan:
    """The arguments of :func:`.tiled`. A tile holds whole images if their scores fit, otherwise some heads of an image,
    otherwise some rows of a head, otherwise some outputs of a row."""
    *geometry, dropout, chunk = settings
    at, (batch, heads), outputs, queries = _images(*geometry), one.shape[:2], table.shape[1], query_elements(index)
    of_output = key_elements(index) * table.shape[2] * math.prod(at.spatial[1:])  # scores of a row
    sizes, each = (outputs, at.spatial[0], heads, batch), of_output
    steps: list[int] = []
    for size in sizes:
        steps.append(max(1, min(size, chunk // each)))
        each *= size
    steps[1] = -(-sizes[1] // -(-sizes[1] // steps[1]))  # runs of equal size
    every, setting, tiles = slice(None), _Settings(at, dropout), []
    for starts in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        some, _, head, image = (slice(start, start + step) for start, step in zip(starts, steps, strict=True))
        of_queries, of_keys = at.rows(starts[1], min(steps[1], sizes[1] - starts[1]))
        query = image, head, some if queries == 1 and one.shape[2] > 1 else every, every, *of_queries
        key = image, head, every, some if index is None and keys.shape[3] > 1 else every, every, *of_keys
        masked = image if penalty is not None and len(penalty) > 1 else every, every, every, every, *of_keys
        hashes = image, head, every, every, every, *of_queries
        cut = query, key, key, (head, some), head, some, masked, hashes, some
        place = (image, head, every, some, *of_queries), (image, head, some, every, *of_queries)
        tiles.append(Tile(setting, cut, place))
    if len(tiles) == 1:
        tiles = [Tile(setting, (WHOLE,) * 9, (WHOLE,) * 2)]
    shapes = (batch, heads, values.shape[2], outputs), (batch, heads, outputs, queries)
    # several tiles read the same keys if they hold different rows, or outputs without a key of their own
    apart, whole = steps[0] >= outputs, steps[1] >= sizes[1]
    of_keys_once = whole and (apart or (index is None and keys.shape[3] > 1))
    once = apart or (queries == 1 and one.shape[2] > 1), of_keys_once, of_keys_once, *[False] * 6
    call = Call(_tile, tuple(tiles), tuple(Shape((*x, *one.shape[4:]), True) for x in shapes), once, True)
    return call, (one, keys, values, table, elements, index, penalty, row, column)


def _outputs(one, keys, values, table, elements, index, *rest) -> tuple[Tensor, ...]:
    lead, outputs, pixels = one.shape[:2], table.shape[1], one.shape[4:]
    out = one.new_empty(*lead, values.shape[2], outputs, *pixels)
    return out, one.new_empty(*lead, outputs, query_elements(index), *pixels)


def _fits(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> bool:
    """True for heads whose channels fit in the registers of a GPU, and images whose numbers int32 can count."""
    width = max(key.shape[2], value.shape[2]) * query.element_size()
    return width <= 64 and max(x.numel() // (x.shape[0] * x.shape[1]) for x in (query, key, value)) < 2**31


KERNELS = Kernels(".group.gpu_kernels", _fits)
attention_by_tiles = tile_operator(
    "tg_equiattn::group_attention",
    "Tensor one, Tensor keys, Tensor values, Tensor table, Tensor elements, Tensor? index, Tensor? penalty, "
    "Tensor? row, Tensor? column, SymInt[] spatial, SymInt kernel_size, SymInt[] selection, bool circular, "
    "SymInt step, float dropout, SymInt chunk",
    _plan, _outputs, moving=5, results=2, kernels=KERNELS,
)  # fmt: skip
