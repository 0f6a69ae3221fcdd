r"""Linear attention with exact relative positions: near pairs as in softmax attention, all pairs by random features."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...neighbors import Neighbors
from ...precision import full_precision
from .attention import (
    check_operands,
    feature_norm,
    kept_keys,
    linear_attention_of_nodes,
    log_feature_product,
    score_scale,
)
from .edge_products import edge_dot, edge_sum
from .pairs import near_pair_attention_of_nodes
from .rows import Rows, over_nodes, rows_of


class PairValues(NamedTuple):
    """What near pairs add to values: features (E, r), those of a node with itself (r,), and their map (heads, r, e)."""

    pairs: Tensor
    itself: Tensor
    map: Tensor


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    pair_bias: Tensor,
    self_bias: Tensor,
    neighbors: Neighbors,
    *,
    far_bias: Tensor | None = None,
    pair_values: Tensor | None = None,
    self_values: Tensor | None = None,
    value_map: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    r"""Exact softmax weights for near pairs, random features for all pairs.

    .. math:: w_{ij} = e^{f} \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i] \exp\big(c \langle q_i, k_j \rangle + b(x_j - x_i)\big), \qquad
        \mathrm{out}_i = \sum_j \big( w_{ij} v_j + [j \text{ near } i]\, w^{near}_{ij}\, g_{ij} \big)
        \Big/ \sum_j w_{ij}

    with :math:`w^{near}` the second part of the weights, and g zero unless given. A node is always near itself. Weights
    are positive, and every stabiliser is a query's own. Without a projection, :math:`\exp(c \langle q_i, k_j \rangle)`
    takes the place of the features' product, over all pairs of a graph.

    Args:
        query, key, value, scale, mask, batch, batch_size: as :func:`linear_attention`.
        projection: as there, or ``None``.
        pair_bias: ``(heads, E)``, b of every pair in the order of ``neighbors``.
        self_bias: ``(heads,)``, b of a node with itself, or ``(heads, N)``, of each one.
        neighbors: the near pairs of all nodes, counted through the batch; see
            :class:`~tg_equiattn.neighbors.Neighbors`.
        far_bias: ``(heads,)``, f; ``None`` means 0.
        pair_values, self_values, value_map: ``(E, r)``, ``(r,)`` and ``(heads, r, e)``: g of every pair, and of a node
            with itself, are their products with the map; all three, or none.

    Returns:
        Shaped as ``value``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> near = PixelGrid((4, 5), max_distance=2).neighbors(batch_size=3)
        >>> q, k, v = torch.randn(3, 3, 2, 20, 8)
        >>> pair_bias, self_bias = torch.randn(2, len(near.offsets)), torch.randn(2)
        >>> window_attention(q, k, v, torch.randn(16, 8), pair_bias, self_bias, near).shape
        torch.Size([3, 2, 20, 8])
    """
    check_operands(projection, scale, query=query, key=key, value=value)
    rows = rows_of(query, mask, batch, batch_size, whole=projection is None)
    heads = query.shape[1]
    far_bias = query.new_zeros(heads) if far_bias is None else far_bias
    neighbors.check_nodes(query.shape[0] if query.ndim == 3 else query.shape[0] * query.shape[2])
    self_bias = self_bias[:, None] if self_bias.ndim == 1 else self_bias
    shapes = {"pair_bias": (heads, neighbors.offsets.shape[0]), "self_bias": (heads, 1), "far_bias": (heads,)}
    if self_bias.shape[1:] == (neighbors.nodes,):
        shapes["self_bias"] = heads, neighbors.nodes
    for (name, shape), bias in zip(shapes.items(), (pair_bias, self_bias, far_bias), strict=True):
        if tuple(bias.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(bias.shape)}")
    extra = None
    if value_map is not None and pair_values is not None and self_values is not None:
        wanted = {
            "pair_values": (pair_values, (neighbors.offsets.shape[0], value_map.shape[1])),
            "self_values": (self_values, (value_map.shape[1],)),
            "value_map": (value_map, (heads, value_map.shape[1], value.shape[-1])),
        }
        for name, (given, shape) in wanted.items():
            if tuple(given.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(given.shape)}")
        extra = PairValues(pair_values, self_values, value_map)
    elif value_map is not None or pair_values is not None or self_values is not None:
        raise ValueError("pair_values, self_values and value_map must be given together, or none of them")
    neighbors = neighbors if mask is None else neighbors.restricted(mask.flatten())
    attend = partial(
        window_attention_of_nodes, projection=projection, pair_bias=pair_bias, self_bias=self_bias, far_bias=far_bias,
        neighbors=neighbors, scale=scale, rows=rows, extra=extra,
    )  # fmt: skip
    return over_nodes(attend, query, key, value, mask=mask)


def window_attention_of_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    pair_bias: Tensor,
    self_bias: Tensor,
    far_bias: Tensor,
    neighbors: Neighbors,
    scale: float | None,
    rows: Rows,
    extra: PairValues | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """:func:`window_attention` of nodes (N, heads, d) in rows, unchecked, with self_bias (heads, 1 or N); near weights
    drop out one by one, those of features by whole keys."""
    biases = pair_bias, self_bias, far_bias
    if projection is None:
        return _of_all_pairs(query, key, value, biases, neighbors, scale, rows, extra, dropout)
    return _by_features(query, key, value, projection, biases, neighbors, scale, rows, extra, dropout)[0]


def _of_all_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: tuple[Tensor, Tensor, Tensor],
    neighbors: Neighbors,
    scale: float | None,
    rows: Rows,
    extra: PairValues | None,
    dropout: float,
) -> Tensor:
    out, shares = near_pair_attention_of_nodes(query, key, value, scale, rows, neighbors, biases, dropout)
    if extra is None:
        return out
    with full_precision(query.device):
        near = shares.of_near()
        pairs, itself, mapped = (t.to(near.dtype) for t in extra)
        near, own = near.split([neighbors.offsets.shape[0], neighbors.nodes], 1)
        return out + (_pair_sums(near, pairs, neighbors) + own[..., None] * itself).matmul(mapped).transpose(0, 1).to(
            out.dtype
        )


def _pair_sums(weights: Tensor, pairs: Tensor, neighbors: Neighbors) -> Tensor:
    """Sums over each node's pairs of weights (heads, E) times what pairs have (E, r), (heads, N, r)."""
    pattern, entries = neighbors.incidence(len(weights))
    sums = edge_sum(weights.flatten()[None].index_select(1, entries), pairs[None], pattern)
    return sums[0].unflatten(0, (-1, len(weights))).transpose(0, 1)


def _by_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    biases: tuple[Tensor, Tensor, Tensor],
    neighbors: Neighbors,
    scale: float | None,
    rows: Rows,
    extra: PairValues | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Outputs (N, heads, e), and the logarithm of the sum of a node's weights (N, heads)."""
    pair_bias, self_bias, far_bias = biases
    seen = value * kept_keys(value, dropout) if dropout else value
    far, far_level = linear_attention_of_nodes(query, key, seen, projection, scale, rows)
    far_level = far_level + feature_norm(query.to(far_level.dtype), projection, scale)
    dtype, out_dtype = far_level.dtype, value.dtype
    far_level = far_level + far_bias[:, None]
    with full_precision(query.device):
        query = query.to(dtype) * score_scale(query, scale)
        q, k, v = (t.to(dtype).transpose(0, 1).contiguous() for t in (query, key, value))  # heads first
        far, far_level = far.to(dtype).transpose(0, 1), far_level.transpose(0, 1)
        self_score = ((q * k).sum(-1) + self_bias).unsqueeze(-1)
        pattern = neighbors.pattern
        scores = edge_dot(q, k, pattern) + pair_bias.to(dtype)
        if neighbors.exists is not None:
            scores = scores.masked_fill(~neighbors.exists, -torch.inf)
        if neighbors.weights is not None:
            scores = scores.masked_fill(neighbors.weights <= 0, -torch.inf)
        index = pattern.row.expand_as(scores)
        top = torch.maximum(self_score.detach(), far_level.detach())
        top = top.squeeze(-1).scatter_reduce(1, index, scores.detach(), "amax")
        near = (scores - top.index_select(1, pattern.row)).exp()
        near = near if neighbors.weights is None else near * neighbors.weights.to(dtype)
        total = torch.zeros_like(top).scatter_add(1, index, near)
        own, other = (self_score - top[..., None]).exp(), (far_level - top[..., None]).exp()
        weights, itself_weight = near, own
        if dropout:
            weights, itself_weight = (torch.nn.functional.dropout(w, dropout) for w in (near, own))
        out = edge_sum(weights, v, pattern) + itself_weight * v + other * far
        if extra is not None:
            pairs, itself, mapped = (t.to(dtype) for t in extra)
            out = out + (_pair_sums(weights, pairs, neighbors) + itself_weight * itself) @ mapped
        total = total[..., None] + own + other
        out, level = out / total, top + total.squeeze(-1).log()
    return out.transpose(0, 1).to(out_dtype), level.T


def window_weights_of_nodes(
    query: Tensor,
    key: Tensor,
    projection: Tensor | None,
    pair_bias: Tensor,
    self_bias: Tensor,
    far_bias: Tensor,
    neighbors: Neighbors,
    scale: float | None,
    rows: Rows,
    chunk: int = 4096,
) -> Tensor:
    """Shares (E + N, heads) of near pairs, and of nodes with themselves, in what a node attends to, near and far parts
    together."""
    biases = pair_bias, self_bias, far_bias
    if projection is None:
        return near_pair_attention_of_nodes(query, key, key, scale, rows, neighbors, biases)[1].of_all().T
    level = _by_features(query, key, key, projection, biases, neighbors, scale, rows)[1]
    with full_precision(query.device):
        query, key, size = query.to(level.dtype), key.to(level.dtype), score_scale(query, scale)
        own = torch.arange(query.shape[0], device=query.device)
        target, source = (torch.cat([t, own]) for t in (neighbors.pattern.row, neighbors.pattern.col))
        bias = torch.cat([pair_bias, self_bias.expand(-1, own.shape[0])], 1).T.to(level.dtype)
        exists = torch.ones_like(target, dtype=torch.bool)
        if neighbors.exists is not None:
            exists = torch.cat([neighbors.exists, torch.ones_like(own, dtype=torch.bool)])
        weights = torch.ones_like(bias[:, :1])
        if neighbors.weights is not None:
            weights = torch.cat([neighbors.weights.to(level.dtype), torch.ones_like(level[:, 0])])[:, None]
        shares = []
        for i, j, b, w in zip(*(t.split(chunk) for t in (target, source, bias, weights)), strict=True):
            score = (query[i] * key[j]).sum(-1) * size
            far = log_feature_product(query[i], key[j], projection, scale)
            shares.append((score + b - level[i]).exp() * w + (far + far_bias - level[i]).exp())
        return torch.cat(shares) * exists[:, None]
