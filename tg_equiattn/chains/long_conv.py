r"""Long convolutions of sequences by FFT in O(N log N): of two sequences, and of a sequence with a filter of the lag.

    u_i = s sum_j a_j . b_{i-j}

Here "." is the product of numbers or the cross product, and s is a factor that depends on the sequence's own length n.
Indices are taken modulo n ("circular"), or indices below zero are left out ("causal"). Backward computes spectra again
and saves the sequences alone. If the FFT is slow at length n, or if sequences have several lengths, a circular
convolution is computed as a linear one, and each sequence's tail is added back at its own n.

Sequences are (..., channels, rows, tokens), and the components of vectors are the first axis. They are zero beyond
their own lengths, and results are not read there. Callers switch autocast off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import tile_numbers
from ..shapes import Complex, Float, Int
from ..tiles import joined, map_tiles
from ..torch_state import by_form, is_traced
from .clifford_algebra import cross_product

_TILE_NUMBERS = 1 << 22  # numbers of one operand that are transformed at a time on a CPU
_TILE_PAIRS = 1 << 20  # pairs of channels times frequencies of a tile on a CPU


def long_convolution(
    a: Float[Tensor, "features rows tokens"], b: Float[Tensor, "features rows tokens"], scalars: int,
    lengths: Int[Tensor, " rows"] | None, mode: str, norm: str = "forward", counts: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "features rows tokens"]:  # fmt: skip
    """The convolution of two sequences, divided by their lengths (:func:`_scaled`). The first
    ``scalars`` features are scalars, the others are vectors, with components outside of channels. ``lengths`` has the
    length of each sequence; ``None`` means that all tokens are valid."""
    plan = _Plan.of(a, lengths, mode)
    (f, v), (g, w) = split_features(a, scalars), split_features(b, scalars)
    parts = [_convolve(f, g, lengths, plan)] if scalars else []
    if v.shape[1]:
        parts.append(_convolve(v, w, lengths, plan._replace(cross=True)).flatten(0, 1))
    return _scaled(joined(parts), lengths, norm, counts)


def split_features(
    x: Float[Tensor, "features ..."], scalars: int
) -> tuple[Float[Tensor, "scalars ..."], Float[Tensor, "3 channels ..."]]:
    """The scalars, and the vectors with their components first."""
    first, rest = x.split_with_sizes([scalars, x.shape[0] - scalars])
    return first, rest.view(3, rest.shape[0] // 3, *x.shape[1:])  # batched gradients have no unflatten


def lag_convolution(
    x: Float[Tensor, "... channels rows tokens"], h: Float[Tensor, "channels lags"]
) -> Float[Tensor, "... channels rows tokens"]:
    """Convolve sequences x with filters h of the lags up to tokens - 1: y_i = sum_j h_{i-j} x_j. Each channel has a
    filter, which all sequences and all components of a vector share. Zeros around a sequence change nothing."""
    length = x.shape[-1]
    total = fast_length(2 * length)
    negative, positive = h.split([h.shape[1] - length, length], 1)
    h = torch.cat([positive, h.new_zeros(len(h), total - h.shape[1]), negative], 1)  # lags modulo total
    return _convolve(x, h[:, None], None, _Plan(total, length, fold=False))


def ring_convolution(
    x: Float[Tensor, "... channels rows tokens"], h: Float[Tensor, "channels lags"],
    lengths: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "... channels rows tokens"]:  # fmt: skip
    """:func:`lag_convolution` of rings: y_i = sum_j h_l x_j with l = i - j modulo the own length n, in (-n/2, n/2]."""
    place = torch.arange(x.shape[-1], device=x.device)
    length = place.new_full((1, 1), x.shape[-1]) if lengths is None else lengths[:, None]
    lag = torch.where(2 * place > length, place - length, place)
    filters = zero_beyond(h[:, lag + h.shape[1] - x.shape[-1]], lengths)
    return _convolve(x, filters, lengths, _Plan.of(x, lengths, "circular"))


def bilinear_long_conv(
    q: Float[Tensor, "left rows tokens"], k: Float[Tensor, "right rows tokens"],
    product: Callable[[Tensor, Tensor], Tensor], lengths: Int[Tensor, " rows"] | None = None, mode: str = "circular",
    norm: str = "forward", counts: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "out rows tokens"]:  # fmt: skip
    """Long convolution u_i = s sum_j q_j x k_{i-j} with any bilinear product x.

    At each frequency the product is evaluated three times: (a + ib) x (c + id) = a x c - b x d + i ((a + b) x (c + d)
    - a x c - b x d).

    Args:
        q: signal.
        k: filter.
        product: module or function of a module file: takes rows (M, left) and (M, right), returns their products
            (M, out).
        lengths: own length of each sequence; ``None`` means all tokens.
        mode: ``"circular"`` or ``"causal"``.
        norm: ``"forward"`` divides by the length, ``"ortho"`` by its root.
        counts: numbers of tokens to divide by instead; by default the own lengths.
    """
    if not q.shape[1] * q.shape[2]:
        nothing = product(q.flatten(1).T, k.flatten(1).T)
        return nothing.T.unflatten(1, q.shape[1:])
    step = max(64, tile_numbers(q.device, _TILE_PAIRS, 8) // max(1, q.shape[0] * k.shape[0]))
    plan = _Plan.of(q, lengths, mode)
    # MKL's FFT in torch 2.8 refuses sequences that are expanded
    x, y = torch.fft.rfft(q.contiguous(), plan.total), torch.fft.rfft(k.contiguous(), plan.total)
    parts = [part.flatten(1).T.contiguous() for part in (x.real, x.imag, y.real, y.imag)]
    real, imaginary = map_tiles(_at_frequencies, step, parts, product).chunk(2, -1)
    out = _invert(torch.complex(real, imaginary).T.unflatten(1, x.shape[1:]), lengths, plan)
    return _scaled(out, lengths, norm, counts)


def _at_frequencies(a: Tensor, b: Tensor, c: Tensor, d: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    first, last = product(a, c), product(b, d)
    return torch.cat([first - last, product(a + b, c + d) - first - last], -1)


class _Plan(NamedTuple):
    """The settings of a convolution.

    Attributes:
        total: length of the FFTs.
        length: number of tokens of the result.
        fold: true if the tails of linear convolutions are added back.
        cross: true for cross products of vectors.
    """

    total: int
    length: int
    fold: bool
    cross: bool = False

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | None, mode: str) -> _Plan:
        """The plan for sequences x with these ``lengths``."""
        length = x.shape[-1]
        whole = mode == "circular" and lengths is None and not is_traced() and is_smooth(length)
        return cls(length if whole else fast_length(2 * length), length, mode == "circular" and not whole)


def is_smooth(n: int) -> bool:
    """True if an FFT of length n is fast: n has no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while n and n % prime == 0:
            n //= prime
    return n == 1


def fast_length(n: int) -> int:
    """The smallest even length of at least n whose FFT is fast. While compiling it is the next multiple of 64, since n
    may be a symbol, which has no factors."""
    if is_traced():
        return (n + 63) // 64 * 64
    n = max(n + n % 2, 2)
    while not is_smooth(n):
        n += 2
    return n


def _scaled(
    x: Float[Tensor, "... rows tokens"], lengths: Int[Tensor, " rows"] | None, norm: str,
    counts: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "... rows tokens"]:  # fmt: skip
    """Divide sequences by their length ("forward") or its root ("ortho"), or by those of ``counts``."""
    counts, power = lengths if counts is None else counts, {"forward": -1.0, "ortho": -0.5}[norm]
    if counts is None:
        return x * max(x.shape[-1], 1) ** power
    return x * counts.clamp(min=1).to(x.dtype)[:, None] ** power


def zero_beyond(x: Float[Tensor, "... rows tokens"], lengths: Int[Tensor, " rows"] | None) -> Tensor:
    """Sequences with zeros beyond their own lengths, if given."""
    if lengths is None:
        return x
    return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths[:, None], 0)


def _invert(
    spectrum: Complex[Tensor, "... rows frequencies"], lengths: Int[Tensor, " rows"] | None, plan: _Plan
) -> Float[Tensor, "... rows tokens"]:
    """Transform the product of two spectra back to sequences."""
    raw, total, length = torch.fft.irfft(spectrum, plan.total), plan.total, plan.length
    out = raw.narrow(-1, 0, length)
    if not plan.fold:
        return out
    if lengths is None:
        return out + raw.narrow(-1, length, length)
    tail = torch.arange(length, device=raw.device) + lengths[:, None]
    return out + raw.gather(-1, tail.clamp(max=total - 1).expand_as(out))


def _multiplied(x: Tensor, y: Tensor, cross: bool) -> Tensor:
    """Products of spectra."""
    if not is_traced():
        return cross_product(x, y, 0) if cross else x * y
    (a, b), (c, d) = (torch.view_as_real(spectrum).unbind(-1) for spectrum in (x, y))  # compilers fuse real ones only
    ac, bd, ad, bc = (cross_product(*z, 0) if cross else z[0] * z[1] for z in ((a, c), (b, d), (a, d), (b, c)))
    return torch.view_as_complex(torch.stack([ac - bd, ad + bc], -1))


def _of_channels(a: Tensor, b: Tensor, lengths: Tensor | None, plan: _Plan) -> Tensor:
    product = _multiplied(torch.fft.rfft(a, plan.total), torch.fft.rfft(b, plan.total), plan.cross)
    return _invert(product, lengths, plan)


class _Convolution(torch.autograd.Function):
    """:func:`_of_channels` with real transforms in backward. Torch's own derivative of ``rfft`` is a complex transform
    of twice the time, and would save spectra."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, lengths: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(a, b, lengths)
        ctx.plan = plan
        return _of_channels(a, b, lengths, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (a, b, lengths), (total, length, fold, cross) = ctx.saved_tensors, ctx.plan
        raw = grad.contiguous()  # MKL's FFT in torch 2.8 refuses sequences that are expanded, as gradients of sums are
        if fold and lengths is None:
            raw = torch.cat([raw, raw], -1)
        elif fold:
            tail = (torch.arange(length, device=raw.device) + lengths[:, None]).clamp(max=total - 1)
            raw = F.pad(raw, (0, total - length)).scatter_add(-1, tail.expand_as(raw), raw)
        raw = torch.fft.rfft(raw, total)

        def gradient(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            product = _multiplied(first, second, cross)
            product = product.sum_to_size(*x.shape[:-1], product.shape[-1])
            return torch.fft.irfft(product, total).narrow(-1, 0, x.shape[-1])

        to_a, to_b, *_ = ctx.needs_input_grad
        x, y = (torch.fft.rfft(z, total).conj().resolve_conj() for z in (a, b))
        return gradient(a, y, raw) if to_a else None, gradient(b, raw, x) if to_b else None, None, None


def _convolve(
    a: Float[Tensor, "... channels rows tokens"], b: Float[Tensor, "... channels rows tokens"],
    lengths: Int[Tensor, " rows"] | None, plan: _Plan,
) -> Float[Tensor, "... channels rows tokens"]:  # fmt: skip
    """The convolution of a and b, which is broadcast to a, some channels at a time."""
    if not a.numel():
        return torch.zeros_like(a)
    convolve = _derived if torch.is_grad_enabled() else _of_channels
    channels = a.shape[-3]
    if not is_traced(a):
        channels = max(1, tile_numbers(a.device, _TILE_NUMBERS, 8) // (a[..., 0, :, 0].numel() * plan.total))
    if channels >= a.shape[-3]:
        return convolve(a, b, lengths, plan)
    tiles = zip(a.split(channels, -3), b.split(channels, -3), strict=True)
    return joined([convolve(x, y, lengths, plan) for x, y in tiles], -3)


_derived = by_form(_of_channels, _Convolution.apply, traced=True)
