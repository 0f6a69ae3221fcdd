"""Softmax attention over all pairs of each graph, exact where random features estimate."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...modes import full_precision
from ...node_batch import PaddedBatch
from ..chunks import checkpointed, is_whole
from ..softmax_attention import softmax_attention
from .near import Near

MAX_SCORES = 1 << 32  # of all heads of one graph: 16 GiB in float32 if they were kept
_CHUNK = 1 << 24  # scores that are held at once
_NONE = -1e4  # logarithm of a weight that is zero


def pair_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, rows: PaddedBatch, dropout: float = 0.0, near: Near | None = None,
    chunk: int = _CHUNK,
) -> Tensor:  # fmt: skip
    r"""Softmax attention of nodes (N, heads, d) in rows of whole graphs, unchecked; with dropout of weights.

    With near pairs, of biases b, and f that of all pairs, a weight is :math:`e^f e^{\langle q_i, k_j \rangle / \sqrt d}
    + e^{\langle q_i, k_j \rangle / \sqrt d + b}`: a softmax in which near pairs have :math:`\log(1 + e^{b - f})` added
    to their score. At most ``chunk`` scores are held at once; backward computes them again.

    Raises:
        ValueError: where one graph has more than 2^32 scores.
    """
    heads, length = query.shape[1], rows.length
    if heads * length**2 > MAX_SCORES:
        raise ValueError(
            f"method='pairs' must have at most {MAX_SCORES} scores a graph (16 GiB in float32), got {heads} heads of "
            f"{length} nodes: pass method='features' (in RelativeGPSBlock: attn_kwargs={{'method': 'features'}})"
        )
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (_pack(t.to(dtype), rows) for t in (query, key, value))
        if near is None and not dropout and query.shape[-1] == value.shape[-1]:
            mask = None if rows.mask is None else rows.mask.repeat_interleave(heads, 0)
            return _unpacked(softmax_attention(q, k, v, mask), rows, heads).to(value.dtype)
        entries = None if near is None else _Entries.of(near, rows, dtype)
        repeats = near is not None and near.pairs.repeats is not False  # unread pairs may
        attend = functools.partial(_attend, dropout=dropout, repeats=repeats)
        if is_whole(q) or q.shape[0] * length**2 <= chunk:
            out, shares = attend(q, k, v, rows.mask, *(entries or (None, None, None, None)))
        else:
            out, shares = _in_chunks(attend, q, k, v, rows, heads, entries, chunk)
        out = _unpacked(out, rows, heads)
        if near is not None and near.values is not None and shares is not None:
            of_pairs, own = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
            out = out + near.added_values(of_pairs, own[..., None]).transpose(0, 1)
        return out.to(value.dtype)


def _pack(x: Tensor, rows: PaddedBatch) -> Tensor:
    """(N, heads, d) to (rows heads, length, d)."""
    return rows.pack(x).transpose(1, 2).flatten(0, 1)


def _unpacked(out: Tensor, rows: PaddedBatch, heads: int) -> Tensor:
    """(rows heads, length, e) to (N, heads, e)."""
    return rows.unpack(out.unflatten(0, (rows.count, heads)).transpose(1, 2))


class _Entries(NamedTuple):
    """Near pairs, and behind them each node with itself: the row, the query and the key of each within its row,
    (E + N,), and b - f of each head, (heads, E + N)."""

    row: Tensor
    query: Tensor
    key: Tensor
    logs: Tensor

    @classmethod
    def of(cls, near: Near, rows: PaddedBatch, dtype: torch.dtype) -> _Entries:
        pairs, slot, length = near.pairs, rows.slot, rows.length
        own = torch.arange(pairs.nodes, device=slot.device)
        row, within = slot // length, slot % length
        target, source = (torch.cat([t, own]) for t in (pairs.target, pairs.source))
        exists = row[target] == row[source]
        if pairs.mask is not None:
            exists = exists & torch.cat([pairs.mask, torch.ones_like(own, dtype=torch.bool)])
        bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
        if pairs.weights is not None:
            weights = pairs.weights.to(dtype)
            bias = bias + torch.where(weights > 0, weights, 1.0).log()
            bias = bias.masked_fill(weights <= 0, -torch.inf)
        logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
        logs = logs.masked_fill(~exists, _NONE).clamp(min=_NONE)  # finite, as its exponential's derivatives then are
        return cls(row[target], within[target], within[source], logs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, row: Tensor | None, query: Tensor | None, key: Tensor | None,
    logs: Tensor | None, *, dropout: float, repeats: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs (rows heads, queries, e) of some rows and queries over a mask of keys (rows, length), and the shares of
    the near part of each entry's weight, (heads, entries)."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    if mask is not None:
        hidden = ~mask.repeat_interleave(scores.shape[0] // mask.shape[0], 0)[:, None]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min / 2)
    if row is None or query is None or key is None or logs is None:
        return torch.nn.functional.dropout(scores.softmax(-1), dropout) @ v, None
    heads, (queries, keys) = len(logs), scores.shape[1:]
    head = torch.arange(heads, device=row.device)[:, None]
    place = (((row * heads + head) * queries + query) * keys + key).flatten()
    scores, added = _with_near(scores, place, logs, repeats)
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout)
    shares = weights.flatten().index_select(0, place).view_as(logs) * (logs - added).exp()
    return weights @ v, shares


def _in_chunks(attend, q, k, v, rows: PaddedBatch, heads: int, entries: _Entries | None, budget: int):
    """:func:`_attend` of whole rows, or of some queries of one, at a time."""
    length, each = rows.length, heads * rows.length
    queries = min(length, max(1, budget // each))
    count = max(1, budget // (each * length)) if queries == length else 1
    outs, chosen, shares = [], [], []
    for first in range(0, rows.count, count):
        some = slice(first, first + count)
        of_heads, mask = slice(first * heads, (first + count) * heads), None if rows.mask is None else rows.mask[some]
        parts = []
        for begin in range(0, length, queries):
            end, mine = min(begin + queries, length), None
            near: tuple[Tensor | None, ...] = (None, None, None, None)
            if entries is not None:
                here = (entries.row >= first) & (entries.row < first + count)
                mine = (here & (entries.query >= begin) & (entries.query < end)).nonzero()[:, 0]
                row, query, key = (x.index_select(0, mine) for x in entries[:3])
                near = row - first, query - begin, key, entries.logs.index_select(1, mine)
            operands = q[of_heads, begin:end], k[of_heads], v[of_heads], mask, *near
            out, share = checkpointed(attend, *operands, preserve_rng_state=True)
            parts.append(out)
            if mine is not None:
                chosen.append(mine)
                shares.append(share)
        outs.append(torch.cat(parts, 1))
    if entries is None:
        return torch.cat(outs), None
    order = torch.cat(chosen).argsort()
    return torch.cat(outs), torch.cat(shares, 1).index_select(1, order)


def _with_near(scores: Tensor, place: Tensor, logs: Tensor, repeats: bool) -> tuple[Tensor, Tensor]:
    """Scores with log(1 + exp(logs)) added at their places, of sums where a pair comes more than once; and the addend
    of each entry."""
    if not repeats:
        added = -torch.nn.functional.logsigmoid(-logs)
        return scores.flatten().index_add(0, place, added.flatten()).view_as(scores), added
    top = torch.zeros_like(scores).flatten().scatter_reduce(0, place, logs.detach().flatten(), "amax")
    weights = (logs.flatten() - top.index_select(0, place)).exp()
    everywhere = top + (-top).exp().index_add(0, place, weights).log()
    return scores + everywhere.view_as(scores), everywhere.index_select(0, place).view_as(logs)
