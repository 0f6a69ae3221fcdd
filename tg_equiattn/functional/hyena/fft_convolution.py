r"""Long convolution and correlation of scalars or vectors as one PyTorch operator.

    convolution   u_i = s sum_j a_j . b_{i-j}          correlation   w_m = s sum_i a_i . b_{i+m}

Here "." is the product of numbers or the cross product, and s is a factor that depends on the sequence's own length n.
Indices are taken modulo n ("circular"), or indices below zero are left out ("causal"). Gradients of a convolution are
correlations, and those of a correlation are convolutions and correlations. If the FFT is slow at length n, or if
sequences have several lengths, a circular convolution is computed as a linear one, and each sequence's tail is added
back at its own n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import DEFINITION, FUSABLE, OPERATOR, choose_form, refuse_forward_mode, tile_numbers
from ..second_derivatives import register_derivatives
from ..vector.clifford import cross_product

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int, Shaped

Length = TypeVar("Length", float, Tensor)
BLOCK_NUMBERS = 1 << 22  # numbers of one operand that are transformed at a time on a CPU


def is_smooth(n: int) -> bool:
    """True if an FFT of length n is fast: n has no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


def fast_length(n: int) -> int:
    """The smallest even length of at least n whose FFT is fast. While compiling it is the next multiple of 64, since n
    may be a symbol, which has no factors."""
    if torch.compiler.is_compiling():
        return (n + 63) // 64 * 64
    n = max(n + n % 2, 2)
    while not is_smooth(n):
        n += 2
    return n


def transform_length(length: int, ragged: bool, mode: str) -> int:
    """The length of the FFTs of sequences of at most ``length`` tokens."""
    if mode == "circular" and not ragged and not torch.compiler.is_compiling() and is_smooth(length):
        return length
    return fast_length(2 * length)


def along(x: Shaped[Tensor, "rows ..."], like: Shaped[Tensor, "rows tokens ..."]) -> Shaped[Tensor, "rows ..."]:
    """Numbers of rows, or of tokens, with axes of size 1 appended, to broadcast with ``like``."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))


def zero_beyond(
    x: Float[Tensor, "rows tokens ..."], lengths: Int[Tensor, " rows"] | None
) -> Float[Tensor, "rows tokens ..."]:
    """Sequences with zeros beyond their own lengths, if given."""
    if lengths is None:
        return x
    return x.masked_fill(along(torch.arange(x.shape[1], device=x.device) >= lengths[:, None], x), 0)


def _with_strides(x: Tensor) -> Tensor:
    """x, copied if it is expanded along the sequence, as gradients of sums are: MKL's FFT in torch 2.8 refuses that."""
    return x if x.stride(1) or x.shape[1] < 2 else x.contiguous()


def transform(
    a: Float[Tensor, "rows tokens ..."], b: Float[Tensor, "rows tokens ..."], lengths: Int[Tensor, " rows"] | None,
    mode: str,
) -> tuple[Complex[Tensor, "rows frequencies ..."], Complex[Tensor, "rows frequencies ..."], int]:  # fmt: skip
    """The spectra of a and b, and the length of their FFTs. The spectrum of b is divided by this length."""
    total = transform_length(a.shape[1], lengths is not None, mode)
    a, b = (_with_strides(zero_beyond(x, lengths)) for x in (a, b))
    return torch.fft.rfft(a, total, dim=1), torch.fft.rfft(b, total, dim=1, norm="forward"), total


def invert(
    spectrum: Complex[Tensor, "rows frequencies ..."],
    total: int,
    length: int,
    lengths: Int[Tensor, " rows"] | None,
    mode: str,
    correlate: bool = False,
    norm: str = "forward",
    counts: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows tokens ..."]:
    """Transform the product of two spectra from :func:`transform` back to sequences.

    Args:
        spectrum: the product.
        total: length of the FFTs.
        length: length of the sequences.
        lengths: own length of each sequence; ``None`` if all have ``length`` tokens.
        mode: ``"circular"`` adds the tails of linear convolutions back; ``"causal"`` drops them.
        correlate: set it for correlations, whose tails are at the end.
        norm: name of the :func:`length_factor` that multiplies the result.
        counts: numbers of tokens that the factor depends on; by default the own lengths.
    """
    raw = torch.fft.irfft(spectrum, total, dim=1)
    out = raw[:, :length]
    if lengths is None and mode == "circular" and total > length:
        out = out + (raw[:, total - length :] if correlate else raw[:, length : 2 * length])
    elif lengths is not None and mode == "circular":
        tail = torch.arange(length, device=raw.device) + (total - lengths if correlate else lengths)[:, None]
        out = out + raw.gather(1, along(tail.clamp(max=total - 1), raw).expand_as(out))
    counts = lengths if counts is None else counts
    if counts is not None:
        return zero_beyond(out, lengths) * along(total * length_factor(counts.to(out.dtype), norm), out)
    return out if total == length and norm == "forward" else out * (total * length_factor(length, norm))


def length_factor(n: Length, norm: str) -> Length:
    """The factor 1 / n ("forward"), 1 / sqrt(n) ("ortho") or 1 ("backward") of lengths n. A length 0 counts as 1."""
    n = n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1)
    return n ** {"forward": -1.0, "ortho": -0.5, "backward": 0.0}[norm]


def fft_convolution(
    a: Float[Tensor, "rows tokens channels ..."], b: Float[Tensor, "rows tokens channels ..."],
    lengths: Int[Tensor, " rows"] | None, mode: str, norm: str = "forward", counts: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows tokens channels ..."]:  # fmt: skip
    """The convolution of sequences of scalars or vectors, times the :func:`length_factor` of their lengths, or of
    ``counts``.

    ``lengths`` are the own lengths of sequences; ``None`` means that all tokens are valid. Values beyond the own
    lengths are not read, and are zero in the output.
    """
    forms: dict[str, Callable[..., Tensor]] = {DEFINITION: _plain, OPERATOR: _operator, FUSABLE: _Convolution.apply}
    form = choose_form(a, 2 * a.numel(), few=True)  # spectra have twice the length
    return forms[form](a, b, lengths, counts, mode, False, norm)


def number_or_cross_product(a: Tensor, b: Tensor, vectors: bool, dim: int = -1) -> Tensor:
    """The product of numbers, or the cross product along an axis."""
    return cross_product(a, b, dim) if vectors else a * b


def _convolve_block(
    a: Tensor, b: Tensor, lengths: Tensor | None, counts: Tensor | None, mode: str, correlate: bool, norm: str
) -> Tensor:
    x, y, total = transform(a, b, lengths, mode)
    multiply = functools.partial(number_or_cross_product, vectors=a.ndim == 4, dim=-2)
    product = _product_of_spectra(x.movedim(1, -1), y.movedim(1, -1), correlate, multiply).movedim(-1, 1)
    return invert(product, total, a.shape[1], lengths, mode, correlate, norm, counts)


def _product_of_spectra(x: Tensor, y: Tensor, conjugate: bool, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A bilinear product of complex numbers. For a correlation, ``conjugate`` takes the conjugate of the first ones."""
    if not torch.compiler.is_compiling():
        return product(x.conj().resolve_conj() if conjugate else x, y)
    (a, b), (c, d) = (torch.view_as_real(spectrum).unbind(-1) for spectrum in (x, y))  # compilers fuse real ones only
    b = -b if conjugate else b
    return torch.view_as_complex(torch.stack([product(a, c) - product(b, d), product(a, d) + product(b, c)], -1))


def empty_sequences(x: Float[Tensor, "rows tokens ..."]) -> Float[Tensor, "rows tokens ..."]:
    """An empty tensor of the shape of x, in the memory layout of FFTs: tokens are the fastest axis."""
    return x.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def blocks(x: Float[Tensor, "rows tokens channels ..."], total: int) -> list[tuple[slice, slice]]:
    """Slices of sequences and channels that are transformed at a time, by FFTs of length ``total``."""
    count, channels, components = x.shape[0], x.shape[2], x[0, 0, 0].numel()
    numbers = tile_numbers(x.device, BLOCK_NUMBERS, 8)
    rows = max(1, min(count, numbers // (components * total)))
    step = max(1, numbers // (components * total * rows))
    return [(slice(r, r + rows), slice(c, c + step)) for r in range(0, count, rows) for c in range(0, channels, step)]


@torch.library.custom_op("tg_equiattn::fft_convolution", mutates_args=())
def _operator(
    a: Tensor, b: Tensor, lengths: Tensor | None, counts: Tensor | None, mode: str, correlate: bool, norm: str
) -> Tensor:
    refuse_forward_mode()
    if not a.numel():
        return empty_sequences(a)
    parts = blocks(a, transform_length(a.shape[1], lengths is not None, mode))
    with full_precision(a.device):
        if len(parts) == 1:
            out = _convolve_block(a, b, lengths, counts, mode, correlate, norm)
            return out.movedim(1, -1).contiguous().movedim(-1, 1)
        out = empty_sequences(a)
        for rows, channels in parts:
            part = rows, slice(None), channels
            own, own_counts = (None if x is None else x[rows] for x in (lengths, counts))
            out[part] = _convolve_block(a[part], b[part], own, own_counts, mode, correlate, norm)
    return out


@_operator.register_fake
def _(a: Tensor, *rest: object) -> Tensor:
    return empty_sequences(a)


def _gradient_of_first(
    grad, a, b, lengths, counts, mode, correlate, norm, convolve: Callable[..., Tensor] = _operator
) -> Tensor:
    """The gradient of a. A cross product changes sign with the order of its factors."""
    if not correlate:
        return convolve(b, grad, lengths, counts, mode, True, norm)
    return _sign(a) * convolve(grad, b, lengths, counts, mode, True, norm)


def _gradient_of_second(
    grad, a, b, lengths, counts, mode, correlate, norm, convolve: Callable[..., Tensor] = _operator
) -> Tensor:
    if correlate:
        return convolve(grad, a, lengths, counts, mode, False, norm)
    return _sign(a) * convolve(a, grad, lengths, counts, mode, True, norm)


def _sign(a: Tensor) -> int:
    return -1 if a.ndim == 4 else 1


def _plain(a: Tensor, *rest: Any) -> Tensor:
    """The convolution of all sequences in one block."""
    with full_precision(a.device):
        return _convolve_block(a, *rest) if a.numel() else torch.zeros_like(a)


register_derivatives(_operator, (_gradient_of_first, _gradient_of_second), _plain, 2)


class _Convolution(torch.autograd.Function):
    """The form for compilers: transforms stay library calls, other operations are fused.

    Its own backward saves the sequences; autograd would save the spectra, which are larger.
    """

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, lengths: Tensor | None, counts: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(a, b, lengths, counts)
        ctx.settings = settings
        return _plain(a, b, lengths, counts, *settings)

    @staticmethod
    def backward(ctx, grad: Tensor):
        given = grad, *ctx.saved_tensors, *ctx.settings, _convolve_block
        with full_precision(grad.device):
            needed = zip((_gradient_of_first, _gradient_of_second), ctx.needs_input_grad, strict=False)
            return *(gradient(*given) if wanted else None for gradient, wanted in needed), *[None] * 5
