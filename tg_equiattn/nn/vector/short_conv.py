"""The short convolution along sequences as a module."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...functional.vector.short_conv import short_conv
from ...node_batch import NodeBatch, PaddedBatch
from ...tables import Tables


class ShortConv(nn.Module):
    """Every token sees ``taps`` tokens, itself among them, with one weight a channel and tap; ``channels`` says which
    channel each feature has: the components of a vector share one."""

    def __init__(self, channels: Sequence[int], taps: int, causal: bool = False) -> None:
        super().__init__()
        self.taps, self.causal = taps, causal
        self.channels = Tables(functools.partial(torch.tensor, tuple(channels), dtype=torch.int64))
        self.weight = nn.Parameter(torch.empty(1 + max(channels, default=-1), taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def forward(self, x: Tensor, node_batch: NodeBatch) -> Tensor:
        """(T, dim) to the same."""
        weight = self.weight.index_select(0, self.channels(x.device)).T

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            return short_conv(x, weight, rows.lengths, self.causal)

        return node_batch.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, taps={self.taps}" + (", causal=True" if self.causal else "")
