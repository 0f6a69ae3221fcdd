"""Short convolutions along sequences: every token sees its neighbors, each channel by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modes import full_precision


def short_conv(x: Tensor, weight: Tensor, lengths: Tensor | None, causal: bool) -> Tensor:
    """y_i = sum_t w_t x_{i+t-s} of x (B, N, C) of own lengths (B,) with weights (K, C), K odd: s = (K - 1) / 2, or
    K - 1 where causal. What lies beyond the ends counts as zero, and is zero in the output. By one product a tap."""
    length, taps = x.shape[1], len(weight)
    before = taps - 1 if causal else taps // 2
    mask = None
    if lengths is not None:
        mask = (torch.arange(length, device=x.device) < lengths[:, None])[..., None]
        x = torch.where(mask, x, 0.0)
    with full_precision(x.device):
        padded = F.pad(x, (0, 0, before, taps - 1 - before))
        out = padded[:, :length] * weight[0]
        for tap in range(1, taps):
            out = torch.addcmul(out, padded[:, tap : tap + length], weight[tap])
    return out if mask is None else torch.where(mask, out, 0.0)
