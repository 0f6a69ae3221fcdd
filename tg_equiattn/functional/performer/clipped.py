"""Linear attention to distances: strategy 2 of the Relative Performer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from .edge_products import edge_sum
from .feature_attention import feature_readout

_FLOOR = 1e-30  # of the largest weight: below it float32 cannot tell a weight from zero


def clipped_attention_of_nodes(
    query: Tensor, value: Tensor, projection: Tensor, distance_table: Tensor, pairs: NeighborList, node_batch: NodeBatch
) -> Tensor:
    r"""Attention whose weights depend on the query and the clipped distance of a pair alone (strategy 2).

    With the weights :math:`a_{id} = \langle \phi(q_i), \phi(w_d) \rangle` of Manhattan distances d (k for all from k
    on), and the plain sums R of the values by distance,

    .. math:: \mathrm{out}_i = \frac{a_{ik} \sum_j v_j + \sum_{d<k} (a_{id} - a_{ik})\, R_d(i)}
        {a_{ik} n + \sum_{d<k} (a_{id} - a_{ik})\, |R_d(i)|}, \qquad R_d(i) = \sum_{j:\, d(i,j) = d} v_j

    The far nodes' sum is the graph's less the near ones'; where none is far it is exactly zero. Weights below 1e-30 of
    a query's largest possible one are raised to that. The table (heads, k + 1, d) holds w; pairs at Manhattan distance
    k or more are passed over, and none comes twice. Source: relative-performer section 2.3, strategy 2.
    """
    weights = _distance_weights(query, distance_table, projection)
    count, out_dtype, value = distance_table.shape[1] - 1, value.dtype, value.to(weights.dtype)
    bins = pairs.bins(count)
    with full_precision(value.device):
        sums = edge_sum(value.new_ones(1, bins.col.shape[0]), value.flatten(1)[None], bins)[0, :-1]
        sums = sums.view(value.shape[0], count, *value.shape[1:])  # R, without the node itself
        counts = bins.row_starts.diff()[:-1].view(value.shape[0], count).to(value.dtype)
        far_count = node_batch.spread(node_batch.totals) - counts.sum(1) - 1
        present = torch.cat([torch.ones_like(counts[:, :1]), counts[:, 1:], far_count[:, None]], 1) > 0
        weights = weights / torch.where(present[:, None], weights.detach(), 0.0).amax(-1, keepdim=True)
        near, far = weights[..., :-1], weights[..., -1:]
        rest = node_batch.spread(node_batch.sum(value)) - sums.sum(1) - value
        numerator = far * torch.where(far_count[:, None, None] > 0, rest, 0.0) + near[..., :1] * value
        for distance in range(count):
            numerator = numerator + near[..., distance, None] * sums[:, distance]
        total = far * far_count[:, None, None] + near[..., :1] + (near * counts[:, None]).sum(-1, keepdim=True)
        return (numerator / total).to(out_dtype)


def _distance_weights(query: Tensor, table: Tensor, projection: Tensor) -> Tensor:
    """Weights <phi(q_i), phi(w_d)> (N, heads, k + 1) in (0, 1], up to a factor of each query."""
    with full_precision(query.device):
        dtype, root = torch.promote_types(query.dtype, torch.float32), query.shape[-1] ** -0.25
        w, table = projection.to(dtype), table.to(dtype) * root
        logs = table @ w.T - table.square().sum(-1, keepdim=True) / 2
        level = logs.detach().amax(1)
        content = (logs - level[:, None]).exp().mT.contiguous()
        out, _ = feature_readout(query.to(dtype).transpose(0, 1), w * root, content, level)
    return out.transpose(0, 1).clamp(min=_FLOOR)
