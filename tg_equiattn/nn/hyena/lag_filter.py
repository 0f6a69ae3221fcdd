"""The learned filter of the lag."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...functional.backend import tile_numbers
from ...functional.chunks import map_chunks
from ...functional.hyena.lag_convolution import first_lag, lag_convolution
from ...node_batch import NodeBatch, PaddedBatch
from ..modules import reset_children

_OCTAVES = 10  # waves of 4, 8, ... 2048 tokens
_BLOCK_LAGS = 1 << 14  # of a block on a CPU


class LagFilter(nn.Module):
    r"""Long convolution with a learned, implicit filter of the lag, after Poli et al. (2023), section 3.3.

    .. math:: y_i = \sum_j h(i - j)\, x_j, \qquad h_c(l) = (1 + |l|)^{-a_c}\, \mathrm{MLP}_c(\varphi(l))

    with :math:`\varphi` a quarter of the logarithm of 1 + \|l\|, the same with the sign of l, and waves of 4 to 2048
    tokens, sines between the layers, and learned a >= 0, between 1/2 and 1 at the start.
    """

    def __init__(self, channels: int, causal: bool = False, width: int = 16) -> None:
        super().__init__()
        self.channels, self.causal = channels, causal
        self.inside = nn.Linear(2 + 2 * _OCTAVES, width)
        self.between = nn.Linear(width, width)
        self.outside = nn.Linear(width, channels)
        self.decay = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.inside.weight, std=(2 / self.inside.in_features) ** 0.5)
        nn.init.normal_(self.between.weight, std=(2 / self.between.in_features) ** 0.5)
        nn.init.normal_(self.outside.weight, std=(1 / self.outside.in_features) ** 0.5)
        with torch.no_grad():
            start = torch.linspace(0.5, 1, len(self.decay), dtype=self.decay.dtype, device=self.decay.device)
            self.decay.copy_(start.expm1().log())  # what softplus undoes

    def filter(self, length: int) -> Tensor:
        """(lags, channels) for sequences of this length."""
        lags = torch.arange(first_lag(length, self.causal), max(length, 1), device=self.decay.device)
        return map_chunks(self._at, tile_numbers(lags.device, _BLOCK_LAGS, 8 * self.inside.out_features), (lags,))

    def _at(self, lags: Tensor) -> Tensor:
        distance = lags.abs().to(self.decay.dtype).log1p()
        waves = 2 ** torch.arange(2, _OCTAVES + 2, device=lags.device)
        turns = (lags[:, None] % waves).to(distance.dtype) / waves  # exact at any lag
        angles = 2 * math.pi * turns
        x = torch.cat([torch.stack([distance, lags.sign() * distance], 1) / 4, angles.sin(), angles.cos()], 1)
        x = self.outside(self.between(self.inside(x).sin()).sin())
        return x * torch.exp(-nn.functional.softplus(self.decay) * distance[:, None])

    def forward(self, x: Tensor, node_batch: NodeBatch, channels: Tensor | None = None) -> Tensor:
        """(T, channels) or (T, channels, 3) to the same; of (T, dim) where ``channels`` says which filter is each
        column's own."""
        longest = node_batch.bound
        h = self.filter(longest)
        h = h if channels is None else h.index_select(1, channels)

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            first = first_lag(rows.length, self.causal)
            begin = first - first_lag(longest, self.causal)
            return lag_convolution(x, h[begin : begin + rows.length - first], rows.lengths, first)

        return node_batch.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{self.channels}" + (", causal=True" if self.causal else "")
