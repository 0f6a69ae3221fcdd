r"""Long convolution and correlation of scalars or vectors as one PyTorch operator.

    convolution   u_i = 1/n sum_j a_j . b_{i-j}          correlation   w_m = 1/n sum_i a_i . b_{i+m}

with "." the product of numbers or the cross product, n the sequence's own length, and indices modulo n ("circular") or
without wrapping round, outputs 0 to n - 1 ("causal"). Each is the derivative of the other, so the operator is its own
backward, saves its inputs only, and can be differentiated any number of times. Its plain composition is one block of
it, all rows and channels at once.

Where n is a length that the FFT is fast at, a circular convolution is one at that length. Otherwise, and for sequences
of several lengths, it is a linear convolution at a fast length of which each sequence's tail is folded back at n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision import full_precision
from ..backend import refuse_forward_mode, use_plain

SAME_LENGTH_MODES = ("circular", "causal")
_BLOCK_NUMBERS = {"cpu": 1 << 22, "other": 1 << 26}  # numbers of one operand transformed at a time


def is_smooth(n: int) -> bool:
    """Whether an FFT of length n is fast: no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


def fast_length(n: int) -> int:
    """The smallest length from n on whose FFT is fast, even where that costs nothing (real transforms pair up); a
    multiple of 64 while compiling, where n may stand for any number and its factors cannot be asked for."""
    if torch.compiler.is_compiling():
        return (n + 63) // 64 * 64
    n = max(n + n % 2, 2)
    while not is_smooth(n):
        n += 2
    return n


def transform_length(length: int, ragged: bool, mode: str) -> int:
    """The length at which sequences of at most this length are transformed."""
    if mode == "circular" and not ragged and not torch.compiler.is_compiling() and is_smooth(length):
        return length
    return fast_length(2 * length)


def fold(raw: Tensor, length: int, lengths: Tensor | None, mode: str, correlate: bool) -> Tensor:
    """What was transformed (..., B, M) as outputs (..., B, length): tails folded back, zero beyond ``lengths`` (B,)."""
    total = raw.shape[-1]
    if total == length:
        return raw
    out = raw[..., :length]
    if lengths is None:
        if mode == "circular":
            out = out + (raw[..., total - length :] if correlate else raw[..., length : 2 * length])
        return out
    place = torch.arange(length, device=raw.device)
    if mode == "circular":
        tail = place + (total - lengths[:, None] if correlate else lengths[:, None])
        out = out + raw.gather(-1, tail.clamp(max=total - 1).expand_as(out))
    return out.masked_fill(place >= lengths[:, None], 0)


def _number_or_cross_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of numbers (1, ...) or the cross product (3, ...)."""
    if len(a) == 1:
        return a * b
    return torch.stack([torch.addcmul(a[x] * b[y], a[y], b[x], value=-1) for x, y in ((1, 2), (2, 0), (0, 1))])


def transform(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str) -> tuple[Tensor, Tensor, int]:
    """Spectra of sequences (..., B, N), the second divided by the length they are taken at, which comes third."""
    length = a.shape[-1]
    total = transform_length(length, lengths is not None, mode)
    if lengths is not None:
        beyond = torch.arange(length, device=a.device) >= lengths[:, None]
        a, b = a.masked_fill(beyond, 0), b.masked_fill(beyond, 0)
    return torch.fft.rfft(a, total), torch.fft.rfft(b, total, norm="forward"), total


def invert(
    spectrum: Tensor, total: int, length: int, lengths: Tensor | None, mode: str, correlate: bool = False
) -> Tensor:
    """A product of the two spectra as sequences (..., B, N), divided by their own lengths."""
    out = fold(torch.fft.irfft(spectrum, total), length, lengths, mode, correlate)
    if lengths is not None:
        return out * (total / lengths.clamp(min=1).to(out.dtype))[:, None]
    return out if total == length else out * (total / length)


def fft_convolution(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, backend: str = "auto") -> Tensor:
    """The convolution of a, b (1 or 3, C, B, N) of own lengths (B,), None where all are N; what lies beyond them is
    never looked at. There is no kernel of it: any backend but ``"plain"`` means the operator."""
    if use_plain(backend):
        with full_precision(a.device):
            return _convolve_block(a, b, lengths, mode, False) if a.numel() else torch.zeros_like(a)
    return _operator(a, b, lengths, mode, False)


def _convolve_block(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool) -> Tensor:
    x, y, total = transform(a, b, lengths, mode)
    product = _number_or_cross_product(x.conj().resolve_conj() if correlate else x, y)
    return invert(product, total, a.shape[-1], lengths, mode, correlate)


@torch.library.custom_op("tg_equiattn::fft_convolution", mutates_args=())
def _operator(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool) -> Tensor:
    refuse_forward_mode()
    components, channels, rows, length = a.shape
    if not a.numel():
        return torch.zeros_like(a, memory_format=torch.contiguous_format)
    with full_precision(a.device):
        per_row = components * transform_length(length, lengths is not None, mode)
        numbers = _BLOCK_NUMBERS.get(a.device.type, _BLOCK_NUMBERS["other"])
        step_rows = max(1, min(rows, numbers // per_row))
        step = max(1, numbers // (per_row * step_rows))
        if step_rows == rows and step >= channels:
            return _convolve_block(a, b, lengths, mode, correlate).contiguous()
        out = a.new_empty(a.shape)
        for r in range(0, rows, step_rows):
            own = None if lengths is None else lengths[r : r + step_rows]
            for c in range(0, channels, step):
                part = slice(None), slice(c, c + step), slice(r, r + step_rows)
                out[part] = _convolve_block(a[part], b[part], own, mode, correlate)
        return out


@_operator.register_fake
def _(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool) -> Tensor:
    return a.new_empty(a.shape)


def _save(ctx, inputs, output) -> None:
    a, b, lengths, ctx.mode, ctx.correlate = inputs
    ctx.save_for_backward(a, b, lengths)


def _gradient(ctx, grad: Tensor):
    a, b, lengths = ctx.saved_tensors
    sign = 1 if len(a) == 1 else -1  # a cross product changes sign with the order of its factors
    grad_a = grad_b = None
    if ctx.correlate:
        if ctx.needs_input_grad[0]:
            grad_a = sign * _operator(grad, b, lengths, ctx.mode, True)
        if ctx.needs_input_grad[1]:
            grad_b = _operator(grad, a, lengths, ctx.mode, False)
    else:
        if ctx.needs_input_grad[0]:
            grad_a = _operator(b, grad, lengths, ctx.mode, True)
        if ctx.needs_input_grad[1]:
            grad_b = sign * _operator(a, grad, lengths, ctx.mode, True)
    return grad_a, grad_b, None, None, None


_operator.register_autograd(_gradient, setup_context=_save)
