r"""Linear attention to distances: strategy 2 of the Relative Performer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...neighbors import Neighbors, Pattern
from ...precision import full_precision
from .attention import check_operands, score_scale
from .edge_products import edge_sum
from .feature_attention import feature_readout
from .rows import Rows, over_nodes, rows_of

Aggregate = Callable[[Tensor, Pattern], Tensor]  # sums of rows over a sparse relation
_FLOOR = 1e-30  # of the largest weight: below it float32 cannot tell a weight from zero


def sum_aggregation(value: Tensor, pattern: Pattern) -> Tensor:
    """Sum, for every row of a sparse relation, of the values (N, C) of its columns, (rows, C)."""
    with full_precision(value.device):
        ones = value.new_ones(1, pattern.col.shape[0])
        return edge_sum(ones, value[None], pattern)[0]


def clipped_attention(
    query: Tensor,
    value: Tensor,
    projection: Tensor,
    distance_table: Tensor,
    neighbors: Neighbors,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
    aggregate: Aggregate = sum_aggregation,
) -> Tensor:
    r"""Attention whose weights depend on the query and the clipped distance of a pair alone (strategy 2).

    With the weights :math:`a_{id} = \langle \phi(q_i), \phi(w_d) \rangle` of Manhattan distances d (k for all from k
    on), and the plain sums R of the values by distance,

    .. math:: \mathrm{out}_i = \frac{a_{ik} \sum_j v_j + \sum_{d<k} (a_{id} - a_{ik})\, R_d(i)}
        {a_{ik} n + \sum_{d<k} (a_{id} - a_{ik})\, |R_d(i)|}, \qquad R_d(i) = \sum_{j:\, d(i,j) = d} v_j

    The far nodes' sum is the graph's less the near ones'; where none is far it is exactly zero. Weights below 1e-30 of
    a query's largest possible one are raised to that.

    Args:
        query, value, projection, scale, mask, batch, batch_size: as :func:`linear_attention`.
        distance_table: ``(heads, k + 1, d)``, w.
        neighbors: the near pairs of all nodes, counted through the batch, no pair twice; those at Manhattan distance
            k or more are passed over. See :class:`~tg_equiattn.neighbors.Neighbors`.
        aggregate: ``aggregate(x, pattern)`` sums the rows of x, ``(N, C)``, over the columns of every row of a sparse
            relation, ``(rows, C)``. A library of graphs can hand in its own message passing.

    Returns:
        Shaped as ``value``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer section 2.3, strategy 2.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> near = PixelGrid((4, 5), max_distance=3).neighbors(batch_size=2)
        >>> q, v = torch.randn(2, 2, 3, 20, 8)
        >>> clipped_attention(q, v, torch.randn(16, 8), torch.randn(3, 4, 8), near).shape
        torch.Size([2, 3, 20, 8])
    """
    check_operands(projection, scale, query=query, value=value)
    rows = rows_of(query, mask, batch, batch_size)
    heads, width = query.shape[1], query.shape[-1]
    neighbors.check_nodes(query.shape[0] if query.ndim == 3 else query.shape[0] * query.shape[2])
    table = distance_table
    if table.ndim != 3 or (table.shape[0], table.shape[2]) != (heads, width) or table.shape[1] < 2:
        raise ValueError(
            f"distance_table must be ({heads}, k + 1, {width}) with k at least 1, got {tuple(table.shape)}"
        )
    neighbors = neighbors if mask is None else neighbors.restricted(mask.flatten())
    attend = partial(
        clipped_attention_of_nodes, projection=projection, distance_table=table, neighbors=neighbors, scale=scale,
        rows=rows, aggregate=aggregate,
    )  # fmt: skip
    return over_nodes(attend, query, value, mask=mask)


def clipped_attention_of_nodes(
    query: Tensor,
    value: Tensor,
    projection: Tensor,
    distance_table: Tensor,
    neighbors: Neighbors,
    scale: float | None,
    rows: Rows,
    aggregate: Aggregate,
) -> Tensor:
    """:func:`clipped_attention` of nodes (N, heads, d) in rows, unchecked."""
    weights = _distance_weights(query, distance_table, projection, scale)
    reach, dtype = distance_table.shape[1] - 1, weights.dtype
    bins = neighbors.bins(reach)
    sums = aggregate(value.flatten(1).to(dtype), bins)[:-1].view(value.shape[0], reach, *value.shape[1:])
    counts = bins.crow.diff()[:-1].view(value.shape[0], reach)
    return _mean_by_distance(value.to(dtype), weights, sums, counts.to(dtype), rows).to(value.dtype)


def _distance_weights(query: Tensor, table: Tensor, projection: Tensor, scale: float | None) -> Tensor:
    """Weights <phi(q_i), phi(w_d)> (N, heads, k + 1) in (0, 1], up to a factor of each query."""
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        size = score_scale(query, scale)
        root = math.sqrt(abs(size))
        w, table = projection.to(dtype), table.to(dtype) * root
        logs = table @ w.T - table.square().sum(-1, keepdim=True) / 2
        level = logs.detach().amax(1)
        content = (logs - level[:, None]).exp().mT.contiguous()
        heads_first = query.to(dtype).transpose(0, 1)
        out, _ = feature_readout(heads_first, w * math.copysign(root, size), content, level)
    return out.transpose(0, 1).clamp(min=_FLOOR)


def _mean_by_distance(value: Tensor, weights: Tensor, sums: Tensor, counts: Tensor, rows: Rows) -> Tensor:
    """The formula, from R without the node itself, sums (N, k, heads, e), and the numbers of nodes in it (N, k)."""
    with full_precision(value.device):
        graph, size = rows.graph_sum(value)
        far_count = size - counts.sum(1) - 1
        present = torch.cat([torch.ones_like(counts[:, :1]), counts[:, 1:], far_count[:, None]], 1) > 0
        weights = weights / torch.where(present[:, None], weights.detach(), 0.0).amax(-1, keepdim=True)
        near, far = weights[..., :-1], weights[..., -1:]
        rest = graph - sums.sum(1) - value
        rest = torch.where(far_count[:, None, None] > 0, rest, 0.0)
        numerator = far * rest + near[..., :1] * value
        for distance in range(near.shape[-1]):
            numerator = numerator + near[..., distance, None] * sums[:, distance]
        total = far * far_count[:, None, None] + near[..., :1]
        total = total + (near * counts[:, None]).sum(-1, keepdim=True)
    return numerator / total
