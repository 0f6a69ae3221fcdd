"""Convolutions along sequences: over a few neighbors, and with a learned filter of the lag."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graphs.node_batch import PaddedBatch
from ..modules import reset_children
from ..operators import tile_numbers
from ..shapes import Float, Int
from ..tiles import map_tiles
from ..torch_state import Tables
from .long_conv import lag_convolution, ring_convolution
from .sequences import Sequences

_OCTAVES = 10  # number of periods: 4, 8, ... 2048 tokens
_WIDTH = 16  # width of the MLP
_RATES = 16  # exponentials of a filter
_TILE_LAGS = 1 << 14  # lags of a tile on a CPU


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
        if taps < 3 or not taps % 2:
            raise ValueError(f"short_conv must be None or an odd number of taps from 3 on, got {taps!r}")
        self.taps, self.causal = taps, causal
        self.channels = Tables(functools.partial(torch.tensor, tuple(channels), dtype=torch.int64))
        self.weight = nn.Parameter(torch.empty(1 + max(channels, default=-1), taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def forward(self, x: Float[Tensor, "dim tokens"], sequences: Sequences) -> Float[Tensor, "dim tokens"]:
        weight = self._taps(x.device)[..., None, None].unbind(1)
        before = self.taps - 1 if self.causal else self.taps // 2

        def convolve(x: Tensor, rows: PaddedBatch) -> Tensor:
            length, rings = x.shape[2], sequences.rings(rows)
            padded = F.pad(x, (before, self.taps - 1 - before))
            if rings is not None:
                place = torch.arange(-before, padded.shape[2] - before, device=x.device)
                size = place.new_full((1,), length) if rows.lengths is None else rows.lengths
                around = x.gather(2, (place % size.clamp(min=1)[:, None]).expand_as(padded))
                padded = torch.where(rings[:, None], around, padded) if isinstance(rings, Tensor) else around
            out = padded[..., :length] * weight[0]
            for tap in range(1, self.taps):
                out = torch.addcmul(out, padded[..., tap : tap + length], weight[tap])
            return out

        return sequences.mix(convolve, x)

    def step(
        self, state: Float[Tensor, "dim rows taps-1"] | None, x: Float[Tensor, "dim rows"]
    ) -> tuple[Float[Tensor, "dim rows taps-1"], Float[Tensor, "dim rows"]]:
        """The next output of a causal convolution, for one more token of each row: the new state, and y."""
        state = x.new_zeros(*x.shape, self.taps - 1) if state is None else state
        window = torch.cat([state, x[..., None]], -1)
        return window[..., 1:], (window * self._taps(x.device)[:, None]).sum(-1)

    def _taps(self, device: torch.device) -> Float[Tensor, "dim taps"]:
        """The weights of each feature."""
        return self.weight.index_select(0, self.channels(device))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, taps={self.taps}" + (", causal=True" if self.causal else "")


class LagFilter(nn.Module, ABC):
    """Long convolution with a filter of the lag, y_i = sum_j h(i - j) x_j, one for each channel.

    Args:
        channels: Number of filters.
        causal: Whether filters are zero at negative lags, so that outputs depend on earlier tokens only. The default is
            ``False``.
    """

    def __init__(self, channels: int, causal: bool = False) -> None:
        super().__init__()
        self.channels, self.causal = channels, causal

    @abstractmethod
    def at(self, lags: Int[Tensor, " lags"]) -> Float[Tensor, "channels lags"]:
        """Filters at some lags. If ``causal``, these are not negative."""

    def forward(self, x: Tensor, sequences: Sequences, channels: Tensor | None = None) -> Tensor:
        """Convolve features (channels, T) or (3, channels, T). If ``channels`` gives the filter of each row, x has any
        number of rows, (dim, T)."""
        longest = sequences.rows.bound
        h = self.at(torch.arange(0 if self.causal else 1 - longest, max(longest, 1), device=x.device))
        h = h if channels is None else h.index_select(0, channels)

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            negative = 0 if self.causal else longest - rows.length  # lags that these rows do not have, on each side
            h_rows, rings = h[:, negative : h.shape[1] + rows.length - longest], sequences.rings(rows)
            if rings is None:
                return lag_convolution(x, h_rows)
            around = ring_convolution(x, h_rows, rows.lengths)
            if not isinstance(rings, Tensor):
                return around
            return torch.where(rings[:, None], around, lag_convolution(x, h_rows))

        return sequences.mix(kernel, x)

    def extra_repr(self) -> str:
        return f"{self.channels}" + (", causal=True" if self.causal else "")


class ImplicitFilter(LagFilter):
    r"""A filter that a small network computes from the lag.

    .. math:: h_c(l) = (1 + |l|)^{-a_c}\, \mathrm{MLP}_c(\varphi(l))

    The features :math:`\varphi` are log(1 + \|l\|) / 4, the same with the sign of l, and sines and cosines with periods
    from 4 to 2048 tokens. The MLP has sines between its layers. The exponents a >= 0 are learned and start between 1/2
    and 1. In a ring of n tokens, l is the lag modulo n in (-n/2, n/2].

    Source: Poli et al., Hyena Hierarchy (2023), section 3.3.
    """

    def __init__(self, channels: int, causal: bool = False) -> None:
        super().__init__(channels, causal)
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
            self.decay.copy_(_start_of_decay(self.decay, 0.5))

    def at(self, lags: Int[Tensor, " lags"]) -> Float[Tensor, "channels lags"]:
        layers = self.inside, self.between, self.outside
        return map_tiles(_at, tile_numbers(lags.device, _TILE_LAGS, 8 * _WIDTH), (lags,), self.decay, *layers).T


class ExponentialFilter(LagFilter):
    r"""A filter that is a sum of decaying exponentials of the lag, with learned rates.

    .. math:: h_c(l) = \sum_{k=1}^{K} w_{ck}\, r_k^{a_c}\, e^{-r_k |l|}

    The K = 16 times 1 / r start at 1/2, 1, 2, ... 16384 tokens, and all filters share them. Exponents a >= 0 are
    learned and start between 1 and 3/2: with equal weights w, the sum is about the power law :math:`|l|^{-a}`. From
    a = 1 on, lags that are longer than the sequences of training add little. Negative lags have weights of their
    own. A causal filter is also a recurrence of K numbers for each feature (:meth:`step`).

    Source: Gu et al., Efficiently Modeling Long Sequences with Structured State Spaces (2022); here with real rates.
    """

    def __init__(self, channels: int, causal: bool = False) -> None:
        super().__init__(channels, causal)
        self.log_rate = nn.Parameter(torch.empty(_RATES))
        self.decay = nn.Parameter(torch.empty(channels))
        self.weight = nn.Parameter(torch.empty(1 if causal else 2, channels, _RATES))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.5)  # the squares of r^a sum to about 4
        with torch.no_grad():
            octaves = torch.arange(_RATES, dtype=self.log_rate.dtype, device=self.log_rate.device) - 1
            self.log_rate.copy_(-math.log(2) * octaves)
            self.decay.copy_(_start_of_decay(self.decay, 1.0))

    def _weights(self) -> Float[Tensor, "sides channels rates"]:
        return self.weight * torch.exp(nn.functional.softplus(self.decay)[:, None] * self.log_rate)

    def at(self, lags: Int[Tensor, " lags"]) -> Float[Tensor, "channels lags"]:
        h = self._weights() @ torch.exp(-self.log_rate.exp()[:, None] * lags.abs())
        return h[0] if self.causal else torch.where(lags < 0, h[1], h[0])

    def step(
        self, state: Float[Tensor, "... channels rows rates"] | None, x: Float[Tensor, "... channels rows"],
        channels: Tensor | None = None,
    ) -> tuple[Float[Tensor, "... channels rows rates"], Float[Tensor, "... channels rows"]]:  # fmt: skip
        """The next output of a causal filter, for one more token of each row: the new state, and y."""
        weight = self._weights()[0] if channels is None else self._weights()[0].index_select(0, channels)
        state = x[..., None] if state is None else torch.exp(-self.log_rate.exp()) * state + x[..., None]
        return state.expand(*x.shape, _RATES), (state * weight[:, None]).sum(-1)


LAG_FILTERS: dict[str, type[LagFilter]] = {"implicit": ImplicitFilter, "exponential": ExponentialFilter}


def _start_of_decay(decay: Float[Tensor, " channels"], first: float) -> Float[Tensor, " channels"]:
    """Numbers whose softplus, the exponents of power laws, are between ``first`` and 1/2 more."""
    return torch.linspace(first, first + 0.5, len(decay), dtype=decay.dtype, device=decay.device).expm1().log()


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
