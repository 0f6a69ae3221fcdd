"""Softmax attention over all pairs of each graph, for graphs so small that random features would be more work."""

from __future__ import annotations

import torch
from torch import Tensor

from ...neighbours import Neighbours
from ...precision import full_precision
from .attention import score_scale
from .rows import Rows

_NONE = -1e4  # logarithm of a weight that is zero


def pair_attention_of_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    rows: Rows,
    neighbours: Neighbours | None = None,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Softmax attention of nodes (N, heads, d) in rows of whole graphs, unchecked.

    With near pairs and their biases b, those of nodes with themselves, and that of all pairs, f, a weight is
    :math:`e^f e^{c \langle q_i, k_j \rangle} + e^{c \langle q_i, k_j \rangle + b}`: a softmax in which near pairs have
    :math:`\log(1 + e^{b - f})` added to their score.

    Returns:
        The output, and of near pairs, then of nodes with themselves, (heads, E + N): their shares in what a node
        attends to, and the part of these that b has.
    """
    graphs, length, heads = rows.count, rows.length, query.shape[1]
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (rows.pack(t.to(dtype)).flatten(0, 1) for t in (query, key, value))
        absent = q.new_zeros(1, 1, 1)
        if rows.mask is not None:
            absent = absent.expand(graphs, 1, length).masked_fill(~rows.mask[:, None], torch.finfo(dtype).min / 2)
            absent = absent.repeat_interleave(heads, 0)
        scores = torch.baddbmm(absent, q, k.mT, alpha=score_scale(query, scale))
        place = logs = added = exists = None
        if neighbours is not None and biases is not None:
            exists, place = _places(neighbours, rows, heads)
            logs = _logs(neighbours, exists, [b.to(dtype) for b in biases])
            scores, added = _with_near(scores, place, logs, neighbours.repeats)
        shares = scores.softmax(-1)
        out = rows.unpack((shares @ v).unflatten(0, (graphs, heads))).to(value.dtype)
        if place is None or logs is None or added is None or exists is None:
            return out, out.new_zeros(heads, 0), out.new_zeros(heads, 0)
        of_pairs = shares.flatten().index_select(0, place).view_as(logs)
        near = of_pairs * (logs - added).exp()
        return out, (near + of_pairs * (-added).exp()) * exists, near


def _places(neighbours: Neighbours, rows: Rows, heads: int) -> tuple[Tensor, Tensor]:
    """Which near pairs, and nodes with themselves, there are, (E + N,), and where each head's scores of them lie among
    all, (heads (E + N),)."""
    target, source, length = neighbours.pattern.row, neighbours.pattern.col, rows.length
    slot = torch.arange(neighbours.nodes, device=target.device) if rows.equal else rows.slot
    row, within = slot // length, slot % length
    target, source = (torch.cat([t, torch.arange(slot.shape[0], device=t.device)]) for t in (target, source))
    exists = row[target] == row[source]
    if neighbours.exists is not None:
        exists = exists & torch.cat([neighbours.exists, torch.ones_like(slot, dtype=torch.bool)])
    first = (row[target] * heads * length + within[target]) * length + within[source]
    return exists, (first + length**2 * torch.arange(heads, device=first.device)[:, None]).flatten()


def _logs(neighbours: Neighbours, exists: Tensor, biases: list[Tensor]) -> Tensor:
    """b - f of near pairs and of nodes with themselves, (heads, E + N)."""
    pairs, itself, far = biases
    if neighbours.weights is not None:
        weights = neighbours.weights.to(pairs.dtype)
        pairs = pairs + torch.where(weights > 0, weights, 1.0).log()
        pairs = pairs.masked_fill(weights <= 0, -torch.inf)
    logs = torch.cat([pairs, itself[:, None].expand(-1, neighbours.nodes)], 1) - far[:, None]
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
