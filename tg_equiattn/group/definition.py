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

import torch
from torch import Tensor

from .. import hashed_dropout
from ..grids import Window
from ..shapes import Bool, Float, Int
from ..torch_state import full_precision
from .windows import MASKED_SCORE, Shifts, key_elements, key_penalty, pixel_hashes, shifts


def windowed_attention_definition(
    query: Float[Tensor, "B e C Q *spatial"], key: Float[Tensor, "B e C K *spatial"],
    value: Float[Tensor, "B e Cv K *spatial"], offset_table: Float[Tensor, "e H D C+1"],
    element_table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    mask: Bool[Tensor, "#B *spatial"] | None, seed: Int[Tensor, ""] | None, window: Window, dropout: float,
    step: int = 1,
) -> tuple[Float[Tensor, "B e Cv H *spatial"], Float[Tensor, "B e H T *spatial"]]:  # fmt: skip
    """Attention, and the log-sum-exps of its scores.

    ``mask`` is true at valid keys. Neighbouring offsets of the window are ``step`` pixels apart. ``seed`` is the seed
    of the dropout.
    """
    at = shifts(window.sides, window.selection, step)
    penalty = key_penalty(query, mask, window.circular)
    penalty = None if penalty is None else at.pad(penalty, window.circular, MASKED_SCORE)
    row, column = pixel_hashes(query, (offset_table.shape[1], key_elements(index), offset_table.shape[2]), seed)
    key, value = (at.pad(x, window.circular) for x in (key, value))
    with full_precision(query.device):
        return attend(query, key, value, offset_table, element_table, index, penalty, row, column, at, dropout)


def attend(
    query: Float[Tensor, "b e C Q *rows"], key: Float[Tensor, "b e C K *padded"],
    value: Float[Tensor, "b e Cv K *padded"], offset_table: Float[Tensor, "e H D C+1"],
    element_table: Float[Tensor, "e U C+1"], index: Int[Tensor, "H S"] | Int[Tensor, "H T S"] | None,
    penalty: Float[Tensor, "#b *padded"] | None, row: Int[Tensor, "b e *rows"] | None,
    column: Int[Tensor, "H S D"] | None, at: Shifts, dropout: float,
) -> tuple[Float[Tensor, "b e Cv H *rows"], Float[Tensor, "b e H T *rows"]]:  # fmt: skip
    """Attention of some rows, whose windows are in padded images of keys and values. ``penalty`` is added to the scores
    of keys."""
    dim = at.dim
    own = index is None or index.ndim == 2  # an output h has one query, of element h
    near = _windows(key.shape[4:], at, query.device)
    keys, values = (x.flatten(-dim).unsqueeze(4).unbind(2) for x in (key, value))

    def on_window(x: Tensor, outside: float = 0.0) -> Tensor:
        """(..., S or 1, D) -> (..., 1, .., 1, S or 1, *window), with a number between a disk and its square."""
        return at.to_square(x.reshape(*x.shape[:-2], *[1] * dim, *x.shape[-2:]), outside)

    def of_keys(x: Tensor) -> Tensor:
        """(b, e, K, 1, padded) -> (b, e, H or 1, 1, *rows, S, *window)."""
        x = x[..., near]
        return x if index is None else x.transpose(2, -1 - dim)

    offset_table = offset_table[:, :, None, None]
    rho = on_window(offset_table[..., :-1].movedim(-1, 0)).unbind()  # each (e, H, 1, *1, 1, *window)
    scores = on_window(offset_table[..., -1], 2 * MASKED_SCORE)
    if element_table.shape[1] and index is not None:
        logits = torch.einsum("euc,becq...->bequ...", element_table[..., :-1], query)
        logits = logits + element_table[..., -1].view(1, len(element_table), 1, -1, *[1] * dim)
        element = torch.arange(logits.shape[2], device=query.device)
        element, u = (element[:, None, None], index[:, None]) if own else (element[:, None], index)
        scores = scores + logits[:, :, element, u].movedim(4, -1)[(...,) + (None,) * dim]
    if penalty is not None:
        scores = scores + penalty.flatten(-dim)[:, None, None, None][..., near]
    queries = query.unsqueeze(4 if own else 3)[(...,) + (None,) * (1 + dim)].unbind(2)
    for q, k, encoding in zip(queries, keys, rho, strict=True):  # q: (b, e, H or 1, T or 1, *rows, 1, *1)
        scores = scores + q * (of_keys(k) + encoding)
    flat = scores.flatten(-1 - dim)
    weight = flat.softmax(-1).view(scores.shape)  # softmax's derivatives round less than those of exp
    weight = weight if own else weight.sum(3, keepdim=True)
    if row is not None and column is not None:
        hashes = row[:, :, None, None][(...,) + (None,) * (1 + dim)]
        weight = weight * hashed_dropout.keep(hashes, on_window(column[:, None]), dropout, weight.dtype)
    sums = tuple(range(-1 - dim, 0))
    out = torch.stack([(weight * of_keys(x)).sum(sums).squeeze(3) for x in values], 2)
    return out, flat.logsumexp(-1)


def _windows(padded: Sequence[int], at: Shifts, device: torch.device) -> Int[Tensor, "*rows 1 *window"]:
    """The indices, among all pixels of a padded image, of the window of every pixel."""
    near = torch.arange(math.prod(padded), device=device).view(*padded)
    for side in at.sides:
        near = near.unfold(-at.dim, (side - 1) * at.step + 1, 1)[..., :: at.step]
    return near.unsqueeze(at.dim).contiguous()
