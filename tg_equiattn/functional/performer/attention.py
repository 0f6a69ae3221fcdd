"""Softmax attention in linear time by random features: dense with a mask, or ragged with a batch index."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ...node_batch import NodeBatch
from .feature_attention import feature_readout, feature_summary
from .graph_rows import GraphRows, graph_rows


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
    r"""Attention through random features, in time and memory linear in the number of keys.

    .. math:: \mathrm{out}_i = \frac{\sum_j \langle \phi(q_i), \phi(k_j) \rangle\, v_j}
        {\sum_j \langle \phi(q_i), \phi(k_j) \rangle}, \qquad
        \langle \phi(q), \phi(k) \rangle \approx \exp(\langle q, k \rangle / \sqrt d)

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
    check_operands(query, key, value, projection, (3, 4))
    if query.ndim == 3:
        if mask is not None:
            raise ValueError("mask must be None where query is ragged, (N, heads, d): leave the masked nodes out")
        rows = graph_rows(NodeBatch.flat(query, batch, batch_size, whole=False))
        return linear_attention_of_nodes(query, key, value, projection, rows)[0]
    if batch is not None:
        raise ValueError("batch must be None where query is dense, (B, heads, N, d): use mask")
    checks.mask(mask, (query.shape[0], query.shape[2]))
    there = None if mask is None else mask[:, None, :, None]
    if there is not None:
        query, key, value = (torch.where(there, t, 0.0) for t in (query, key, value))
    rows = graph_rows(NodeBatch.dense(query.shape[0], query.shape[2], mask, query.device))
    out, _ = attention_in_rows(query, key, value, projection, rows)
    return out if there is None else torch.where(there, out, 0.0)


def check_operands(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, axes: tuple[int, ...] = (3,)
) -> None:
    """Raise ValueError unless query, key and value are alike but for value's last axis, and the directions are as wide
    as the query."""
    if query.ndim not in axes or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key))
        dense = "(B, heads, N, d), or " if 4 in axes else ""
        raise ValueError(
            f"query, key and value must be {dense}(N, heads, d) with batch, alike but for value's last axis, got "
            f"{shapes} and {tuple(value.shape)}"
        )
    if projection is None:
        return
    if projection.ndim != 2 or projection.shape[1] != query.shape[-1] or not projection.shape[0]:
        raise ValueError(f"projection must be (m, {query.shape[-1]}), got {tuple(projection.shape)}")
    if projection.requires_grad:
        raise ValueError("projection must not require a gradient: random features are drawn, not learned")


def linear_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor, rows: GraphRows, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`linear_attention` of nodes (N, heads, d) in rows, unchecked, with dropout of whole keys of each head; also
    the log-sum-exp of the estimated scores (N, heads, 1), but for :func:`feature_norm`."""
    if dropout:
        value = value * torch.nn.functional.dropout(torch.ones_like(value[..., :1]), dropout)
    query, key, value = (rows.pack(t).transpose(1, 2) for t in (query, key, value))
    out, lse = (t.transpose(1, 2) for t in attention_in_rows(query, key, value, projection, rows))
    return rows.unpack(out), rows.unpack(lse)


def feature_norm(query: Tensor, projection: Tensor) -> Tensor:
    """The part of a query's log features that is the same for all of them, (..., 1)."""
    return -query.square().sum(-1, keepdim=True) * (query.shape[-1] ** -0.5 / 2) - math.log(projection.shape[0])


class KeyRows(Protocol):
    """What rows of keys say: which exist (rows, N), and how sums over rows are those that queries see."""

    @property
    def mask(self) -> Tensor | None: ...

    def merge(self, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]: ...


def attention_in_rows(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor, rows: KeyRows, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Outputs (rows, heads, N, e) and log-sum-exps (rows, heads, N, 1); the rows of one graph share their keys. As a
    ``plain`` composition of torch's operations, with all scores in memory, if asked."""
    heads, scale = query.shape[1], query.shape[-1] ** -0.5
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        w = projection.to(dtype) * math.sqrt(scale)  # in place of queries and keys
        mask = None if rows.mask is None else rows.mask.repeat_interleave(heads, 0)
        key_rows, value_rows, query_rows = (t.to(dtype).flatten(0, 1) for t in (key, value, query))
        content, level = feature_summary(key_rows, value_rows, w, mask, scale / 2, plain)
        content, level = rows.merge(content.unflatten(0, (-1, heads)), level.unflatten(0, (-1, heads)))
        out, lse = feature_readout(query_rows, w, content.flatten(0, 1), level.flatten(0, 1), plain)
    return out.view(value.shape).to(value.dtype), lse.view(*query.shape[:-1], 1)
