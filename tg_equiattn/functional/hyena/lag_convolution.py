r"""Convolution of sequences with filters of the lag, and its derivatives, as two PyTorch operators, by FFT.

    y_i = sum_m h_m x_{i-a-m}          g_m = sum_{b,i} y_i x_{i-a-m}

with filters h_0 .. h_{L-1} of the lags a .. a + L - 1. Each channel has a filter, which all sequences b and all
components of a vector share. Values beyond the ends of a sequence count as zero. The derivatives of both operators
consist of the same two operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import refuse_forward_mode, use_plain
from ..second_derivatives import register_derivatives
from .fft_convolution import blocks, fast_length, zero_beyond

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def first_lag(length: int, causal: bool) -> int:
    """The first lag of a filter for sequences of a length: 1 - length, or 0 if ``causal``."""
    return 0 if causal else 1 - length


def lag_convolution(
    x: Float[Tensor, "rows tokens channels ..."], h: Float[Tensor, "lags channels"],
    lengths: Int[Tensor, " rows"] | None, first: int,
) -> Float[Tensor, "rows tokens channels ..."]:  # fmt: skip
    """Convolve sequences x of scalars or vectors, of own ``lengths``, with filters h, whose first lag is ``first``:
    y_i = sum_j h_{i-j} x_j. Zeros around a sequence change nothing."""
    if use_plain():
        return _plain_convolution(x, h, lengths, first)
    return _convolve(x, h, lengths, first)


def _total(length: int, filters: int, first: int) -> int:
    """A fast length of transforms, long enough that no output wraps around."""
    return fast_length(max(length + filters - 1 + first, length - first))


def _convolve_block(
    x: Float[Tensor, "rows tokens channels ..."], h: Float[Tensor, "lags channels"],
    lengths: Int[Tensor, " rows"] | None, first: int,
) -> Float[Tensor, "rows tokens channels ..."]:  # fmt: skip
    length, filters = x.shape[1], len(h)
    total = _total(length, filters, first)
    spectrum = torch.fft.rfft(h, total, dim=0)
    spectrum = torch.fft.rfft(zero_beyond(x, lengths), total, dim=1) * (
        spectrum if x.ndim == 3 else spectrum[..., None]
    )
    return zero_beyond(torch.fft.irfft(spectrum, total, dim=1)[:, -first : length - first], lengths)


def _correlate_block(
    y: Float[Tensor, "rows tokens channels ..."], x: Float[Tensor, "rows tokens channels ..."],
    lengths: Int[Tensor, " rows"] | None, first: int, filters: int,
) -> Float[Tensor, "lags channels"]:  # fmt: skip
    total = _total(x.shape[1], filters, first)
    y, x = (torch.fft.rfft(zero_beyond(part, lengths), total, dim=1) for part in (y, x))
    products = y * x.conj().resolve_conj()
    products = products.sum(0) if x.ndim == 3 else products.sum((0, 3))
    lags = torch.fft.irfft(products, total, dim=0)  # lag l is at index l, lag -l at total - l
    return torch.cat([lags[total + first :], lags[: filters + first]])


@torch.library.custom_op("tg_equiattn::lag_convolution", mutates_args=())
def _convolve(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    refuse_forward_mode()
    if not x.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    parts = blocks(x, _total(x.shape[1], len(h), first))
    with full_precision(x.device):
        if len(parts) == 1:
            return _convolve_block(x, h, lengths, first).contiguous()
        out = x.new_empty(x.shape)
        for rows, channels in parts:
            own = None if lengths is None else lengths[rows]
            out[rows, :, channels] = _convolve_block(x[rows, :, channels], h[:, channels], own, first)
    return out


@torch.library.custom_op("tg_equiattn::lag_correlation", mutates_args=())
def _correlate(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    refuse_forward_mode()
    out = x.new_zeros(filters, x.shape[2])
    if not x.numel():
        return out
    with full_precision(x.device):
        for rows, channels in blocks(x, _total(x.shape[1], filters, first)):
            own = None if lengths is None else lengths[rows]
            part = y[rows, :, channels], x[rows, :, channels]
            out[:, channels] += _correlate_block(*part, own, first, filters)
    return out


@_convolve.register_fake
def _(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    return x.new_empty(x.shape)


@_correlate.register_fake
def _(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    return x.new_empty(filters, x.shape[2])


def _sequence_gradient(grad: Tensor, x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    return _convolve(grad, h.flip(0), lengths, 1 - first - len(h))


def _filter_gradient(grad: Tensor, x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    return _correlate(grad, x, lengths, first, len(h))


def _gradient_of_first(grad: Tensor, y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    return _convolve(x, grad, lengths, first)


def _gradient_of_second(grad: Tensor, y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    return _convolve(y, grad.flip(0), lengths, 1 - first - len(grad))


def _plain_convolution(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    with full_precision(x.device):
        return _convolve_block(x, h, lengths, first) if x.numel() else torch.zeros_like(x)


def _plain_correlation(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    with full_precision(x.device):
        whole = y, x, lengths, first, filters
        return _correlate_block(*whole) if x.numel() else x.new_zeros(filters, x.shape[2])


register_derivatives(_convolve, (_sequence_gradient, _filter_gradient), _plain_convolution, 2)
register_derivatives(_correlate, (_gradient_of_first, _gradient_of_second), _plain_correlation, 2)
