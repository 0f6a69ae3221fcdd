"""Softmax attention of scalars along sequences, beside attention of vectors by cross products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """Softmax attention of (1, C, B, N), the tokens last as :class:`~tg_equiattn.sequences.Sequences` gives them; all
    channels are one head. lengths (B,) are the sequences' own, None where all are N."""
    mask = None
    if lengths is not None:
        inside = torch.arange(q.shape[-1], device=q.device) < lengths.clamp(min=1)[:, None]  # one key at least: no NaN
        q, k, v = (torch.where(inside, x, 0.0) for x in (q, k, v))
        mask = inside[:, None, None]
    q, k, v = (x.permute(2, 0, 3, 1).contiguous() for x in (q, k, v))  # as kernels in O(N) memory want them
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.permute(1, 3, 0, 2)
