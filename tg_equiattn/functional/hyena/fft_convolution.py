r"""Long convolutions by FFT: of two sequences of scalars or vectors, and of sequences with filters of the lag.

    convolution   u_i = s sum_j a_j . b_{i-j}          correlation   w_m = s sum_i a_i . b_{i+m}

Here "." is the product of numbers or the cross product, and s is a factor that depends on the sequence's own length n.
Indices are taken modulo n ("circular"), or indices below zero are left out ("causal"). Gradients of a convolution are
correlations, and those of a correlation are convolutions and correlations: backward calls the function itself, and
saves the sequences, where autograd would save spectra. If the FFT is slow at length n, or if sequences have several
lengths, a circular convolution is computed as a linear one, and each sequence's tail is added back at its own n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...modes import full_precision, in_functorch_transform
from ..operators import tile_numbers
from ..tiles import is_whole
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
    out = raw.narrow(1, 0, length)
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
    return _convolve(a, b, lengths, counts, mode, False, norm)


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


def blocks(x: Float[Tensor, "rows tokens channels ..."], total: int) -> list[tuple[slice, slice]]:
    """Slices of sequences and channels that are transformed at a time, by FFTs of length ``total``."""
    count, channels, components = x.shape[0], x.shape[2], x[0, 0, 0].numel()
    numbers = tile_numbers(x.device, BLOCK_NUMBERS, 8)
    rows = max(1, min(count, numbers // (components * total)))
    step = max(1, numbers // (components * total * rows))
    return [(slice(r, r + rows), slice(c, c + step)) for r in range(0, count, rows) for c in range(0, channels, step)]


def _convolve(a: Tensor, b: Tensor, *arguments: Any) -> Tensor:
    plain = in_functorch_transform() or torch.jit.is_tracing()
    return _in_blocks(a, b, *arguments) if plain else _Convolution.apply(a, b, *arguments)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, lengths: Tensor | None, counts: Tensor | None, mode: str, correlate: bool,
        norm: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b, lengths, counts)
        ctx.settings = mode, correlate, norm
        return _in_blocks(a, b, lengths, counts, mode, correlate, norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b, *own = ctx.saved_tensors
        mode, correlate, norm = ctx.settings
        sign = -1 if a.ndim == 4 else 1  # a cross product changes its sign with the order of its factors
        to_a = (sign, grad, b, True) if correlate else (1, b, grad, True)
        to_b = (1, grad, a, False) if correlate else (sign, a, grad, True)
        # compilers differentiate once, and stop at functions that call themselves
        convolve: Callable[..., Tensor] = _in_blocks if torch.compiler.is_compiling() else _convolve
        found = [
            factor * convolve(x, y, *own, mode, back, norm) if wanted else None
            for wanted, (factor, x, y, back) in zip(ctx.needs_input_grad, (to_a, to_b), strict=False)
        ]
        return *found, None, None, None, None, None


def _in_blocks(
    a: Tensor, b: Tensor, lengths: Tensor | None, counts: Tensor | None, mode: str, correlate: bool, norm: str
) -> Tensor:
    with full_precision(a.device):
        if not a.numel():
            return torch.zeros_like(a)
        whole = is_whole(a) or in_functorch_transform()
        parts = [] if whole else blocks(a, transform_length(a.shape[1], lengths is not None, mode))
        if len(parts) < 2:
            return _convolve_block(a, b, lengths, counts, mode, correlate, norm)
        out = a.new_empty(a.shape[0], *a.shape[2:], a.shape[1]).movedim(-1, 1)  # tokens are the fastest axis
        for rows, channels in parts:
            part = rows, slice(None), channels
            own, own_counts = (None if x is None else x[rows] for x in (lengths, counts))
            out[part] = _convolve_block(a[part], b[part], own, own_counts, mode, correlate, norm)
        return out


def first_lag(length: int, causal: bool) -> int:
    """The first lag of a filter for sequences of a length: 1 - length, or 0 if ``causal``."""
    return 0 if causal else 1 - length


def lag_convolution(
    x: Float[Tensor, "rows tokens channels ..."], h: Float[Tensor, "lags channels"],
    lengths: Int[Tensor, " rows"] | None, first: int,
) -> Float[Tensor, "rows tokens channels ..."]:  # fmt: skip
    """Convolve sequences x of scalars or vectors, of own ``lengths``, with filters h, whose first lag is ``first``:
    y_i = sum_j h_{i-j} x_j. Each channel has a filter, which all sequences and all components of a vector share. Zeros
    around a sequence change nothing."""
    a = zero_beyond(x if x.ndim == 4 else x[..., None], lengths)
    y = _convolve_linearly(a, h[None, :, :, None], -first, x.shape[1], (False, True, False))
    return zero_beyond(y if x.ndim == 4 else y.squeeze(3), lengths)


def ring_convolution(
    x: Float[Tensor, "rows tokens channels ..."], h: Float[Tensor, "lags channels"],
    lengths: Int[Tensor, " rows"] | None, first: int,
) -> Float[Tensor, "rows tokens channels ..."]:  # fmt: skip
    """:func:`lag_convolution` of rings: y_i = sum_j h_l x_j with l = i - j modulo the own length n, in (-n/2, n/2]."""
    length = torch.full((1,), x.shape[1], device=x.device) if lengths is None else lengths
    place = torch.arange(x.shape[1], device=x.device)
    lag = torch.where(2 * place > length[:, None], place - length[:, None], place)
    filters = along(h[lag - first], x).expand_as(x).flatten(2)
    return fft_convolution(x.flatten(2), filters, lengths, "circular", "backward").view(x.shape)


def _convolve_linearly(a: Tensor, b: Tensor, *settings: Any) -> Tensor:
    """u_i = sum_j a_j b_{i-j} for ``length`` indices i from ``start`` on, of sequences (rows, tokens, channels,
    components). ``shared`` says which of a, b and u all rows and components share: a shared u is a sum over these."""
    plain = in_functorch_transform() or torch.jit.is_tracing()
    return _linear_in_blocks(a, b, *settings) if plain else _LinearConvolution.apply(a, b, *settings)


class _LinearConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, start: int, length: int, shared: tuple[bool, bool, bool]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.start, ctx.shared = start, shared
        return _linear_in_blocks(a, b, start, length, shared)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        one, other, both = ctx.shared
        convolve: Callable[..., Tensor] = _linear_in_blocks if torch.compiler.is_compiling() else _convolve_linearly
        found = [
            convolve(grad, y.flip(1), y.shape[1] - 1 - ctx.start, x.shape[1], shared) if wanted else None
            for wanted, x, y, shared in (
                (ctx.needs_input_grad[0], a, b, (both, other, one)), (ctx.needs_input_grad[1], b, a, (both, one, other))
            )
        ]  # fmt: skip
        return *found, None, None, None


def _linear_in_blocks(a: Tensor, b: Tensor, start: int, length: int, shared: tuple[bool, bool, bool]) -> Tensor:
    full = b if shared[0] else a
    total = fast_length(max(a.shape[1] + b.shape[1] - 1 - start, start + length, a.shape[1], b.shape[1]))

    def block(a: Tensor, b: Tensor) -> Tensor:
        product = torch.fft.rfft(_with_strides(a), total, dim=1) * torch.fft.rfft(_with_strides(b), total, dim=1)
        product = product.sum((0, 3), keepdim=True) if shared[2] else product
        return torch.fft.irfft(product, total, dim=1)[:, start : start + length]

    with full_precision(a.device):
        if not full.numel() or not length:
            return a.new_zeros(1 if shared[2] else full.shape[0], length, a.shape[2], 1 if shared[2] else full.shape[3])
        parts = [] if is_whole(full) or in_functorch_transform() else blocks(full, total)
        if len(parts) < 2:
            return block(a, b)
        out = a.new_zeros(1 if shared[2] else full.shape[0], length, a.shape[2], 1 if shared[2] else full.shape[3])
        for rows, channels in parts:
            some = [x[slice(None) if own else rows, :, channels] for x, own in zip((a, b), shared, strict=False)]
            out[slice(None) if shared[2] else rows, :, channels] += block(*some)
        return out
