"""Group attention within windows by its definition, in standard operations of torch, which all transforms support.

    score(h, t, s, D) = <q(i, t), k(i + D, s)> + <[q(i, t), 1], offset_table[h, D] + element_table[u]>
    out(i, h) = sum_t sum_{s, D} softmax_{s, D}(score) v(i + D, s),    u = index[h, t, s]

Sizes: ``B`` images, ``b`` of them in a tile; ``e`` heads; ``C`` channels; ``Q`` query elements and ``K`` key elements;
``U`` arguments of encodings; ``D`` offsets of the window. Scores have three axes of group elements: output elements h
(``H``), query elements t (``T``; each output is a sum over them) and key elements s (``S``).

============================== ======= ======= ======= ============== ========== ===========
relation                       H       T       S       query of (h,t) key of s   index
============================== ======= ======= ======= ============== ========== ===========
``"frame"``                    |H|     1       1       h              h          None
lifting                        |H|     1       1       0              0          None
``"relative"``                 |H|     1       |H|     h              s          (H, S)
``"lifted"``, ge_vit, gsa      |H|     |H|     |H|     t              s          (H, T, S)
============================== ======= ======= ======= ============== ========== ===========

The tables hold encodings, with biases as their last channel: ``offset_table`` is (e, H, D, C + 1), and
``element_table`` (e, U, C + 1), without rows if scores do not depend on u. ``index`` is a permutation along s. Queries
are already multiplied by the scale c.

Every large tensor has the axes of queries, (b, e, H, T, *rows), followed by the axes that the softmax sums over, (S,
*window). Channels are separate tensors. A compiler for an accelerator fuses all sums over the same axes into one kernel
and keeps scores in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from .. import hashed_dropout
from .masks import MASKED_SCORE
from .shifts import Shifts, shifts

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def windowed_attention_definition(
    query: Float[Tensor, "B e C Q *spatial"], key: Float[Tensor, "B e C K *spatial"],
    value: Float[Tensor, "B e Cv K *spatial"], offset_table: Float[Tensor, "e H D C+1"],
    element_table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    mask: Bool[Tensor, "#B *spatial"] | None, seed: Int[Tensor, ""], kernel_size: int, selection: Sequence[int],
    circular: bool, dropout: float, step: int = 1,
) -> tuple[Float[Tensor, "B e Cv H *spatial"], Float[Tensor, "B e H T *spatial"]]:  # fmt: skip
    """Attention, and the log-sum-exps of its scores.

    ``mask`` is true at valid keys. ``kernel_size`` and ``selection`` are those of the window. Its offsets are multiples
    of ``step``.
    """
    at = shifts(kernel_size, selection, query.ndim - 4)
    seen = key_elements(index)
    valid = valid_keys(query, mask, circular)
    penalty = None if valid is None else (1 - at.pad(valid, step, circular)) * MASKED_SCORE
    row, column = pixel_hashes(query, offset_table, seen, seed, dropout)
    key, value = (at.pad(x, step, circular) for x in (key, value))
    with full_precision(query.device):
        return attend(query, key, value, offset_table, element_table, index, penalty, row, column, at, step, dropout)


def key_elements(index: Tensor | None) -> int:
    """The size S of the axis of key elements."""
    return 1 if index is None else index.shape[-1]


def query_elements(index: Tensor | None) -> int:
    """The size T of the axis of query elements."""
    return 1 if index is None or index.ndim == 2 else index.shape[1]


def valid_keys(query: Tensor, mask: Tensor | None, circular: bool) -> Float[Tensor, "#B *spatial"] | None:
    """A mask with ones at valid keys and zeros at others; None if all windows have valid keys only."""
    if mask is None:
        return None if circular else query.new_ones(1, *query.shape[4:])
    return mask.to(query.dtype)


def pixel_hashes(
    query: Tensor, offset_table: Tensor, seen: int, seed: Tensor, dropout: float
) -> tuple[Int[Tensor, "B e *spatial"], Int[Tensor, "H S D"]] | tuple[None, None]:
    """The hashes of queries and of weights for dropout; None without it."""
    if not dropout:
        return None, None
    (batch, heads), spatial = query.shape[:2], query.shape[4:]
    weights = offset_table.shape[1], seen, offset_table.shape[2]
    row, column = hashed_dropout.hashes(batch * heads * math.prod(spatial), math.prod(weights), seed)
    return row.view(batch, heads, *spatial), column.view(weights)


def attend(
    query: Float[Tensor, "b e C Q *rows"], key: Float[Tensor, "b e C K *padded"],
    value: Float[Tensor, "b e Cv K *padded"], offset_table: Float[Tensor, "e H D C+1"],
    element_table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    penalty: Float[Tensor, "#b *padded"] | None, row: Int[Tensor, "b e *rows"] | None,
    column: Int[Tensor, "H S D"] | None, at: Shifts, step: int, dropout: float,
) -> tuple[Float[Tensor, "b e Cv H *rows"], Float[Tensor, "b e H T *rows"]]:  # fmt: skip
    """Attention of some rows, whose windows are in padded images of keys and values. ``penalty`` is added to the scores
    of keys."""
    dim, side = at.dim, 2 * at.radius + 1
    own = index is None or index.ndim == 2  # an output h has one query, of element h
    near = _windows(query.shape[4:], key.shape[4:], side, step, query.device)

    def on_window(x: Tensor) -> Tensor:
        """(..., S or 1, D) -> (..., 1, .., 1, S or 1, *window), with zeros between a disk and its square."""
        x = at.to_square(x, -1)
        return x.reshape(*x.shape[:-2], *[1] * dim, x.shape[-2], *[side] * dim)

    def around(x: Tensor) -> Tensor:
        """(..., *padded) -> (..., *rows, 1, *window)."""
        return x.flatten(-dim)[..., near].unsqueeze(-1 - dim)

    def of_keys(x: Tensor) -> Tensor:
        """(b, e, K, *padded) -> (b, e, H or 1, 1, *rows, S, *window)."""
        x = around(x)
        return x.unsqueeze(3) if index is None else x.transpose(2, -1 - dim).unsqueeze(3)

    def of_queries(x: Tensor) -> Tensor:
        """(b, e, Q, *rows) -> (b, e, H or 1, T or 1, *rows, 1, *1)."""
        return x.unsqueeze(3 if own else 2)[(...,) + (None,) * (1 + dim)]

    *rho, bias = on_window(offset_table.movedim(-1, 0)[:, :, :, None, None])  # each (e, H, 1, *1, 1, *window)
    scores = bias + (1 - on_window(torch.ones_like(offset_table[0, 0, :, 0])[None])) * (2 * MASKED_SCORE)
    if element_table.shape[1] and index is not None:
        logits = torch.einsum("euc,becq...->bequ...", element_table[..., :-1], query)
        logits = logits + element_table[..., -1].view(1, len(element_table), 1, -1, *[1] * dim)
        element = torch.arange(logits.shape[2], device=query.device)
        element, u = (element[:, None, None], index[:, None]) if own else (element[:, None], index)
        scores = scores + logits[:, :, element, u].movedim(4, -1)[(...,) + (None,) * dim]
    if penalty is not None:
        scores = scores + around(penalty)[:, None, None, None]
    for one, other, encoding in zip(query.unbind(2), key.unbind(2), rho, strict=True):
        scores = scores + of_queries(one) * (of_keys(other) + encoding)
    flat = scores.flatten(-1 - dim)
    weight = flat.softmax(-1).view(scores.shape)  # softmax's derivatives round less than those of exp
    weight = weight if own else weight.sum(3, keepdim=True)
    if row is not None and column is not None:
        hashes = row[:, :, None, None][(...,) + (None,) * (1 + dim)]
        weight = weight * hashed_dropout.keep(hashes, on_window(column[:, None]), dropout, weight.dtype)
    sums = tuple(range(-1 - dim, 0))
    out = torch.stack([(weight * of_keys(x)).sum(sums).squeeze(3) for x in value.unbind(2)], 2)
    return out, flat.logsumexp(-1)


def _windows(
    rows: Sequence[int], padded: Sequence[int], side: int, step: int, device: torch.device
) -> Int[Tensor, "*rows *window"]:
    """The indices, among all pixels of a padded image, of the window of every pixel."""
    dim, flat = len(rows), torch.zeros((), dtype=torch.int64, device=device)
    for axis, (count, size) in enumerate(zip(rows, padded, strict=True)):
        along = torch.arange(count, device=device)[:, None] + step * torch.arange(side, device=device)
        shape = [1] * (2 * dim)
        shape[axis], shape[dim + axis] = count, side
        flat = flat * size + along.view(shape)
    return flat
