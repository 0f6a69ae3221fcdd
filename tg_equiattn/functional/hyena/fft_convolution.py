r"""Long convolution and correlation of scalars or vectors as one PyTorch operator.

    convolution   u_i = s sum_j a_j . b_{i-j}          correlation   w_m = s sum_i a_i . b_{i+m}

with "." the product of numbers or the cross product, s a factor of the sequence's own length n, and indices modulo n
("circular") or without wrapping round, outputs 0 to n - 1 ("causal"). Each is the derivative of the other. A circular
one at lengths the FFT is slow at, or at several, is a linear one of which each sequence's tail is folded back at n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import DEFINITION, FUSABLE, OPERATOR, choose_form, refuse_forward_mode, tile_numbers
from ..flops import flop_formula, real_ffts
from ..second_derivatives import register_derivatives

Length = TypeVar("Length", float, Tensor)
BLOCK_NUMBERS = 1 << 22  # numbers of one operand transformed at a time on a CPU


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


def along(x: Tensor, like: Tensor) -> Tensor:
    """(B,) or (B, N) to broadcast with (B, N, ...)."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))


def zero_beyond(x: Tensor, lengths: Tensor | None) -> Tensor:
    """(B, N, ...) with zeros beyond the own lengths (B,); None where all are N."""
    if lengths is None:
        return x
    return x.masked_fill(along(torch.arange(x.shape[1], device=x.device) >= lengths[:, None], x), 0)


def _with_strides(x: Tensor) -> Tensor:
    """Sequences whose values lie apart: MKL's FFT of torch 2.8 refuses expanded ones, as the gradients of a sum are."""
    return x if x.stride(1) or x.shape[1] < 2 else x.contiguous()


def transform(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str) -> tuple[Tensor, Tensor, int]:
    """Spectra of sequences (B, N, ...), the second divided by the length they are taken at, which comes third."""
    total = transform_length(a.shape[1], lengths is not None, mode)
    a, b = (_with_strides(zero_beyond(x, lengths)) for x in (a, b))
    return torch.fft.rfft(a, total, dim=1), torch.fft.rfft(b, total, dim=1, norm="forward"), total


def invert(
    spectrum: Tensor,
    total: int,
    length: int,
    lengths: Tensor | None,
    mode: str,
    correlate: bool = False,
    norm: str = "forward",
) -> Tensor:
    """A product of the two spectra as sequences (B, N, ...): tails folded back, zero beyond their own lengths, divided
    by what ``norm`` says of these."""
    raw = torch.fft.irfft(spectrum, total, dim=1)
    out = raw[:, :length]
    if lengths is None:
        if total > length and mode == "circular":
            out = out + (raw[:, total - length :] if correlate else raw[:, length : 2 * length])
        return out if total == length and norm == "forward" else out * (total * length_factor(length, norm))
    if mode == "circular":
        tail = torch.arange(length, device=raw.device) + (total - lengths if correlate else lengths)[:, None]
        out = out + raw.gather(1, along(tail.clamp(max=total - 1), raw).expand_as(out))
    return zero_beyond(out, lengths) * along(total * length_factor(lengths.to(out.dtype), norm), out)


def length_factor(n: Length, norm: str) -> Length:
    """1 / n ("forward"), 1 / sqrt(n) ("ortho") or 1 ("backward") for own lengths n, an empty one counting as one."""
    n = n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1)
    return n ** {"forward": -1.0, "ortho": -0.5, "backward": 0.0}[norm]


def fft_convolution(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, norm: str = "forward") -> Tensor:
    """The convolution of scalars (B, N, C) or vectors (B, N, C, 3) of own lengths (B,), None where all are N; what lies
    beyond them is never looked at."""
    forms = {DEFINITION: _plain, OPERATOR: _operator, FUSABLE: _Convolution.apply}
    return forms[choose_form(a, 2 * a.numel())](a, b, lengths, mode, False, norm)  # spectra have twice the length


def number_or_cross_product(a: Tensor, b: Tensor, vectors: bool) -> Tensor:
    """The product of numbers, or the cross product on the last axis."""
    if not vectors:
        return a * b
    u, v = a.unbind(-1), b.unbind(-1)
    return torch.stack([torch.addcmul(u[x] * v[y], u[y], v[x], value=-1) for x, y in ((1, 2), (2, 0), (0, 1))], -1)


def _convolve_block(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool, norm: str) -> Tensor:
    x, y, total = transform(a, b, lengths, mode)
    product = _product_of_spectra(x, y, correlate, functools.partial(number_or_cross_product, vectors=a.ndim == 4))
    return invert(product, total, a.shape[1], lengths, mode, correlate, norm)


def _product_of_spectra(x: Tensor, y: Tensor, conjugate: bool, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A product of complex numbers, of the first one's conjugate for a correlation."""
    if not torch.compiler.is_compiling():
        return product(x.conj().resolve_conj() if conjugate else x, y)
    (a, b), (c, d) = (torch.view_as_real(spectrum).unbind(-1) for spectrum in (x, y))  # compilers fuse real ones only
    b = -b if conjugate else b
    return torch.view_as_complex(torch.stack([product(a, c) - product(b, d), product(a, d) + product(b, c)], -1))


def blocks(x: Tensor, total: int) -> list[tuple[slice, slice]]:
    """Sequences and channels of (B, N, C, ...) to transform at a time at length ``total``."""
    count, channels, components = x.shape[0], x.shape[2], x[0, 0, 0].numel()
    numbers = tile_numbers(x.device, BLOCK_NUMBERS, 8)
    rows = max(1, min(count, numbers // (components * total)))
    step = max(1, numbers // (components * total * rows))
    return [(slice(r, r + rows), slice(c, c + step)) for r in range(0, count, rows) for c in range(0, channels, step)]


@torch.library.custom_op("tg_equiattn::fft_convolution", mutates_args=())
def _operator(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool, norm: str) -> Tensor:
    refuse_forward_mode()
    if not a.numel():
        return torch.zeros_like(a, memory_format=torch.contiguous_format)
    parts = blocks(a, transform_length(a.shape[1], lengths is not None, mode))
    with full_precision(a.device):
        if len(parts) == 1:
            return _convolve_block(a, b, lengths, mode, correlate, norm).contiguous()
        out = a.new_empty(a.shape)
        for rows, channels in parts:
            own, part = None if lengths is None else lengths[rows], (rows, slice(None), channels)
            out[part] = _convolve_block(a[part], b[part], own, mode, correlate, norm)
    return out


@_operator.register_fake
def _(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, correlate: bool, norm: str) -> Tensor:
    return a.new_empty(a.shape)


@flop_formula("fft_convolution")
def _(a, b, lengths, mode, correlate, norm, out_shape) -> int:
    """Two transforms, and one back."""
    if not a.numel():
        return 0
    return real_ffts(3 * a.numel() // a[1], transform_length(a[1], lengths is not None, mode))


def _gradient_of_first(
    grad, a, b, lengths, mode, correlate, norm, convolve: Callable[..., Tensor] = _operator
) -> Tensor:
    """A cross product changes sign with the order of its factors."""
    if not correlate:
        return convolve(b, grad, lengths, mode, True, norm)
    return _sign(a) * convolve(grad, b, lengths, mode, True, norm)


def _gradient_of_second(
    grad, a, b, lengths, mode, correlate, norm, convolve: Callable[..., Tensor] = _operator
) -> Tensor:
    if correlate:
        return convolve(grad, a, lengths, mode, False, norm)
    return _sign(a) * convolve(a, grad, lengths, mode, True, norm)


def _sign(a: Tensor) -> int:
    return -1 if a.ndim == 4 else 1


def _plain(a: Tensor, *rest: Any) -> Tensor:
    """The convolution of sequences of all in one block."""
    with full_precision(a.device):
        return _convolve_block(a, *rest) if a.numel() else torch.zeros_like(a)


register_derivatives(_operator, (_gradient_of_first, _gradient_of_second), _plain, 2)


class _Convolution(torch.autograd.Function):
    """The operator in operations that a compiler sees: transforms stay library calls, all else is fused.

    It has a backward of its own because autograd would keep the spectra, which are larger than the sequences.
    """

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, lengths: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(a, b, lengths)
        ctx.settings = settings
        return _plain(a, b, lengths, *settings)

    @staticmethod
    def backward(ctx, grad: Tensor):
        given = grad, *ctx.saved_tensors, *ctx.settings, _convolve_block
        with full_precision(grad.device):
            needed = zip((_gradient_of_first, _gradient_of_second), ctx.needs_input_grad, strict=False)
            return *(gradient(*given) if wanted else None for gradient, wanted in needed), *[None] * 4
