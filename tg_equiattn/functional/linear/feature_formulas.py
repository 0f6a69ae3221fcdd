"""The formulas of attention by random features, of groups of nodes whose scores are all in memory.

These are what transforms see of :mod:`.feature_attention`, and what it computes of a chunk of nodes in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


def plain_summary(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float
) -> tuple[Tensor, Tensor]:
    """:func:`feature_summary` with all scores in memory."""
    scores, lowest = key_scores(key, projection, mask, norm), torch.finfo(key.dtype).min
    top = scores.detach().amax(1, keepdim=True).clamp(min=lowest)
    weights = (scores - top).exp()
    sums = weights.sum(1)
    empty = sums == 0
    sums = torch.where(empty, 1.0, sums)
    return weights.mT @ value / sums[..., None], torch.where(empty, lowest, sums.log() + top.squeeze(1))


def plain_readout(query: Tensor, projection: Tensor, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`feature_readout` with all scores in memory."""
    scores = query @ projection.T + level[:, None]
    return scores.softmax(-1) @ content, scores.logsumexp(-1)


def key_scores(key: Tensor, projection: Tensor, mask: Tensor | None, norm: float) -> Tensor:
    """log features of keys (G, n, m), minus infinity where masked."""
    bias = -norm * key.square().sum(-1, keepdim=True)
    if mask is not None:
        bias = bias.masked_fill(~mask[..., None], -math.inf)
    return torch.baddbmm(bias, key, projection.T.expand(key.shape[0], -1, -1))


def query_scores(query: Tensor, projection: Tensor, level: Tensor) -> Tensor:
    """log features of queries (G, n, m), but for a part of each query alone, plus the level of each feature."""
    return torch.baddbmm(level[:, None], query, projection.T.expand(query.shape[0], -1, -1))


def summary_gradient(
    projection: Tensor, norm: float, nodes: Tensors, groups: Tensors, mask: Tensor | None
) -> tuple[Tensors, Tensors]:
    """Gradients of keys and values."""
    (key, value), (content, level, grad_content, grad_level) = nodes, groups
    weights = key_scores(key, projection, mask, norm).sub_(level[:, None]).exp_()
    shift = (grad_level - (content * grad_content).sum(-1))[:, None]
    grad = torch.baddbmm(shift, value, grad_content.mT).mul_(weights)
    grad_key = torch.addcmul(grad @ projection, key, grad.sum(-1, keepdim=True), value=-2 * norm)
    return (grad_key, weights @ grad_content), ()


def readout_gradient(projection: Tensor, nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    """Gradients of queries; of content and level."""
    (query, out, lse, grad_out, grad_lse), (content, level) = nodes, groups
    weights = query_scores(query, projection, level).sub_(lse[..., None]).exp_()
    shift = (grad_lse - (grad_out * out).sum(-1))[..., None]
    grad = torch.baddbmm(shift, grad_out, content.mT).mul_(weights)
    return (grad @ projection,), (weights.mT @ grad_out, grad.sum(1))
