"""Softmax attention in linear time by random features: dense with a mask, or ragged with a batch index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ...node_batch import NodeBatch
from .feature_attention import feature_readout, feature_summary
from .graph_rows import graph_rows
from .random_features import log_weights

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    r"""Softmax attention estimated by random features, in time and memory linear in the number of keys.

    .. math:: \mathrm{out}_i = \frac{\sum_j \langle \phi(q_i), \phi(k_j) \rangle\, v_j}
        {\sum_j \langle \phi(q_i), \phi(k_j) \rangle}, \qquad
        \langle \phi(q), \phi(k) \rangle \approx \exp(\langle q, k \rangle / \sqrt d)

    With the logarithms :math:`u = \log \phi` of the features, this is two softmaxes: one over the keys of a graph for
    each feature m, with log-sum-exp :math:`\ell_m`, and one over the features for each query. It is computed so:

    .. math:: \mathrm{out}_i = \sum_m \mathrm{softmax}_m\big(u_m(q_i) + \ell_m\big)
        \sum_j \mathrm{softmax}_j\big(u_m(k_j)\big)\, v_j .

    The maximum that is subtracted before exponentials is that of one graph, head and feature (keys) or of one query.
    So other graphs of the batch have no effect, no epsilon is needed, and vectors of norm 100 do not overflow. Half
    precision is computed in float32.

    Args:
        query: Queries, dense ``(B, heads, N, d)`` as in torch's ``scaled_dot_product_attention``, or ragged
            ``(N, heads, d)`` with ``batch``.
        key: Keys, shaped as ``query``.
        value: Values, ``(B, heads, N, e)`` or ``(N, heads, e)``.
        projection: Directions of the random features, ``(m, d)``. Draw them with :func:`orthogonal_projection`.
        mask: Bool ``(B, N)``, true for valid nodes; for dense input only. Masked keys have no weight, even if they are
            NaN, and outputs of masked queries are zero. Default ``None``: all nodes are valid.
        batch: Graph index of each node, sorted int64 ``(N,)``; for ragged input only. Default ``None``: one graph.
        batch_size: Number of graphs. Default ``None``: read from ``batch``, for which CUDA synchronises.

    Returns:
        Tensor shaped as ``value``.

    Raises:
        ValueError: If shapes do not fit each other, if ``projection`` requires a gradient, if ``mask`` is given with
            ragged input or ``batch`` with dense input, or if ``batch`` is not sorted.

    Source: Choromanski et al., Rethinking attention with Performers (2021); relative-performer section 2.1.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
        >>> linear_attention(q, k, v, torch.randn(64, 8)).shape
        torch.Size([2, 4, 100, 8])
    """
    check_operands(query, key, value, projection, (3, 4))
    if query.ndim == 3:
        if mask is not None:
            raise ValueError("mask must be None where query is ragged, (N, heads, d), got a mask: leave its nodes out")
        node_batch = NodeBatch.flat(query, batch, batch_size, whole=False)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return linear_attention_impl(query, key, value, projection, node_batch)[0].transpose(0, 1)
    if batch is not None:
        raise ValueError("batch must be None where query is dense, (B, heads, N, d), got a tensor: use mask")
    checks.mask(mask, (query.shape[0], query.shape[2]))
    shape, valid, flat_mask = value.shape, None, None
    if mask is not None:
        valid, flat_mask = mask[:, None, :, None], mask.repeat_interleave(query.shape[1], 0)
        query, key, value = (torch.where(valid, x, 0.0) for x in (query, key, value))
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    out = feature_attention(query, key, value, projection, flat_mask)[0].view(shape)
    return out if valid is None else torch.where(valid, out, 0.0)


def check_operands(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, axes: tuple[int, ...] = (3,)
) -> None:
    """Raise ValueError unless query, key and value have equal shapes except for the last axis of value, and projection
    has the width of the query."""
    if query.ndim not in axes or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key))
        dense = "(B, heads, N, d), or " if 4 in axes else ""
        raise ValueError(
            f"query, key and value must be {dense}(N, heads, d) with batch, equal except for value's last axis, got "
            f"{shapes} and {tuple(value.shape)}"
        )
    if projection is None:
        return
    if projection.ndim != 2 or projection.shape[1] != query.shape[-1] or not projection.shape[0]:
        raise ValueError(f"projection must be (m, {query.shape[-1]}), got {tuple(projection.shape)}")
    if projection.requires_grad:
        raise ValueError(
            "projection must not require a gradient, got one that does: random features are drawn, not learned; pass "
            "projection.detach()"
        )


def linear_attention_impl(
    query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "heads nodes d"], value: Float[Tensor, "heads nodes e"],
    projection: Float[Tensor, "features d"], node_batch: NodeBatch, variance: Float[Tensor, " heads"] | None = None,
    key_bias: Float[Tensor, "heads nodes 1"] | None = None,
) -> tuple[Float[Tensor, "heads nodes e"], Float[Tensor, "heads nodes 1"]]:  # fmt: skip
    """:func:`linear_attention` without checks. ``key_bias`` is added to all scores of a key. Also returns the
    log-sum-exp of the estimated scores, without the term :func:`feature_norm`."""
    heads, rows = query.shape[0], graph_rows(node_batch)

    def merge(content: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        content, lse = rows.merge(content.unflatten(0, (heads, -1)), lse.unflatten(0, (heads, -1)))
        return content.flatten(0, 1), lse.flatten(0, 1)

    mask = None if rows.mask is None else rows.mask.repeat(heads, 1)
    given = (query, key, value) if key_bias is None else (query, key, value, key_bias)
    query, key, value, *bias = (rows.pack(x, 1).flatten(0, 1) for x in given)
    if variance is not None:
        variance = variance[:, None].expand(-1, query.shape[0] // heads).flatten()
    found = feature_attention(query, key, value, projection, mask, merge if rows.merges else None, variance, *bias)
    out, lse = (rows.unpack(x.unflatten(0, (heads, -1)), 1) for x in found)
    return out, lse


def drop_keys(value: Float[Tensor, "heads nodes e"], dropout: float) -> Float[Tensor, "heads nodes e"]:
    """Values with dropout of whole keys of each head: their weights stay in the normaliser."""
    return value * torch.nn.functional.dropout(torch.ones_like(value[..., :1]), dropout) if dropout else value


def feature_norm(query: Float[Tensor, "... d"], projection: Float[Tensor, "features d"]) -> Float[Tensor, "... 1"]:
    """The term of a query's log features that is the same for all features."""
    return query.square().sum(-1, keepdim=True) * (query.shape[-1] ** -0.5 / -2) - math.log(projection.shape[0])


def feature_attention(
    query: Float[Tensor, "groups nodes d"], key: Float[Tensor, "groups nodes d"],
    value: Float[Tensor, "groups nodes e"], projection: Float[Tensor, "features d"],
    mask: Bool[Tensor, "groups nodes"] | None, merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    variance: Float[Tensor, " groups"] | None = None,
    key_bias: Float[Tensor, "groups nodes 1"] | None = None,
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes 1"]]:  # fmt: skip
    """Outputs and log-sum-exps of groups of queries, over the valid keys of each group.

    Args:
        query: queries.
        key: keys.
        value: values.
        projection: directions of the random features.
        mask: true for valid keys; ``None`` means all.
        merge: function for queries that attend to the keys of several groups. It takes the softmax averages (groups,
            features, e) and log-sum-exps (groups, features) over the keys of each group, and returns those over all
            keys that the queries of each group attend to.
        variance: variance of the directions of each group, as in :func:`softmax_features`; ``None`` means 1.
        key_bias: number that is added to all scores of a key.
    """
    scale = query.shape[-1] ** -0.5
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        w = projection.to(dtype) * math.sqrt(scale)  # scaled instead of queries and keys
        query, key = query.to(dtype), key.to(dtype)
        bias = key.square().sum(-1) * (-scale / 2)
        bias = bias if key_bias is None else bias + key_bias[..., 0].to(dtype)
        root = None if variance is None else variance.to(dtype).sqrt()[:, None, None]
        key = key if root is None else key * root
        content, lse = feature_summary(key, bias, w, value.to(dtype), mask)
        content, lse = (content, lse) if merge is None else merge(content, lse)
        if variance is not None and root is not None:
            lse, query = lse + log_weights(projection.to(dtype), variance.to(dtype)), query * root
        out, query_lse = feature_readout(query, w, content, lse)
    return out.to(value.dtype), query_lse[..., None]
