"""Group attention over all pixels, tile by tile, by matrix products.

Scores are computed again in backward. In all matrices, channels come before pixels: if heads have few channels,
products of such matrices are several times faster on a CPU.

Sizes are those of :mod:`.definition`, with ``P`` query pixels, ``n`` of them in a tile, and ``M`` key pixels.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor

from .. import hashed_dropout
from ..operators import Plan, tile_numbers, tile_operator
from ..shapes import Float, Int
from ..tiles import WHOLE, Call, Shape, Tile
from ..torch_state import is_whole
from .windows import key_elements, key_penalty, offsets_of_pairs, pixel_hashes, query_elements

# Number of scores of one t in a tile on a CPU.
_TILE = 1 << 20
# Number of images times heads in a tile, if there are as many: rows of the matrix products with encodings of offsets.
_HEADS = 16


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, offset_encoding: Tensor, space_bias: Tensor, element_table: Tensor,
    index: Tensor | None, mask: Tensor | None, seed: Tensor | None, dropout: float, chunk: int = -1,
    plain: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of all query pixels to all key pixels: query (B, e, C, Q, *spatial), key (B, e, C, K, M), value (B, e,
    Cv, K, M) -> (B, e, Cv, H, *spatial).

    ``offset_encoding`` is (H, D, C) and ``space_bias`` is (e, H, D) with all D offsets of the image. If there
    are no encodings or biases, they have no offsets (D = 0). ``element_table`` (e, U, C + 1) holds encodings and biases
    of elements u, and has no rows if scores do not depend on u. ``mask`` (B or 1, M) is true at valid keys. ``seed`` is
    the seed of the dropout. ``chunk`` is the largest number of scores of one t in memory at once; -1 means the default
    of the device. ``plain`` asks for standard operations of torch where it is traced, instead of an operator.
    """
    spatial, has_offsets = query.shape[4:], bool(offset_encoding.shape[1] or space_bias.shape[2])
    pairs = offsets_of_pairs(spatial, query.device) if has_offsets else None
    penalty = key_penalty(query, mask)
    row, column = pixel_hashes(query, (len(offset_encoding), key_elements(index) * key.shape[4]), seed)
    query, row = query.flatten(4), None if row is None else row.flatten(2).unsqueeze(3)
    chunk = tile_numbers(query.device, _TILE, 6) if chunk < 0 else chunk
    tensors = query, key, value, offset_encoding, space_bias, element_table, index, pairs, penalty, row, column
    (out,) = _attention(*tensors, dropout, chunk, plain=plain)
    return out.unflatten(-1, spatial)


def _tile(
    dropout: float, query: Float[Tensor, "b e C Q n"], key: Float[Tensor, "b e C K M"],
    value: Float[Tensor, "b e Cv K M"], encoding: Float[Tensor, "H D C"], bias: Float[Tensor, "e H D"],
    table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    pairs: Int[Tensor, "n M"] | None, penalty: Float[Tensor, "#b M"] | None, row: Int[Tensor, "b e n 1"] | None,
    column: Int[Tensor, "H S*M"] | None, *, known: tuple[Tensor] | None = None,
) -> Float[Tensor, "b e Cv H n"]:  # fmt: skip
    """Attention of some query pixels of some output elements. Called with ``known`` values for derivatives."""
    outputs, queries, pixels = encoding.shape[0], query_elements(index), key.shape[4]
    query, ones = query.transpose(2, 3), torch.ones_like(query[:, :, :1, :1])
    # (b, e, H or 1, C, S, M), and for values (b, e, H, Cv, S M)
    keys, values = (x.transpose(2, 3).unsqueeze(4) if index is None else x.unsqueeze(2) for x in (key, value))
    values = values.flatten(4).expand(-1, -1, outputs, -1, -1)
    total = rho = logits = cast(Any, None)
    if pairs is not None and encoding.shape[1]:
        rho = encoding.transpose(0, 1).flatten(1).index_select(0, pairs.flatten())  # of matrices, since it is faster
        rho = rho.view(*pairs.shape, *encoding.shape[::2]).permute(2, 0, 3, 1)  # (H, n, C, M)
    if pairs is not None and bias.shape[2]:
        logits = bias.flatten(0, 1).index_select(1, pairs.flatten())
        logits = logits.view(*bias.shape[:2], pairs.shape[0], 1, pairs.shape[1])  # (e, H, n, 1, M)
    if penalty is not None:
        penalty = penalty[:, None, None, None, None]
        logits = penalty if logits is None else logits + penalty
    for t in range(queries):
        of_t, of_keys = query if queries == 1 else query[:, :, t : t + 1], keys
        if table.shape[1] and index is not None:  # the last channel of the table holds biases
            elements = table[:, index if index.ndim == 2 else index[:, t]].mT.unsqueeze(-1)  # (e, H, C + 1, S, 1)
            of_keys = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, 1)) + elements
            of_t = torch.cat([of_t, ones.expand(-1, -1, of_t.shape[2], -1, -1)], 3)
        scores = (of_t.mT @ of_keys.flatten(4)).unflatten(-1, (-1, pixels))  # (b, e, H or 1, n, S, M)
        if rho is not None:
            by_pixel = of_t[:, :, :, : encoding.shape[2]].permute(2, 4, 0, 1, 3).flatten(2, 3)  # (H or 1, n, b*e, C)
            scores = scores + (by_pixel @ rho).unflatten(2, key.shape[:2]).permute(2, 3, 0, 1, 4).unsqueeze(4)
        scores = scores if logits is None else scores + logits
        weight = scores.flatten(4).softmax(-1)
        total = weight if total is None else total + weight
    total = total.expand(-1, -1, outputs, -1, -1)
    if row is not None and column is not None:
        total = total * hashed_dropout.keep(row[:, :, None], column[:, None], dropout, query.dtype)
    if known is None:
        return (values @ total.mT).transpose(2, 3)
    return _Known.apply(values, total, known[0].transpose(2, 3)).transpose(2, 3)


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
        return Call(_tile, (Tile(dropout, (WHOLE,) * 11, (WHOLE,)),), (shape,), (False,) * 11), tensors
    keys = key_elements(index) * key.shape[4]
    step = max(1, min(pixels, chunk // (keys * max(1, min(_HEADS, batch * heads)))))
    step = -(-pixels // -(-pixels // step))  # equal numbers of pixels
    rest = max(1, chunk // (step * keys))
    steps = max(1, rest // (batch * heads)), step, max(1, rest // heads), min(heads, rest)
    own_query, own_key = query_elements(index) == 1 and query.shape[3] > 1, index is None and key.shape[3] > 1
    every, tiles = slice(None), []
    sizes = zip((outputs, pixels, batch, heads), steps, strict=True)
    for starts in itertools.product(*(range(0, size, step) for size, step in sizes)):
        output, place, image, head = (slice(n, n + step) for n, step in zip(starts, steps, strict=True))
        of_query = image, head, every, output if own_query else every, place
        of_key = image, head, every, output if own_key else every
        mask = image if penalty is not None and len(penalty) > 1 else every
        cut = of_query, of_key, of_key, output, (head, output), head, output, place, mask, (image, head, place), output
        tiles.append(Tile(dropout, cut, ((image, head, every, output, place),)))
    return Call(_tile, tuple(tiles), (shape,), (False,) * 11, True), tensors


def _outputs(query, key, value, encoding, *rest) -> tuple[Tensor, ...]:
    return (query.new_empty(*query.shape[:2], value.shape[2], encoding.shape[0], query.shape[4]),)


_attention = tile_operator(
    "tg_equiattn::dense_attention",
    "Tensor query, Tensor key, Tensor value, Tensor encoding, Tensor bias, Tensor table, Tensor? index, Tensor? pairs, "
    "Tensor? penalty, Tensor? row, Tensor? column, float dropout, SymInt chunk",
    _plan, _outputs, num_gradients=6, num_results=1,
)  # fmt: skip
