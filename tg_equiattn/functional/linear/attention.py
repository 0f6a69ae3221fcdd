"""Softmax attention in linear time by random features: dense with a mask, or ragged with a batch index."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision
from .feature_attention import feature_readout, feature_summary
from .rows import Rows, rows_of, zero_where_masked


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    r"""Attention through random features, in time and memory linear in the number of keys.

    .. math:: \mathrm{out}_i = \frac{\sum_j \langle \phi(q_i), \phi(k_j) \rangle\, v_j}
        {\sum_j \langle \phi(q_i), \phi(k_j) \rangle}, \qquad
        \langle \phi(q), \phi(k) \rangle \approx \exp(c \langle q, k \rangle)

    Written with logarithms :math:`u = \log \phi` it is two softmaxes, which is how it is computed: over the keys of
    one graph for each feature m, with :math:`\ell_m` the log-sum-exp, and then over features for each query,

    .. math:: \mathrm{out}_i = \sum_m \mathrm{softmax}_m\big(u_m(q_i) + \ell_m\big)
        \sum_j \mathrm{softmax}_j\big(u_m(k_j)\big)\, v_j .

    The stabilisers are therefore maxima per graph, head and feature (keys) and per query: no other graph enters, no
    epsilon is added, and vectors of norm 100 do not overflow. Half precision is computed in float32.

    Args:
        query, key: dense ``(B, heads, N, d)`` (as torch's ``scaled_dot_product_attention``), or ragged
            ``(N, heads, d)`` with ``batch``.
        value: ``(B, heads, N, e)`` or ``(N, heads, e)``.
        projection: ``(m, d)`` directions; see :func:`orthogonal_projection`.
        scale: c; ``None`` means :math:`1/\sqrt d`.
        mask: dense only, bool ``(B, N)``, true for the keys that exist. The others are in neither the numerator nor
            the denominator, whatever they hold, and their outputs are zero.
        batch: ragged only, sorted int64 ``(N,)`` graph index; ``None`` means one graph.
        batch_size: number of graphs; ``None`` reads it from ``batch`` (on CUDA that waits for the device).

    Returns:
        Shaped as ``value``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Choromanski et al., Rethinking attention with Performers (2021); relative-performer section 2.1.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
        >>> linear_attention(q, k, v, torch.randn(64, 8)).shape
        torch.Size([2, 4, 100, 8])
    """
    check_operands(projection, scale, query=query, key=key, value=value)
    rows = rows_of(query, mask, batch, batch_size)
    if query.ndim == 3:
        return linear_attention_of_nodes(query, key, value, projection, scale, rows)[0]
    query, key, value = (zero_where_masked(t, mask) for t in (query, key, value))
    out, _ = attention_in_rows(query, key, value, projection, scale, rows)
    return zero_where_masked(out, mask)


def check_operands(projection: Tensor | None, scale: float | None, **operands: Tensor) -> None:
    """Raise ValueError unless query, value and what is between them are alike but for value's last axis, and the
    directions are as wide as the query."""
    checks.scale(scale)
    query, *rest, value = operands.values()
    if query.ndim not in (3, 4) or any(t.shape != query.shape for t in rest) or value.shape[:-1] != query.shape[:-1]:
        *names, last = operands
        shapes = [str(tuple(t.shape)) for t in operands.values()]
        raise ValueError(
            f"{', '.join(names)} and {last} must be (B, heads, N, d), or (N, heads, d) with batch, alike but for "
            f"value's last axis, got {', '.join(shapes[:-1])} and {shapes[-1]}"
        )
    if projection is None:
        return
    if projection.ndim != 2 or projection.shape[1] != query.shape[-1] or not projection.shape[0]:
        raise ValueError(f"projection must be (m, {query.shape[-1]}), got {tuple(projection.shape)}")
    if projection.requires_grad:
        raise ValueError("projection must not require a gradient: random features are drawn, not learned")


def score_scale(query: Tensor, scale: float | None) -> float:
    """The factor of scores."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def linear_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor, scale: float | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """:func:`linear_attention` of nodes (N, heads, d) in rows, unchecked; also the log-sum-exp of the estimated scores
    (N, heads, 1), but for :func:`feature_norm`, which is the same for all features of a query."""
    query, key, value = (rows.pack(t) for t in (query, key, value))
    out, lse = attention_in_rows(query, key, value, projection, scale, rows)
    return rows.unpack(out), rows.unpack(lse)


def kept_keys(value: Tensor, dropout: float) -> Tensor:
    """Dropout of whole keys, of each head: factors (N, heads, 1) for values (N, heads, e)."""
    return torch.nn.functional.dropout(torch.ones_like(value[..., :1]), dropout)


def feature_norm(query: Tensor, projection: Tensor, scale: float | None) -> Tensor:
    """The part of a query's log features that is the same for all of them, (..., 1)."""
    size = abs(score_scale(query, scale))
    return -query.square().sum(-1, keepdim=True) * (size / 2) - math.log(projection.shape[0])


def log_feature_product(query: Tensor, key: Tensor, projection: Tensor, scale: float | None) -> Tensor:
    """The estimate of ``c <q, k>``, the logarithm of the product of their features, (..., d) and (..., d) -> (...)."""
    size = score_scale(query, scale)
    root = math.sqrt(abs(size))
    logs = ((query * math.copysign(root, size) + key * root) @ projection.to(query.dtype).T).logsumexp(-1)
    return logs + feature_norm(query, projection, scale)[..., 0] - key.square().sum(-1) * (abs(size) / 2)


class KeyRows(Protocol):
    """What rows of keys say: which exist (rows, N), and how sums over rows are those that queries see."""

    @property
    def mask(self) -> Tensor | None: ...

    def merge(self, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]: ...


def attention_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    scale: float | None,
    rows: KeyRows,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (rows, heads, N, e) and log-sum-exps (rows, heads, N, 1); the rows of one graph share their keys. As a
    ``plain`` composition of torch's operations, with all scores in memory, if asked."""
    heads = query.shape[1]
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        w, size = projection.to(dtype), score_scale(query, scale)
        mask = None if rows.mask is None else rows.mask.repeat_interleave(heads, 0)
        key_rows, value_rows, query_rows = (t.to(dtype).flatten(0, 1) for t in (key, value, query))
        root = math.sqrt(abs(size))  # of the scale, put on the directions in place of queries and keys
        content, level = feature_summary(key_rows, value_rows, w * root, mask, abs(size) / 2, plain)
        content, level = rows.merge(content.unflatten(0, (-1, heads)), level.unflatten(0, (-1, heads)))
        content, level = content.flatten(0, 1), level.flatten(0, 1)
        out, lse = feature_readout(query_rows, w * math.copysign(root, size), content, level, plain)
    return out.view(value.shape).to(value.dtype), lse.view(*query.shape[:-1], 1)
