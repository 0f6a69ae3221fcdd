"""The short convolution along sequences as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...functional.vector.short_conv import short_conv
from ...ragged import Ragged, Rows


class ShortConv(nn.Module):
    """Every token sees its neighbors along the sequence, with one weight a channel and tap.

    Args:
        channels: the channel of each feature: features of one channel, the components of a vector say, share weights.
        taps: how many tokens it sees, an odd number.
        causal: only the token itself and those before, rather than as many on both sides.
    """

    channels: Tensor

    def __init__(self, channels: Sequence[int], taps: int, causal: bool = False) -> None:
        super().__init__()
        self.taps, self.causal = taps, causal
        self.register_buffer("channels", torch.tensor(channels, dtype=torch.int64), persistent=False)
        self.weight = nn.Parameter(torch.empty(1 + max(channels, default=-1), taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def forward(self, x: Tensor, ragged: Ragged) -> Tensor:
        """(T, dim) to the same."""
        weight = self.weight.index_select(0, self.channels).T

        def kernel(x: Tensor, rows: Rows) -> Tensor:
            return short_conv(x, weight, rows.lengths, self.causal)

        return ragged.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, taps={self.taps}" + (", causal=True" if self.causal else "")
