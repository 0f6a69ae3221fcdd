"""Linear attention with weights that depend on clipped distances: strategy 2 of the Relative Performer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...edges import CSR, whole_offsets
from ...modes import full_precision
from ...neighbors import NeighborList, SortedPairs
from ...node_batch import NodeBatch
from ..edge_products import edge_sum
from .feature_attention import feature_readout

if TYPE_CHECKING:
    from jaxtyping import Float

_FLOOR = 1e-30  # smallest weight, relative to the largest one: float32 rounds smaller ones to zero


def clipped_attention_impl(
    query: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    projection: Float[Tensor, "features d"], distance_table: Float[Tensor, "heads distances d"], pairs: NeighborList,
    node_batch: NodeBatch,
) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
    r"""Attention whose weights depend only on the query and on the clipped distance of a pair (strategy 2).

    The table w of each head has a row for each of the distances 0 to k. The weight of a pair at Manhattan distance d is
    :math:`a_{id} = \langle \phi(q_i), \phi(w_d) \rangle`; all distances from k on share :math:`a_{ik}`. With the sums
    :math:`R_d` of the values at each distance,

    .. math:: \mathrm{out}_i = \frac{a_{ik} \sum_j v_j + \sum_{d<k} (a_{id} - a_{ik})\, R_d(i)}
        {a_{ik} n + \sum_{d<k} (a_{id} - a_{ik})\, |R_d(i)|}, \qquad R_d(i) = \sum_{j:\, d(i,j) = d} v_j

    The sum over distant nodes is the sum over the graph minus the sum over near nodes, and exactly zero where no node
    is distant. Weights are at least 1e-30 times the largest one of the query. Pairs at distance k or more are ignored,
    and no pair may be given twice. Source: relative-performer section 2.3, strategy 2.
    """
    weights = _distance_weights(query, distance_table, projection)
    count, out_dtype, value = distance_table.shape[1] - 1, value.dtype, value.to(weights.dtype)
    (heads, nodes, width), bins = value.shape, pairs.cached(distance_bins, count)
    with full_precision(value.device):
        by_node = value.transpose(0, 1)
        sums = edge_sum(value.new_ones(1, bins.col.shape[0]), by_node.flatten(1)[None], bins)[0, :-1]
        sums = sums.view(nodes, count, heads, width).permute(1, 2, 0, 3)  # R, without the node itself
        counts = bins.row_starts.diff()[:-1].view(nodes, count).to(value.dtype)
        far_count = node_batch.spread(node_batch.totals) - counts.sum(1) - 1
        present = torch.cat([torch.ones_like(counts[:, :1]), counts[:, 1:], far_count[:, None]], 1) > 0
        weights = weights / torch.where(present, weights.detach(), 0.0).amax(-1, keepdim=True)
        near, far = weights[..., :-1], weights[..., -1:]
        rest = node_batch.spread(node_batch.sum(by_node)).transpose(0, 1) - sums.sum(0) - value
        numerator = far * torch.where(far_count[:, None] > 0, rest, 0.0) + near[..., :1] * value
        for distance in range(count):
            numerator = numerator + near[..., distance, None] * sums[distance]
        total = far * far_count[:, None] + near[..., :1] + (near * counts).sum(-1, keepdim=True)
        return (numerator / total).to(out_dtype)


def distance_bins(pairs: SortedPairs, distances: int) -> CSR:
    """A sparse matrix whose columns are sources and whose row i * distances + d holds the pairs of target i at
    Manhattan distance d. Its last row holds the pairs at larger distances and masked pairs."""
    if pairs.repeats:
        raise ValueError(
            "edge_index must not join a pair twice with position='clipped', got a pair twice: two nodes have one "
            "distance; see torch_geometric.utils.coalesce"
        )
    distance = whole_offsets(pairs.offsets, name="offsets (edge_offset)").abs().sum(-1).long()
    last = pairs.nodes * distances
    near = (distance >= 0) & (distance < distances)  # sums of huge integers wrap around
    near = near if pairs.mask is None else near & pairs.mask
    key = torch.where(near, pairs.target * distances + distance, last)
    order = torch.argsort(key, stable=True)
    source = pairs.source[order]
    return CSR.from_sorted(key[order], source, last + 1, pairs.nodes, torch.argsort(source, stable=True))


def _distance_weights(
    query: Float[Tensor, "heads nodes d"], table: Float[Tensor, "heads distances d"], projection: Float[Tensor, "m d"]
) -> Float[Tensor, "heads nodes distances"]:
    """Weights <phi(q_i), phi(w_d)> of each query and distance, up to a factor for each query, at least 1e-30."""
    with full_precision(query.device):
        dtype, root = torch.promote_types(query.dtype, torch.float32), query.shape[-1] ** -0.25
        w, table = projection.to(dtype), table.to(dtype) * root
        logs = table @ w.T - table.square().sum(-1, keepdim=True) / 2
        top = logs.detach().amax(1)
        content = (logs - top[:, None]).exp().mT.contiguous()
        return feature_readout(query.to(dtype), w * root, content, top)[0].clamp(min=_FLOOR)
