"""Linear attention with exact relative positions: near pairs as in softmax attention, all pairs by random features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from .attention import check_operands, drop_keys, feature_norm, linear_attention_impl
from .pairs import Near, dense_attention, is_small, near_attention, pair_attention_impl

if TYPE_CHECKING:
    from jaxtyping import Float


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
    r"""Attention with exact softmax weights for near pairs and random features for all pairs.

    .. math:: w_{ij} = e^{f} \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i] \exp\big(\langle q_i, k_j \rangle / \sqrt d + b(x_j - x_i)\big), \qquad
        \mathrm{out}_i = \sum_j w_{ij} v_j \Big/ \sum_j w_{ij}

    A node is always near itself. Weights are positive. Without a projection, the weight of a pair in the first term is
    :math:`\exp(\langle q_i, k_j \rangle / \sqrt d)` itself, for all pairs of a graph.

    Args:
        query: Queries of the nodes, ``(N, heads, d)``.
        key: Keys of the nodes, ``(N, heads, d)``.
        value: Values of the nodes, ``(N, heads, e)``.
        projection: Directions of the random features, ``(m, d)``; ``None`` for the exact softmax over all pairs.
        pair_bias: Bias b of each near pair, ``(heads, E)``, in the order of ``neighbors``.
        self_bias: Bias b of a node with itself, ``(heads,)`` for all nodes or ``(heads, N)`` for each.
        neighbors: The near pairs, with nodes numbered through the batch; see
            :class:`~tg_equiattn.neighbors.NeighborList`.
        far_bias: Bias f of all pairs, ``(heads,)``. Default ``None``: 0.
        batch: Graph index of each node, sorted int64 ``(N,)``. Default ``None``: one graph.
        batch_size: Number of graphs. Default ``None``: read from ``batch``, for which CUDA synchronises.

    Returns:
        Tensor shaped as ``value``.

    Raises:
        ValueError: If shapes do not fit each other, if ``projection`` requires a gradient, if ``batch`` is not sorted,
            if a pair joins two graphs, or, without a projection, if a graph has more than 2^32 scores of all heads.

    Source: Choromanski et al., Rethinking attention with Performers (2021), for the features; the sum of both terms is
    ours.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> near = PixelGrid((4, 5), cutoff=2).neighbors()
        >>> q, k, v = torch.randn(3, 20, 2, 8)
        >>> pair_bias, self_bias = torch.randn(2, len(near.offsets)), torch.randn(2)
        >>> window_attention(q, k, v, torch.randn(16, 8), pair_bias, self_bias, near).shape
        torch.Size([20, 2, 8])
    """
    check_operands(query, key, value, projection)
    heads, node_batch = query.shape[1], NodeBatch.flat(query, batch, batch_size, whole=projection is None)
    neighbors.check_nodes(query.shape[0])
    neighbors.check_graphs("neighbors", batch)
    far_bias = query.new_zeros(heads) if far_bias is None else far_bias
    self_bias = self_bias[:, None] if self_bias.ndim == 1 else self_bias
    own = neighbors.nodes if self_bias.shape[1:] == (neighbors.nodes,) else 1
    shapes = {"pair_bias": (heads, neighbors.offsets.shape[0]), "self_bias": (heads, own), "far_bias": (heads,)}
    for (name, shape), bias in zip(shapes.items(), (pair_bias, self_bias, far_bias), strict=True):
        if tuple(bias.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(bias.shape)}")
    near = Near(neighbors, pair_bias, self_bias, far_bias)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return window_attention_impl(query, key, value, projection, near, node_batch).transpose(0, 1)


def window_attention_impl(
    query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    projection: Float[Tensor, "features d"] | None, near: Near, node_batch: NodeBatch, dropout: float = 0.0,
    variance: Float[Tensor, " heads"] | None = None, key_bias: Float[Tensor, "heads nodes 1"] | None = None,
) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
    """:func:`window_attention` without checks.

    ``key_bias`` is added to all scores of a key; it is ignored without a projection. ``dropout`` drops single weights
    of near pairs; in the sum over all pairs it drops single weights without a projection, and whole keys with one.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    with full_precision(query.device):
        q, k, v = (x.to(dtype) for x in (query, key, value))
        if projection is None and is_small(near, node_batch):
            return dense_attention(q, k, v, near, node_batch, dropout).to(value.dtype)
        if projection is None:
            out, lse = near_attention(q, k, v, near, dropout)
            far = pair_attention_impl(q, k, v, node_batch, dropout, lse - near.far_bias[:, None, None])
            return torch.addcmul(far[..., :-1], far[..., -1:], out).to(value.dtype)
        out, lse = near_attention(q, k, v, near, dropout, key_bias)
        far, far_lse = linear_attention_impl(q, k, drop_keys(v, dropout), projection, node_batch, variance, key_bias)
        far_lse = far_lse + feature_norm(q, projection) + near.far_bias[:, None, None]
        return torch.lerp(far, out, (lse - far_lse).sigmoid()).to(value.dtype)
