"""Softmax attention over all pairs of each graph, for graphs so small that random features would be more work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...neighbors import Neighbors
from ...precision import full_precision
from .attention import score_scale
from .rows import Rows

_NONE = -1e4  # logarithm of a weight that is zero


def pair_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, rows: Rows, dropout: float = 0.0
) -> Tensor:
    """Softmax attention of nodes (N, heads, d) in rows of whole graphs, unchecked; with dropout of weights."""
    with full_precision(query.device):
        return _attended(_scores(query, key, scale, rows), value, rows, dropout)[0]


def near_pair_attention_of_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    rows: Rows,
    neighbors: Neighbors,
    biases: tuple[Tensor, Tensor, Tensor],
    dropout: float = 0.0,
) -> tuple[Tensor, NearShares]:
    r"""The same with near pairs, of their biases b, those of nodes with themselves, and that of all pairs, f.

    A weight is :math:`e^f e^{c \langle q_i, k_j \rangle} + e^{c \langle q_i, k_j \rangle + b}`: a softmax in which near
    pairs have :math:`\log(1 + e^{b - f})` added to their score. Also what near pairs have of it.
    """
    with full_precision(query.device):
        scores = _scores(query, key, scale, rows)
        exists, place = _places(neighbors, rows, query.shape[1])
        logs = _logs(neighbors, exists, [b.to(scores.dtype) for b in biases])
        scores, added = _with_near(scores, place, logs, neighbors.repeats)
        out, shares = _attended(scores, value, rows, dropout)
        return out, NearShares(shares, exists, place, logs, added)


class NearShares(NamedTuple):
    """From which the shares of near pairs, then of nodes with themselves, in what a node attends to are found."""

    shares: Tensor
    exists: Tensor
    place: Tensor
    logs: Tensor
    added: Tensor

    def of_near(self) -> Tensor:
        """Those of the near part, (heads, E + N)."""
        return self._of_pairs() * (self.logs - self.added).exp()

    def of_all(self) -> Tensor:
        """Those of near and far parts together, (heads, E + N)."""
        return (self.of_near() + self._of_pairs() * (-self.added).exp()) * self.exists

    def _of_pairs(self) -> Tensor:
        return self.shares.flatten().index_select(0, self.place).view_as(self.logs)


def _scores(query: Tensor, key: Tensor, scale: float | None, rows: Rows) -> Tensor:
    """Of all pairs of each row, (rows heads, length, length), lowest for keys that are not there."""
    dtype, heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
    q, k = (rows.pack(t.to(dtype)).flatten(0, 1) for t in (query, key))
    absent = q.new_zeros(1, 1, 1)
    if rows.mask is not None:
        absent = absent.expand(rows.count, 1, rows.length).masked_fill(~rows.mask[:, None], torch.finfo(dtype).min / 2)
        absent = absent.repeat_interleave(heads, 0)
    return torch.baddbmm(absent, q, k.mT, alpha=score_scale(query, scale))


def _attended(scores: Tensor, value: Tensor, rows: Rows, dropout: float) -> tuple[Tensor, Tensor]:
    """Outputs of nodes (N, heads, e), and the shares of all pairs."""
    shares = scores.softmax(-1)
    shares = torch.nn.functional.dropout(shares, dropout) if dropout else shares
    out = shares @ rows.pack(value.to(scores.dtype)).flatten(0, 1)
    return rows.unpack(out.unflatten(0, (rows.count, value.shape[1]))).to(value.dtype), shares


def _places(neighbors: Neighbors, rows: Rows, heads: int) -> tuple[Tensor, Tensor]:
    """Which near pairs, and nodes with themselves, there are, (E + N,), and where each head's scores of them lie among
    all, (heads (E + N),)."""
    target, source, length = neighbors.pattern.row, neighbors.pattern.col, rows.length
    slot = torch.arange(neighbors.nodes, device=target.device) if rows.equal else rows.slot
    row, within = slot // length, slot % length
    target, source = (torch.cat([t, torch.arange(slot.shape[0], device=t.device)]) for t in (target, source))
    exists = row[target] == row[source]
    if neighbors.exists is not None:
        exists = exists & torch.cat([neighbors.exists, torch.ones_like(slot, dtype=torch.bool)])
    first = (row[target] * heads * length + within[target]) * length + within[source]
    return exists, (first + length**2 * torch.arange(heads, device=first.device)[:, None]).flatten()


def _logs(neighbors: Neighbors, exists: Tensor, biases: list[Tensor]) -> Tensor:
    """b - f of near pairs and of nodes with themselves, (heads, E + N)."""
    pairs, itself, far = biases
    if neighbors.weights is not None:
        weights = neighbors.weights.to(pairs.dtype)
        pairs = pairs + torch.where(weights > 0, weights, 1.0).log()
        pairs = pairs.masked_fill(weights <= 0, -torch.inf)
    logs = torch.cat([pairs, itself.expand(-1, neighbors.nodes)], 1) - far[:, None]
    return logs.masked_fill(~exists, _NONE).clamp(min=_NONE)  # finite, as its exponential's derivatives then are


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
