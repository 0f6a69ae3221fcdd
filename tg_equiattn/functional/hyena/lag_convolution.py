r"""Convolution of sequences with one filter of the lag, and its derivatives, as two PyTorch operators.

    y_i = sum_m h_m x_{i-a-m}          g_m = sum_{b,i} y_i x_{i-a-m}

with filters h_0 .. h_{L-1} of the lags a .. a + L - 1, one a channel, the same for all sequences b and components of
vectors; what lies beyond the ends of a sequence counts as zero. Both are computed by FFT at a fast length. The
derivatives of each are made of the two again, so they save their inputs only and have derivatives of any order. Their
plain compositions are one block of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision
from ..backend import refuse_forward_mode, use_plain
from .fft_convolution import blocks, fast_length
from .short_conv import check_signal

LAG_MODES = ("linear", "causal")


def first_lag(length: int, mode: str) -> int:
    """The first lag of a filter for sequences of a length: minus the last one, or 0."""
    return 0 if mode == "causal" else 1 - length


def lag_long_conv(x: Tensor, h: Tensor, lengths: Tensor | None = None, mode: str = "linear") -> Tensor:
    r"""Long convolution of sequences of scalars or vectors with a filter of the lag, each channel by itself.

    .. math:: y_i = \sum_j h_{i-j}\, x_j

    over the sequence's own tokens, all of them (``"linear"``) or those up to i (``"causal"``). No factor of the length
    and no index but the lag: zeros before or after a sequence, wherever it stands among them, change nothing.

    Args:
        x: signal.
        h: filter of the lags 1 - N to N - 1 in this order (``"linear"``), or 0 to N - 1 (``"causal"``).
        lengths: int64 ``(B,)``, the own length of each sequence; ``None`` means N. What lies beyond is never read, and
            is zero in the output.
        mode: ``"linear"`` or ``"causal"``.

    Shapes:
        ``(B, N, C)`` or ``(B, N, C, 3)``, and ``(2N - 1, C)``, or ``(N, C)`` for ``"causal"``, to the shape of x.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Poli et al., Hyena Hierarchy (2023), section 3.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> h = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]).view(5, 1)  # of lag 1
        >>> lag_long_conv(x, h).flatten().abs().round()  # of the token before
        tensor([0., 1., 2.])
    """
    checks.choice("mode", mode, LAG_MODES)
    vectors = check_signal(x)
    length, channels = x.shape[1:3]
    shape = max(0, length - first_lag(length, mode)), channels
    if not isinstance(h, Tensor) or tuple(h.shape) != shape:
        came = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise ValueError(f"h must be {shape}, the lags of {length} tokens by channels, got {came}")
    if h.dtype != x.dtype or h.device != x.device:
        raise ValueError(f"h must be {x.dtype} on {x.device} as x is, got {h.dtype} on {h.device}")
    checks.lengths(lengths, x.shape[0], length, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, h = x.to(dtype), h.to(dtype)
    rows = x.permute(3, 2, 0, 1) if vectors else x.permute(2, 0, 1)[None]
    out = lag_convolution(rows, h.T, lengths, first_lag(length, mode))
    return out.permute(2, 3, 1, 0) if vectors else out[0].permute(1, 2, 0)


def lag_convolution(x: Tensor, h: Tensor, lengths: Tensor | None, first: int, backend: str = "auto") -> Tensor:
    """The convolution of x (1 or 3, C, B, N), of own lengths (B,), with h (C, L), whose first lag is ``first``. There
    is no kernel of it: any backend but ``"plain"`` means the operators."""
    if use_plain(backend):
        with full_precision(x.device):
            return _convolve_block(x, h, lengths, first) if x.numel() else torch.zeros_like(x)
    return _convolve(x, h, lengths, first)


def _total(length: int, filters: int, first: int) -> int:
    """A length of transforms at which nothing wraps round onto what is wanted."""
    return fast_length(max(length + filters - 1 + first, length - first))


def _own(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Zeros beyond the own lengths."""
    if lengths is None:
        return x
    return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths[:, None], 0)


def _convolve_block(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    length, filters = x.shape[-1], h.shape[-1]
    total = _total(length, filters, first)
    spectrum = torch.fft.rfft(_own(x, lengths), total) * torch.fft.rfft(h, total)[:, None]
    return _own(torch.fft.irfft(spectrum, total)[..., -first : length - first], lengths)


def _correlate_block(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    length = x.shape[-1]
    total = _total(length, filters, first)
    products = torch.fft.rfft(_own(y, lengths), total) * torch.fft.rfft(_own(x, lengths), total).conj().resolve_conj()
    lags = torch.fft.irfft(products.sum((0, 2)), total)  # of lag l at place l, of -l at total - l
    return torch.cat([lags[:, total + first :], lags[:, : filters + first]], -1)


@torch.library.custom_op("tg_equiattn::lag_convolution", mutates_args=())
def _convolve(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    refuse_forward_mode()
    if not x.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    parts = blocks(x, _total(x.shape[-1], h.shape[-1], first))
    with full_precision(x.device):
        if len(parts) == 1:
            return _convolve_block(x, h, lengths, first).contiguous()
        out = x.new_empty(x.shape)
        for channels, rows in parts:
            own = None if lengths is None else lengths[rows]
            out[:, channels, rows] = _convolve_block(x[:, channels, rows], h[channels], own, first)
    return out


@torch.library.custom_op("tg_equiattn::lag_correlation", mutates_args=())
def _correlate(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    refuse_forward_mode()
    out = x.new_zeros(x.shape[1], filters)
    if not x.numel():
        return out
    with full_precision(x.device):
        for channels, rows in blocks(x, _total(x.shape[-1], filters, first)):
            own = None if lengths is None else lengths[rows]
            part = y[:, channels, rows], x[:, channels, rows]
            out[channels] += _correlate_block(*part, own, first, filters)
    return out


@_convolve.register_fake
def _(x: Tensor, h: Tensor, lengths: Tensor | None, first: int) -> Tensor:
    return x.new_empty(x.shape)


@_correlate.register_fake
def _(y: Tensor, x: Tensor, lengths: Tensor | None, first: int, filters: int) -> Tensor:
    return x.new_empty(x.shape[1], filters)


def _save(ctx, inputs, output) -> None:
    *operands, lengths, ctx.first = inputs[:4]
    ctx.save_for_backward(*operands, lengths)


def _backwards(h: Tensor, first: int) -> tuple[Tensor, int]:
    """The filter of minus the lag, and its first lag."""
    return h.flip(-1), 1 - first - h.shape[-1]


def _convolution_gradient(ctx, grad: Tensor):
    x, h, lengths = ctx.saved_tensors
    grad_x = grad_h = None
    if ctx.needs_input_grad[0]:
        turned, first = _backwards(h, ctx.first)
        grad_x = _convolve(grad, turned, lengths, first)
    if ctx.needs_input_grad[1]:
        grad_h = _correlate(grad, x, lengths, ctx.first, h.shape[-1])
    return grad_x, grad_h, None, None


def _correlation_gradient(ctx, grad: Tensor):
    y, x, lengths = ctx.saved_tensors
    grad_y = grad_x = None
    if ctx.needs_input_grad[0]:
        grad_y = _convolve(x, grad, lengths, ctx.first)
    if ctx.needs_input_grad[1]:
        turned, first = _backwards(grad, ctx.first)
        grad_x = _convolve(y, turned, lengths, first)
    return grad_y, grad_x, None, None, None


_convolve.register_autograd(_convolution_gradient, setup_context=_save)
_correlate.register_autograd(_correlation_gradient, setup_context=_save)
