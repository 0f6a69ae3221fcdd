"""Short convolution along sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...node_batch import PaddedBatch
from ...tables import Tables
from .sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float


class ShortConv(nn.Module):
    r"""Convolution over a few neighbors along each sequence, channel by channel.

    .. math:: y_i = \sum_{t=0}^{K-1} w_t\, x_{i+t-s}

    Here K is the number of taps, and s = (K - 1) / 2, or s = K - 1 if ``causal``. Missing tokens and tokens beyond the
    ends count as zero. In a ring of n tokens, indices are taken modulo n.

    Args:
        channels: The channel of each feature. The components of a vector share one channel, so they share weights.
        taps: Number of taps K, odd and at least 3.
        causal: Whether outputs depend on earlier tokens only. The default is ``False``.

    Raises:
        ValueError: if ``taps`` is not an odd number from 3 on.
    """

    def __init__(self, channels: Sequence[int], taps: int, causal: bool = False) -> None:
        super().__init__()
        if isinstance(taps, bool) or not isinstance(taps, int) or taps < 3 or not taps % 2:
            raise ValueError(f"short_conv must be None or an odd number of taps from 3 on, got {taps!r}")
        self.taps, self.causal = taps, causal
        self.channels = Tables(functools.partial(torch.tensor, tuple(channels), dtype=torch.int64))
        self.weight = nn.Parameter(torch.empty(1 + max(channels, default=-1), taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def forward(self, x: Float[Tensor, "tokens dim"], sequences: Sequences) -> Float[Tensor, "tokens dim"]:
        weight = self.weight.index_select(0, self.channels(x.device)).T
        before = self.taps - 1 if self.causal else self.taps // 2

        def convolve(x: Tensor, rows: PaddedBatch) -> Tensor:
            length = x.shape[1]
            x = x if rows.mask is None else x.masked_fill(~rows.mask[..., None], 0)
            padded, rings = F.pad(x, (0, 0, before, self.taps - 1 - before)), sequences.rings(rows)
            if rings is not None:
                place = torch.arange(-before, padded.shape[1] - before, device=x.device)
                size = rings.new_full((1,), length, dtype=torch.int64) if rows.lengths is None else rows.lengths
                around = (place % size.clamp(min=1)[:, None])[..., None].expand_as(padded)
                padded = torch.where(rings[:, None, None], x.gather(1, around), padded)
            out = padded[:, :length] * weight[0]
            for tap in range(1, self.taps):
                out = torch.addcmul(out, padded[:, tap : tap + length], weight[tap])
            return out

        return sequences.mix(convolve, x)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, taps={self.taps}" + (", causal=True" if self.causal else "")
