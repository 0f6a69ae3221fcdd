"""Long convolution with a learned implicit filter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...functional.hyena.fft_convolution import along, first_lag, lag_convolution, ring_convolution
from ...functional.operators import tile_numbers
from ...functional.tiles import map_tiles
from ...node_batch import PaddedBatch
from ..modules import reset_children
from ..vector.sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_OCTAVES = 10  # number of periods: 4, 8, ... 2048 tokens
_WIDTH = 16  # width of the MLP
_BLOCK_LAGS = 1 << 14  # lags of a tile on a CPU


class ImplicitFilter(nn.Module):
    r"""Long convolution with a filter that a small network computes from the lag.

    .. math:: y_i = \sum_j h(i - j)\, x_j, \qquad h_c(l) = (1 + |l|)^{-a_c}\, \mathrm{MLP}_c(\varphi(l))

    Here l = i - j is the lag. The features :math:`\varphi` are log(1 + \|l\|) / 4, the same with the sign of l, and
    sines and cosines with periods from 4 to 2048 tokens. The MLP has sines between its layers. The exponents a >= 0 are
    learned and start between 1/2 and 1. In a ring of n tokens, l is the lag modulo n in (-n/2, n/2].

    Args:
        channels: Number of filters.
        causal: Whether filters are zero at negative lags, so that outputs depend on earlier tokens only. The default is
            ``False``.

    Source: Poli et al., Hyena Hierarchy (2023), section 3.3.
    """

    def __init__(self, channels: int, causal: bool = False) -> None:
        super().__init__()
        self.channels, self.causal = channels, causal
        self.inside = nn.Linear(2 + 2 * _OCTAVES, _WIDTH)
        self.between = nn.Linear(_WIDTH, _WIDTH)
        self.outside = nn.Linear(_WIDTH, channels)
        self.decay = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.inside.weight, std=(2 / self.inside.in_features) ** 0.5)
        nn.init.normal_(self.between.weight, std=(2 / self.between.in_features) ** 0.5)
        nn.init.normal_(self.outside.weight, std=(1 / self.outside.in_features) ** 0.5)
        with torch.no_grad():
            start = torch.linspace(0.5, 1, len(self.decay), dtype=self.decay.dtype, device=self.decay.device)
            self.decay.copy_(start.expm1().log())  # the inverse of softplus

    def filter(self, length: int) -> Float[Tensor, "lags channels"]:
        """Filters at all lags of sequences of this length."""
        lags = torch.arange(first_lag(length, self.causal), max(length, 1), device=self.decay.device)
        layers = self.inside, self.between, self.outside
        return map_tiles(_at, tile_numbers(lags.device, _BLOCK_LAGS, 8 * _WIDTH), (lags,), self.decay, *layers)

    def forward(self, x: Tensor, sequences: Sequences, channels: Tensor | None = None) -> Tensor:
        """Convolve features (T, channels) or (T, channels, 3). If ``channels`` gives the filter of each column, x has
        any number of columns, (T, dim)."""
        longest = sequences.longest
        h = self.filter(longest)
        h = h if channels is None else h.index_select(1, channels)

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            first = first_lag(rows.length, self.causal)
            begin = first - first_lag(longest, self.causal)
            some, rings = h[begin : begin + rows.length - first], sequences.rings(rows)
            out = lag_convolution(x, some, rows.lengths, first)
            if rings is None:
                return out
            return torch.where(along(rings, out), ring_convolution(x, some, rows.lengths, first), out)

        return sequences.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{self.channels}" + (", causal=True" if self.causal else "")


def _at(
    lags: Int[Tensor, " lags"], decay: Float[Tensor, " channels"], inside: nn.Linear, between: nn.Linear,
    outside: nn.Linear,
) -> Float[Tensor, "lags channels"]:  # fmt: skip
    distance = lags.abs().to(decay.dtype).log1p()
    waves = 2 ** torch.arange(2, _OCTAVES + 2, device=lags.device)
    periods = (lags[:, None] % waves).to(distance.dtype) / waves  # exact at any lag
    angles = 2 * math.pi * periods
    x = torch.cat([torch.stack([distance, lags.sign() * distance], 1) / 4, angles.sin(), angles.cos()], 1)
    x = outside(between(inside(x).sin()).sin())
    return x * torch.exp(-nn.functional.softplus(decay) * distance[:, None])
