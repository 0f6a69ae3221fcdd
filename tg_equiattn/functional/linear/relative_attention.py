r"""Linear attention with exact relative positions: the published strategy 2, and the window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...neighbours import Neighbours, Pattern
from ...precision import full_precision
from .attention import score_scale
from .edge_products import edge_dot, edge_sum
from .feature_attention import RELU_EPSILON, feature_readout
from .rows import Rows

_FLOOR = 1e-30  # of the largest weight: below it float32 cannot tell a weight from zero


def ring_sums(value: Tensor, bins: Pattern) -> Tensor:
    """Plain sums of values (N, C) over (node, distance) bins, (bins, C): a sparse product without weights."""
    with full_precision(value.device):
        ones = value.new_ones(1, len(bins.col))
        return edge_sum(ones, value[None], bins.crow, bins.col, bins.back)[0]


def distance_weights(query: Tensor, table: Tensor, projection: Tensor, kernel: str, scale: float | None) -> Tensor:
    r"""Weights :math:`\langle q'_i, w'_d \rangle` of every clipped distance, up to a factor of each query.

    Args:
        query: ``(N, heads, d)``.
        table: ``(heads, distances, d)``.
        projection: ``(m, d)``.

    Returns:
        ``(N, heads, distances)`` in (0, 1]; weights below 1e-30 of a query's largest possible one are raised to that.
    """
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        size = score_scale(query, kernel, scale)
        root = math.sqrt(abs(size))
        w, table = projection.to(dtype), table.to(dtype) * root
        logs = table @ w.T
        if kernel == "softmax":
            logs = logs - table.square().sum(-1, keepdim=True) / 2
        else:
            logs = (logs.relu() + RELU_EPSILON).log()
        level = logs.detach().amax(1)
        content = (logs - level[:, None]).exp().mT.contiguous()
        heads_first = query.to(dtype).transpose(0, 1)
        out, _ = feature_readout(heads_first, w * math.copysign(root, size), content, level, kernel)
    return out.transpose(0, 1).clamp(min=_FLOOR)


def clipped_attention(value: Tensor, weights: Tensor, sums: Tensor, counts: Tensor, rows: Rows) -> Tensor:
    r"""Attention whose weights depend on the clipped distance of a pair alone (strategy 2).

    .. math:: \mathrm{out}_i = \frac{a_{ik} \sum_j v_j + \sum_{d<k} (a_{id} - a_{ik})\, R_d(i)}
        {a_{ik} n + \sum_{d<k} (a_{id} - a_{ik})\, |R_d(i)|}, \qquad R_d(i) = \sum_{j:\, d(i,j) = d} v_j

    The far nodes' sum is the graph's less the near ones'; where none is far it is exactly zero.

    Args:
        value: ``(N, heads, e)``.
        weights: ``(N, heads, k + 1)``, a of :func:`distance_weights`.
        sums: ``(N, k, heads, e)``, R without the node itself.
        counts: ``(N, k)``, the numbers of nodes in them.
        rows: which nodes form a graph.

    Returns:
        ``(N, heads, e)``.

    Source: relative-performer section 2.3, strategy 2.
    """
    with full_precision(value.device):
        dtype = weights.dtype
        value, counts = value.to(dtype), counts.to(dtype)
        near, far = weights[..., :-1], weights[..., -1:]
        graph, size = rows.graph_sum(value)
        everyone_near = size - counts.sum(1) - 1
        rest = graph - sums.sum(1) - value
        rest = torch.where(everyone_near[:, None, None] > 0, rest, 0.0)
        numerator = far * rest + near[..., :1] * value
        for distance in range(near.shape[-1]):
            numerator = numerator + near[..., distance, None] * sums[:, distance]
        total = far * everyone_near[:, None, None] + near[..., :1]
        total = total + (near * counts[:, None]).sum(-1, keepdim=True)
    return numerator / total


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pair_bias: Tensor,
    self_bias: Tensor,
    far: tuple[Tensor, Tensor],
    neighbours: Neighbours,
    scale: float | None = None,
) -> Tensor:
    r"""Exact softmax weights for near pairs, random features for everything.

    .. math:: w_{ij} = e^{f} \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i] \exp\big(c \langle q_i, k_j \rangle + b(x_j - x_i)\big), \qquad
        \mathrm{out}_i = \sum_j w_{ij} v_j \Big/ \sum_j w_{ij}

    Args:
        query, key: ``(N, heads, d)``.
        value: ``(N, heads, e)``.
        pair_bias: ``(heads, E)``, b of every pair in the order of ``neighbours``.
        self_bias: ``(heads,)``, b of a node with itself.
        far: the features' output ``(N, heads, e)`` and the whole log-sum-exp ``(N, heads, 1)``, f added.
        neighbours: the near pairs.
        scale: c; ``None`` means :math:`1/\sqrt d`.

    Returns:
        ``(N, heads, e)``. Weights are positive, and every maximum is a query's own.
    """
    with full_precision(query.device):
        far_out, far_level = far
        dtype = far_level.dtype
        query = query.to(dtype) * (query.shape[-1] ** -0.5 if scale is None else scale)
        q, k, v = (t.to(dtype).transpose(0, 1).contiguous() for t in (query, key, value))  # heads first
        far_out, far_level = far_out.to(dtype).transpose(0, 1), far_level.transpose(0, 1)
        self_score = ((q * k).sum(-1) + self_bias[:, None]).unsqueeze(-1)
        pattern = neighbours.pattern
        scores = edge_dot(q, k, pattern.crow, pattern.col, pattern.back) + pair_bias.to(dtype)
        if neighbours.exists is not None:
            scores = scores.masked_fill(~neighbours.exists, -torch.inf)
        index = pattern.row.expand_as(scores)
        top = torch.maximum(self_score.detach(), far_level.detach())
        top = top.squeeze(-1).scatter_reduce(1, index, scores.detach(), "amax")
        near = (scores - top.index_select(1, pattern.row)).exp()
        total = torch.zeros_like(top).scatter_add(1, index, near)
        own, other = (self_score - top[..., None]).exp(), (far_level - top[..., None]).exp()
        out = edge_sum(near, v, pattern.crow, pattern.col, pattern.back) + own * v + other * far_out
        out = out / (total[..., None] + own + other)
    return out.transpose(0, 1)
