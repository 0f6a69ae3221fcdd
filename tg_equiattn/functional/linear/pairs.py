"""Softmax attention over all pairs of each graph, for graphs so small that random features would be more work."""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision import full_precision
from .attention import score_scale
from .rows import Rows


def pair_attention_of_nodes(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Softmax attention of nodes (N, heads, d) in rows of whole graphs, unchecked; also the log-sum-exp of the scores
    (N, heads, 1)."""
    with full_precision(query.device):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (rows.pack(t).to(dtype).contiguous() for t in (query * score_scale(query, scale), key, value))
        scores = q @ k.mT
        if rows.mask is not None:
            scores = scores.masked_fill(~rows.mask[:, None, None], torch.finfo(dtype).min)
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        out = weights @ v / total
        return rows.unpack(out).to(value.dtype), rows.unpack(total.log() + top)
