"""Softmax attention in linear time by random features: dense with a mask, or ragged with a batch index."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision
from .feature_attention import feature_readout, feature_summary
from .random_features import KERNELS
from .rows import Rows


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    kernel: str = "softmax",
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
        kernel: ``"softmax"``, or ``"relu"``, which estimates another kernel, not the softmax.
        scale: c; ``None`` means :math:`1/\sqrt{d}`.
        mask: dense only, bool ``(B, N)``, true for the keys that exist. The others are in neither the numerator nor
            the denominator, whatever they hold, and their outputs are zero.
        batch: ragged only, sorted int64 ``(N,)`` graph index.
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
    checks.choice("kernel", kernel, KERNELS)
    checks.scale(scale)
    if query.ndim not in (3, 4) or key.shape != query.shape or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            "query, key and value must be (B, heads, N, d), or (N, heads, d) with batch, alike but for value's last "
            f"axis, got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if projection.ndim != 2 or projection.shape[1] != query.shape[-1] or not len(projection):
        raise ValueError(f"projection must be (m, {query.shape[-1]}), got {tuple(projection.shape)}")
    if projection.requires_grad:
        raise ValueError("projection must not require a gradient: random features are drawn, not learned")
    if query.ndim == 3:
        if mask is not None:
            raise ValueError("mask must be None where query is ragged, (N, heads, d): leave the masked nodes out")
        rows = Rows(len(query), checks.batch_index(batch, batch_size, query), batch)
        return features_attention(query, key, value, projection, kernel, scale, rows)[0]
    if batch is not None:
        raise ValueError("batch must be None where query is dense, (B, heads, N, d): use mask")
    checks.mask(mask, (query.shape[0], query.shape[2]))
    if mask is not None:
        there = mask[:, None, :, None]
        query, key, value = (torch.where(there, t, 0.0) for t in (query, key, value))
    out, _ = dense_features_attention(query, key, value, projection, kernel, scale, mask)
    return out if mask is None else torch.where(there, out, 0.0)


def features_attention(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor, kernel: str, scale: float | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """:func:`linear_attention` of nodes (N, heads, d) in rows; also the log-sum-exp of the estimated scores,
    (N, heads, 1), but for a part of the query alone, :func:`log_norm`."""
    query, key, value = (rows.pack(t) for t in (query, key, value))
    out, lse = dense_features_attention(query, key, value, projection, kernel, scale, rows.mask, rows)
    return rows.unpack(out), rows.unpack(lse)


def dense_features_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    kernel: str,
    scale: float | None,
    mask: Tensor | None,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, heads, N, e) and log-sum-exps (B, heads, N, 1); with ``rows``, rows of one graph share their keys."""
    heads = query.shape[1]
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        w, size = projection.to(dtype), score_scale(query, kernel, scale)
        there = None if mask is None else mask.repeat_interleave(heads, 0)
        key_rows, value_rows, query_rows = (t.to(dtype).flatten(0, 1) for t in (key, value, query))
        root = math.sqrt(abs(size))  # of the scale, put on the directions in place of queries and keys
        content, level = feature_summary(key_rows, value_rows, w * root, there, kernel, abs(size) / 2)
        if rows is not None:
            content, level = rows.merge(content.unflatten(0, (-1, heads)), level.unflatten(0, (-1, heads)))
            content, level = content.flatten(0, 1), level.flatten(0, 1)
        out, lse = feature_readout(query_rows, w * math.copysign(root, size), content, level, kernel)
    return out.view(value.shape).to(value.dtype), lse.view(*query.shape[:-1], 1)


def score_scale(query: Tensor, kernel: str, scale: float | None) -> float:
    """The factor of scores; the ReLU kernel is homogeneous and takes none."""
    if kernel == "relu":
        return 1.0
    return query.shape[-1] ** -0.5 if scale is None else scale


def log_norm(query: Tensor, kernel: str, scale: float | None, features: int) -> Tensor:
    """What :func:`features_attention` leaves out of its log-sum-exp, the same for all features of a query, (..., 1)."""
    if kernel == "relu":
        return query.new_full((*query.shape[:-1], 1), -math.log(features))
    size = abs(score_scale(query, kernel, scale))
    return -query.square().sum(-1, keepdim=True) * (size / 2) - math.log(features)
