"""What mixes tokens by their places alone, on features kept as (rows, T): the short convolution, and the learned filter
of the lag. Rows of one channel, the components of a vector say, share their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...functional.hyena import first_lag, lag_convolution, short_convolution
from ...sequences import Sequences, token_blocks
from ..children import reset_children

_OCTAVES = 10  # waves of 4, 8, ... 2048 tokens
_BLOCK_LAGS = {"cpu": 1 << 14, "other": 1 << 20}


class ShortConv(nn.Module):
    """:func:`~tg_equiattn.functional.short_conv` along sequences, one weight a channel and tap.

    Args:
        channels: the channel of each row.
        taps: how many tokens it sees, an odd number.
        causal: only the token itself and those before, rather than as many on both sides.
    """

    channels: Tensor

    def __init__(self, channels: Sequence[int], taps: int, causal: bool = False) -> None:
        super().__init__()
        self.taps, self.mode = taps, "causal" if causal else "linear"
        self.register_buffer("channels", torch.tensor(channels, dtype=torch.int64), persistent=False)
        self.weight = nn.Parameter(torch.empty(1 + max(channels, default=-1), taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        weight = self.weight.index_select(0, self.channels)

        def kernel(x: Tensor, lengths: Tensor | None) -> Tensor:
            return short_convolution(x, weight, lengths, self.mode)

        return sequences.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, taps={self.taps}, mode={self.mode!r}"


class LagFilter(nn.Module):
    r"""Long convolution with a learned, implicit filter of the lag.

    .. math:: y_i = \sum_j h(i - j)\, x_j, \qquad h_c(l) = (1 + |l|)^{-a_c}\, \mathrm{MLP}_c(\varphi(l))

    with :math:`\varphi` a quarter of the logarithm of 1 + \|l\|, the same with the sign of l, and waves of 4 to 2048
    tokens, sines between the layers, and learned a >= 0, between 1/2 and 1 at the start: with 1/2 every octave of lags
    adds as much where tokens differ at random, with 1 where all say the same. A filter of the lag alone: the length of
    a sequence does not enter.

    Args:
        channels: how many filters.
        causal: of the lags from 0 on, rather than of both signs.
        width: of the MLP.
        backend: ``"plain"`` for torch's own operations, which transforms see through; the operator otherwise.

    Source: Poli et al., Hyena Hierarchy (2023), section 3.3: an implicit filter there too, of the place, with an
    exponential window.
    """

    def __init__(self, channels: int, causal: bool = False, width: int = 16, backend: str = "auto") -> None:
        super().__init__()
        self.channels, self.mode, self.backend = channels, "causal" if causal else "linear", backend
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
        """(channels, lags) for sequences of this length."""
        lags = torch.arange(first_lag(length, self.mode), max(length, 1), device=self.decay.device)
        step = _BLOCK_LAGS.get(lags.device.type, _BLOCK_LAGS["other"])
        return token_blocks(self._at, step, (lags,))

    def _at(self, lags: Tensor) -> Tensor:
        distance = lags.abs().to(self.decay.dtype).log1p()
        waves = 2 ** torch.arange(2, _OCTAVES + 2, device=lags.device)
        turns = (lags[:, None] % waves).to(distance.dtype) / waves  # exact at any lag
        angles = 2 * math.pi * turns
        x = torch.cat([torch.stack([distance, lags.sign() * distance], 1) / 4, angles.sin(), angles.cos()], 1)
        x = self.outside(self.between(self.inside(x).sin()).sin())
        return x.T * torch.exp(-nn.functional.softplus(self.decay)[:, None] * distance)

    def forward(self, x: Tensor, sequences: Sequences, channels: Tensor | None = None) -> Tensor:
        """(components, rows, T) to the same; ``channels`` says of each row which filter is its own, where rows are not
        the channels."""
        longest = sequences.longest
        h = self.filter(longest)
        h = h if channels is None else h.index_select(0, channels)

        def kernel(x: Tensor, lengths: Tensor | None) -> Tensor:
            length = x.shape[-1]
            first = first_lag(length, self.mode)
            begin = first - first_lag(longest, self.mode)
            return lag_convolution(x, h[:, begin : begin + length - first], lengths, first, self.backend)

        return sequences.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{self.channels}, mode={self.mode!r}"
