"""Linear attention with exact relative positions: near pairs as in softmax attention, all pairs by random features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from .attention import check_operands, feature_norm, linear_attention_of_nodes
from .edge_products import edge_dot, edge_sum
from .graph_rows import graph_rows
from .near import Near
from .pairs import pair_attention_of_nodes


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    pair_bias: Tensor,
    self_bias: Tensor,
    neighbors: NeighborList,
    *,
    far_bias: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    r"""Exact softmax weights for near pairs, random features for all pairs.

        .. math:: w_{ij} = e^{f} \langle \phi(q_i), \phi(k_j) \rangle
            + [j \text{ near } i] \exp\big(\langle q_i, k_j \rangle / \sqrt d + b(x_j - x_i)\big), \qquad
            \mathrm{out}_i = \sum_j w_{ij} v_j \Big/ \sum_j w_{ij}

        A node is always near itself. Weights are positive, and every stabiliser is a query's own. Without a projection,
        :math:`\exp(\langle q_i, k_j \rangle / \sqrt d)` takes the place of the features' product, over a graph's pairs.

        Args:
            query, key, value, batch, batch_size: of nodes, as :func:`linear_attention`.
            projection: as there, or ``None``.
            pair_bias: ``(heads, E)``, b of every pair in the order of ``neighbors``.
            self_bias: ``(heads,)``, b of a node with itself, or ``(heads, N)``, of each one.
            neighbors: the near pairs of all nodes, counted through the batch; see
                :class:`~tg_equiattn.neighbors.NeighborList`.
            far_bias: ``(heads,)``, f; ``None`` means 0.

        Returns:
            Shaped as ``value``.

        Raises:
            ValueError: naming the argument, what came and what is allowed.

        Example:
            >>> from typing import Any

    import torch
            >>> from tg_equiattn.grids import PixelGrid
            >>> near = PixelGrid((4, 5), max_distance=2).neighbors()
            >>> q, k, v = torch.randn(3, 20, 2, 8)
            >>> pair_bias, self_bias = torch.randn(2, len(near.offsets)), torch.randn(2)
            >>> window_attention(q, k, v, torch.randn(16, 8), pair_bias, self_bias, near).shape
            torch.Size([20, 2, 8])
    """
    check_operands(query, key, value, projection)
    heads, whole = query.shape[1], projection is None
    node_batch = NodeBatch.flat(query, batch, batch_size, whole=whole)
    rows = node_batch.padded() if whole else graph_rows(node_batch)
    neighbors.check_nodes(query.shape[0])
    far_bias = query.new_zeros(heads) if far_bias is None else far_bias
    self_bias = self_bias[:, None] if self_bias.ndim == 1 else self_bias
    own = neighbors.nodes if self_bias.shape[1:] == (neighbors.nodes,) else 1
    shapes = {"pair_bias": (heads, neighbors.offsets.shape[0]), "self_bias": (heads, own), "far_bias": (heads,)}
    for (name, shape), bias in zip(shapes.items(), (pair_bias, self_bias, far_bias), strict=True):
        if tuple(bias.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(bias.shape)}")
    near = Near(neighbors, pair_bias, self_bias, far_bias)
    return window_attention_of_nodes(query, key, value, projection, near, rows)


def window_attention_of_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    near: Near,
    rows: Any,
    dropout: float = 0.0,
) -> Tensor:
    """:func:`window_attention` of nodes (N, heads, d) in rows, unchecked; near weights drop out one by one, those of
    features by whole keys."""
    if projection is None:
        return pair_attention_of_nodes(query, key, value, rows, dropout, near)
    far, far_level = linear_attention_of_nodes(query, key, value, projection, rows, dropout)
    far_level = far_level + feature_norm(query.to(far_level.dtype), projection)
    far_level = (far_level + near.far_bias[:, None]).transpose(0, 1)
    dtype, pairs, csr = far_level.dtype, near.pairs, near.pairs.csr
    with full_precision(query.device):
        query = query.to(dtype) * query.shape[-1] ** -0.5
        q, k, v = (t.to(dtype).transpose(0, 1).contiguous() for t in (query, key, value))  # heads first
        self_score = ((q * k).sum(-1) + near.self_bias).unsqueeze(-1)
        scores = edge_dot(q, k, csr) + near.bias.to(dtype)
        if pairs.mask is not None:
            scores = scores.masked_fill(~pairs.mask, -torch.inf)
        if pairs.weights is not None:
            scores = scores.masked_fill(pairs.weights <= 0, -torch.inf)
        index = csr.row.expand_as(scores)
        top = torch.maximum(self_score.detach(), far_level.detach())
        top = top.squeeze(-1).scatter_reduce(1, index, scores.detach(), "amax")
        weights = (scores - top.index_select(1, csr.row)).exp()
        weights = weights if pairs.weights is None else weights * pairs.weights.to(dtype)
        total = torch.zeros_like(top).scatter_add(1, index, weights)
        own, other = (self_score - top[..., None]).exp(), (far_level - top[..., None]).exp()
        total = total[..., None] + own + other
        if dropout:
            weights, own = (torch.nn.functional.dropout(w, dropout) for w in (weights, own))
        out = edge_sum(weights, v, csr) + own * v + other * far.to(dtype).transpose(0, 1)
        if near.values is not None:
            out = out + near.added_values(weights, own)
        return (out / total).transpose(0, 1).to(value.dtype)
