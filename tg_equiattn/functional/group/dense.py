"""Group attention over all pixels, tile by tile, by matrix products.

Scores are formed for one output element at a time and computed again in backward. In all matrices, channels come before
pixels: if heads have few channels, products of such matrices are several times faster on a CPU.

Sizes are those of :mod:`.definition`, with ``P`` query pixels, ``n`` of them in a tile, and ``M`` key pixels.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import hashed_dropout
from ..operators import Plan, tile_numbers, tile_operator
from ..tiles import WHOLE, Call, Shape, Tile, is_whole
from .definition import key_elements, query_elements
from .masks import MASKED_SCORE
from .shifts import offsets_of_pairs

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Number of scores of one t in a tile on a CPU.
_TILE = 1 << 20
# Number of images times heads in a tile, if there are as many: rows of the matrix products with encodings of offsets.
_HEADS = 16


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, offset_encoding: Tensor, space_bias: Tensor, element_table: Tensor,
    index: Tensor | None, mask: Tensor | None, seed: Tensor, dropout: float, chunk: int = -1,
    plain: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of all query pixels to all key pixels: query (B, e, C, Q, *spatial), key (B, e, C, K, M), value (B, e,
    Cv, K, M) -> (B, e, Cv, H, *spatial).

    ``offset_encoding`` is (H, D, C) and ``space_bias`` is (e, H, D) with all D offsets of the image. If there
    are no encodings or biases, they have no offsets (D = 0). ``element_table`` (e, U, C + 1) holds encodings and biases
    of elements u, and has no rows if scores do not depend on u. ``mask`` (B or 1, M) is true at valid keys. ``chunk``
    is the largest number of scores of one t in memory at once; -1 means the default of the device.
    ``plain`` asks for standard operations of torch where it is traced, instead of an operator.
    """
    spatial, pairs, penalty, row, column = query.shape[4:], None, None, None, None
    if offset_encoding.shape[1] or space_bias.shape[2]:
        pairs = offsets_of_pairs(spatial, query.device)
    if mask is not None:
        penalty = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, MASKED_SCORE)[:, None, None, None]
    query = query.flatten(4)
    if dropout:
        (batch, heads), pixels, seen = query.shape[:2], query.shape[4], key_elements(index) * key.shape[4]
        row, column = hashed_dropout.hashes(batch * heads * pixels, len(offset_encoding) * seen, seed)
        row, column = row.view(batch, heads, pixels, 1), column.view(-1, seen)
    if chunk < 0:
        chunk = tile_numbers(query.device, _TILE, 6)
    tensors = query, key, value, offset_encoding, space_bias, element_table, index, pairs, penalty, row, column
    (out,) = _attention(*tensors, dropout, chunk, plain=plain)
    return out.unflatten(-1, spatial)


def _tile(
    dropout: float, query: Float[Tensor, "b e C #T n"], key: Float[Tensor, "b e C #S M"],
    value: Float[Tensor, "b e Cv #S M"], encoding: Float[Tensor, "1 D C"], bias: Float[Tensor, "e 1 D"],
    table: Float[Tensor, "e U C+1"], index: Int[Tensor, "1 S"] | Int[Tensor, "1 T S"] | None,
    pairs: Int[Tensor, "n M"] | None, penalty: Float[Tensor, "#b 1 1 1 M"] | None, row: Int[Tensor, "b e n 1"] | None,
    column: Int[Tensor, "1 S*M"] | None, *, known: tuple[Tensor] | None = None,
) -> Float[Tensor, "b e Cv n"]:  # fmt: skip
    """Attention of some query pixels of one output element. If it is ``known``, only derivatives are wanted."""
    one, seen = torch.cat([query, torch.ones_like(query[:, :, :1])], 2), key.shape[3]
    total: Any = None
    rho: Any = None
    logits: Any = None
    if pairs is not None and encoding.shape[1]:
        rho = encoding[0].index_select(0, pairs.flatten()).unflatten(0, pairs.shape).mT  # (n, C, M)
    if pairs is not None and bias.shape[2]:
        logits = bias[:, 0].index_select(1, pairs.flatten()).view(-1, 1, *pairs.shape)
    last = torch.zeros_like(key[:, :, :1])  # one more channel for biases of elements and penalties
    keys = torch.cat([key, last if penalty is None else last + penalty], 2)
    for t in range(query_elements(index)):
        of_t = one[:, :, :, t]
        of_keys = keys
        if table.shape[1] and index is not None:
            of_keys = keys + table[:, index.view(-1, index.shape[-1])[t]].mT.unsqueeze(-1)
        scores = (of_t.mT @ of_keys.flatten(3)).unflatten(-1, (seen, -1))  # (b, e, n, S, M)
        if rho is not None:
            by_pixel = of_t[:, :, :-1].permute(3, 0, 1, 2).flatten(1, 2)  # (n, b*e, C)
            found = (by_pixel @ rho).unflatten(1, one.shape[:2]).movedim(0, 2).unsqueeze(3)
            scores = scores + found
        scores = scores if logits is None else scores + logits.transpose(1, 2)
        weight = scores.flatten(3).softmax(-1)
        total = weight if total is None else total + weight
    if row is not None and column is not None:
        total = total * hashed_dropout.keep(row, column, dropout, query.dtype)
    if known is None:
        return value.flatten(3) @ total.mT
    return _Known.apply(value.flatten(3), total, known[0])


def _own(query: Tensor, key: Tensor, index: Tensor | None) -> tuple[bool, bool]:
    """True if an output element has a query element of its own, and if it has a key element of its own."""
    return query_elements(index) == 1 and query.shape[3] > 1, index is None and key.shape[3] > 1


def _every_output(
    dropout, query, key, value, encoding, bias, table, index, pairs, penalty, row, column
) -> Float[Tensor, "B e Cv H P"]:
    """Attention of all output elements and pixels."""
    own_query, own_key = _own(query, key, index)
    found = []
    for h in range(encoding.shape[0]):
        some = slice(h, h + 1)
        of_query, of_key = some if own_query else slice(None), some if own_key else slice(None)
        of_index, of_column = (x if x is None else x[some] for x in (index, column))
        parts = query[:, :, :, of_query], key[:, :, :, of_key], value[:, :, :, of_key]
        tables = encoding[some], bias[:, some], table
        found.append(_tile(dropout, *parts, *tables, of_index, pairs, penalty, row, of_column))
    return torch.stack(found, 3)


class _Known(torch.autograd.Function):
    """A product a @ b.mT that is known already."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad @ b, grad.mT @ a, None


def _plan(query, key, value, encoding, bias, table, index, pairs, penalty, row, column, dropout, chunk) -> Plan:
    (batch, heads), pixels, outputs = query.shape[:2], query.shape[4], encoding.shape[0]
    tensors = query, key, value, encoding, bias, table, index, pairs, penalty, row, column
    shape = Shape((batch, heads, value.shape[2], outputs, pixels), True)
    if is_whole(query):
        return Call(_every_output, (Tile(dropout, (WHOLE,) * 11, (WHOLE,)),), (shape,), (False,) * 11), tensors
    seen = key_elements(index) * key.shape[4]
    step = max(1, min(pixels, chunk // (seen * max(1, min(_HEADS, batch * heads)))))
    step = math.ceil(pixels / math.ceil(pixels / step))  # tiles of equal size
    some = max(1, chunk // (step * seen))
    steps = step, max(1, some // heads), min(heads, some)
    own_query, own_key = _own(query, key, index)
    every, tiles = slice(None), []
    sizes = zip((pixels, batch, heads), steps, strict=True)
    starts = itertools.product(range(outputs), *(range(0, max(1, size), step) for size, step in sizes))
    for h, *first in starts:
        place, image, head = (slice(n, n + step) for n, step in zip(first, steps, strict=True))
        output = slice(h, h + 1)
        of_query = image, head, every, output if own_query else every, place
        of_key = image, head, every, output if own_key else every
        mask = image if penalty is not None and len(penalty) > 1 else every
        cut = of_query, of_key, of_key, output, (head, output), head, output, place, mask, (image, head, place), output
        tiles.append(Tile(dropout, cut, ((image, head, every, h, place),)))
    once = own_query or outputs == 1, *[(own_key or outputs == 1) and steps[0] >= pixels] * 2, *[False] * 8
    return Call(_tile, tuple(tiles), (shape,), once, True), tensors


def _outputs(query, key, value, encoding, *rest) -> tuple[Tensor, ...]:
    return (query.new_empty(*query.shape[:2], value.shape[2], encoding.shape[0], query.shape[4]),)


_attention = tile_operator(
    "tg_equiattn::dense_attention",
    "Tensor query, Tensor key, Tensor value, Tensor encoding, Tensor bias, Tensor table, Tensor? index, Tensor? pairs, "
    "Tensor? penalty, Tensor? row, Tensor? column, float dropout, SymInt chunk",
    _plan, _outputs, moving=6, results=1,
)  # fmt: skip
