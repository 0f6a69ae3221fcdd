"""Softmax attention over all pairs of each graph, for graphs so small that random features would be more work."""

from __future__ import annotations

import torch
from torch import Tensor

from ...modes import full_precision
from ...ragged import Rows
from .near import Near

_NONE = -1e4  # logarithm of a weight that is zero


def pair_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, dropout: float = 0.0, near: Near | None = None
) -> Tensor:
    r"""Softmax attention of nodes (N, heads, d) in rows of whole graphs, unchecked; with dropout of weights.

    With near pairs, of biases b, and f that of all pairs, a weight is :math:`e^f e^{\langle q_i, k_j \rangle / \sqrt d}
    + e^{\langle q_i, k_j \rangle / \sqrt d + b}`: a softmax in which near pairs have :math:`\log(1 + e^{b - f})` added
    to their score.
    """
    with full_precision(query.device):
        scores = _scores(query, key, rows)
        if near is not None:
            place, logs = _placed(near, rows, query.shape[1], scores.dtype)
            scores, added = _with_near(scores, place, logs, near.pairs.repeats)
        shares = scores.softmax(-1)
        shares = torch.nn.functional.dropout(shares, dropout) if dropout else shares
        out = shares @ _pack(value.to(scores.dtype), rows)
        out = rows.unpack(out.unflatten(0, (rows.count, value.shape[1])).transpose(1, 2))
        if near is not None and near.values is not None:
            shares = shares.flatten().index_select(0, place).view_as(logs) * (logs - added).exp()  # of the near part
            of_pairs, own = shares.split([near.bias.shape[1], near.pairs.nodes], 1)
            out = out + near.added_values(of_pairs, own[..., None]).transpose(0, 1)
        return out.to(value.dtype)


def _pack(x: Tensor, rows: Rows) -> Tensor:
    """(N, heads, d) to (rows heads, length, d)."""
    return rows.pack(x).transpose(1, 2).flatten(0, 1)


def _scores(query: Tensor, key: Tensor, rows: Rows) -> Tensor:
    """Of all pairs of each row, (rows heads, length, length), lowest for keys that are not there."""
    dtype, heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
    q, k = (_pack(t.to(dtype), rows) for t in (query, key))
    absent = q.new_zeros(1, 1, 1)
    if rows.mask is not None:
        absent = absent.expand(rows.count, 1, rows.length).masked_fill(~rows.mask[:, None], torch.finfo(dtype).min / 2)
        absent = absent.repeat_interleave(heads, 0)
    return torch.baddbmm(absent, q, k.mT, alpha=query.shape[-1] ** -0.5)


def _placed(near: Near, rows: Rows, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where each head's scores of near pairs, and of nodes with themselves, lie among all, (heads (E + N),), and their
    b - f, (heads, E + N)."""
    pairs, slot, length = near.pairs, rows.slot, rows.length
    own = torch.arange(pairs.nodes, device=slot.device)
    row, within = slot // length, slot % length
    target, source = (torch.cat([t, own]) for t in (pairs.target, pairs.source))
    exists = row[target] == row[source]
    if pairs.exists is not None:
        exists = exists & torch.cat([pairs.exists, torch.ones_like(own, dtype=torch.bool)])
    first = (row[target] * heads * length + within[target]) * length + within[source]
    bias, itself, far = (t.to(dtype) for t in (near.bias, near.self_bias, near.far_bias))
    if pairs.weights is not None:
        weights = pairs.weights.to(dtype)
        bias = bias + torch.where(weights > 0, weights, 1.0).log()
        bias = bias.masked_fill(weights <= 0, -torch.inf)
    logs = torch.cat([bias, itself.expand(-1, pairs.nodes)], 1) - far[:, None]
    logs = logs.masked_fill(~exists, _NONE).clamp(min=_NONE)  # finite, as its exponential's derivatives then are
    return (first + length**2 * torch.arange(heads, device=first.device)[:, None]).flatten(), logs


def _with_near(scores: Tensor, place: Tensor, logs: Tensor, repeats: bool) -> tuple[Tensor, Tensor]:
    """Scores with log(1 + exp(logs)) added at their places, of sums where a pair comes more than once; and what was
    added to each."""
    if not repeats:
        added = -torch.nn.functional.logsigmoid(-logs)
        return scores.flatten().index_add(0, place, added.flatten()).view_as(scores), added
    top = torch.zeros_like(scores).flatten().scatter_reduce(0, place, logs.detach().flatten(), "amax")
    weights = (logs.flatten() - top.index_select(0, place)).exp()
    everywhere = top + (-top).exp().index_add(0, place, weights).log()
    return scores + everywhere.view_as(scores), everywhere.index_select(0, place).view_as(logs)
