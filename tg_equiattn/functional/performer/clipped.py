"""Linear attention with weights that depend on clipped distances: strategy 2 of the Relative Performer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...edges import whole_offsets
from ...modes import full_precision
from ...neighbors import NeighborList, SortedPairs
from ...node_batch import NodeBatch
from ..edge_products import edge_sum
from .feature_attention import feature_readout

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

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

    Where no node is distant, :math:`a_{ik}` is zero. Weights are at least 1e-30 times the largest one of the query.
    Pairs at distance k or more are ignored, and no pair may be given twice. Source: relative-performer section 2.3,
    strategy 2.
    """
    weights = _distance_weights(query, distance_table, projection)
    count, out_dtype, value = distance_table.shape[1] - 1, value.dtype, value.to(weights.dtype)
    index, near, counts = pairs.cached(near_distances, count)
    with full_precision(value.device):
        far_count = node_batch.spread(node_batch.totals)[:, None] - counts.sum(1, keepdim=True)
        counts = torch.cat([counts, far_count], 1)
        weights = torch.where(counts > 0, weights, 0.0)
        weights = weights / weights.detach().amax(-1, keepdim=True)
        far, excess = weights[..., -1:], weights[..., :-1] - weights[..., -1:]
        of_pairs = excess.flatten(1).index_select(1, index) * near.to(value.dtype)
        everything = node_batch.spread(node_batch.sum(value.transpose(0, 1))).transpose(0, 1)
        numerator = far * everything + excess[..., :1] * value + edge_sum(of_pairs, value, pairs)
        return (numerator / (weights * counts).sum(-1, keepdim=True)).to(out_dtype)


def near_distances(
    pairs: SortedPairs, distances: int
) -> tuple[Int[Tensor, " pairs"], Bool[Tensor, " pairs"], Int[Tensor, "nodes distances"]]:
    """For each pair, target * distances + Manhattan distance, and true if the distance is one of 0, 1, ...,
    ``distances`` - 1 and the pair is not masked; for each node, how many nodes, with itself, are at each distance."""
    if pairs.repeats:
        raise ValueError(
            "edge_index must not join a pair twice with position='clipped', got a pair twice: two nodes have one "
            "distance; see torch_geometric.utils.coalesce"
        )
    distance = whole_offsets(pairs.offsets, name="offsets (edge_offset)").abs().sum(-1).long()
    near = (distance >= 0) & (distance < distances)  # sums of huge integers wrap around
    near = near if pairs.mask is None else near & pairs.mask
    index = pairs.target * distances + torch.where(near, distance, 0)
    itself = (torch.arange(pairs.nodes * distances, device=index.device) % distances == 0).long()
    return index, near, itself.index_add(0, index, near.long()).view(-1, distances)


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
