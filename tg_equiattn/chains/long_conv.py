r"""Long convolutions of sequences by FFT in O(N log N): of two sequences, and of a sequence with a filter of the lag.

    convolution   u_i = s sum_j a_j . b_{i-j}          correlation   w_m = s sum_i a_i . b_{i+m}

Here "." is the product of numbers or the cross product, and s is a factor that depends on the sequence's own length n.
Indices are taken modulo n ("circular"), or indices below zero are left out ("causal"). Gradients of a convolution are
correlations, and those of a correlation are convolutions and correlations: backward calls the function itself, and
saves the sequences, where autograd would save spectra. If the FFT is slow at length n, or if sequences have several
lengths, a circular convolution is computed as a linear one, and each sequence's tail is added back at its own n.

Inside, features come first and tokens last, (features, rows, tokens): scalars, and then vectors, with their components
outside of their channels. Sequences are zero beyond their own lengths, and results are not read there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import checks
from ..operators import tile_numbers
from ..tiles import joined, map_tiles
from ..torch_state import by_form, full_precision, is_traced, is_whole
from .clifford_algebra import cross_product

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

Length = TypeVar("Length", float, Tensor)
MODES = ("circular", "causal")
_TILE_NUMBERS = 1 << 22  # numbers of one operand that are transformed at a time on a CPU
_TILE_PAIRS = 1 << 20  # pairs of channels times frequencies of a tile on a CPU


def scalar_long_conv(q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular") -> Tensor:
    r"""Long convolution of scalar sequences, each channel by itself.

    .. math:: u_i = \frac{1}{n} \sum_j q_j\, k_{i-j}

    Here n is the sequence's own length.

    Args:
        q: Signal.
        k: Filter.
        lengths: Own length of each sequence, int64 ``(B,)``. Tokens beyond it are not read, and are zero in the output.
            The default, ``None``, means N.
        mode: ``"circular"``, the default, takes indices modulo n. ``"causal"`` does not wrap round, so that outputs
            depend on the past only.

    Shapes:
        ``(B, N, C)`` each -> ``(B, N, C)``, in float32 for half precision.

    Raises:
        ValueError: if ``q`` and ``k`` differ in shape, dtype or device or have another number of axes, if ``lengths``
            is not of this shape or not in [0, N], or if ``mode`` is unknown.

    Source: se3-hyena Eq. 1, divided by the length as its Code 1 does.

    Example:
        >>> import torch
        >>> q = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> scalar_long_conv(q, torch.tensor([0.0, 3.0, 0.0]).view(1, 3, 1)).flatten()  # shifted by one
        tensor([3., 1., 2.])
    """
    return _checked_convolution(q, k, lengths, mode, 3)


def vector_long_conv(q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular") -> Tensor:
    r"""Long convolution of vector sequences by cross products, each channel by itself.

    .. math:: u_i = \frac{1}{n} \sum_j q_j \times k_{i-j}

    Here n is the sequence's own length. If q and k are polar vectors, u is an axial vector. If all vectors are
    parallel, u is zero.

    Args:
        q: Signal.
        k: Filter.
        lengths: Own length of each sequence, int64 ``(B,)``. Tokens beyond it are not read, and are zero in the output.
            The default, ``None``, means N.
        mode: ``"circular"``, the default, takes indices modulo n. ``"causal"`` does not wrap round, so that outputs
            depend on the past only.

    Shapes:
        ``(B, N, C, 3)`` each -> ``(B, N, C, 3)``, in float32 for half precision.

    Raises:
        ValueError: if ``q`` and ``k`` differ in shape, dtype or device or have another shape, if ``lengths`` is not of
            this shape or not in [0, N], or if ``mode`` is unknown.

    Source: se3-hyena Eq. 2-3 and Code 1; Eq. 2 as printed, :math:`q_i \times k_{j-i}`, would not mix the queries.

    Example:
        >>> import torch
        >>> q, k = torch.zeros(2, 1, 5, 1, 3)
        >>> q[0, 1, 0, 0], k[0, 2, 0, 1] = 5.0, 1.0  # x at token 1, y at token 2
        >>> vector_long_conv(q, k)[0, 3, 0].round()  # z at token 3
        tensor([0., 0., 1.])
    """
    return _checked_convolution(q, k, lengths, mode, 4)


def _checked_convolution(q: Tensor, k: Tensor, lengths: Tensor | None, mode: str, axes: int) -> Tensor:
    checks.choice("mode", mode, MODES)
    checks.alike(axes, q=q, k=k)
    checks.lengths(lengths, q.shape[0], q.shape[1], q.device)
    if axes == 4 and q.shape[-1] != 3:
        raise ValueError(f"q must hold vectors, 3 components on the last axis, got shape {tuple(q.shape)}")
    dtype, scalars = torch.promote_types(q.dtype, torch.float32), q.shape[2] if axes == 3 else 0
    first = (2, 0, 1) if axes == 3 else (3, 2, 0, 1)
    q, k = (zero_beyond(x.to(dtype).permute(first), lengths).reshape(-1, *q.shape[:2]) for x in (q, k))
    out = zero_beyond(long_convolution(q, k, scalars, lengths, mode), lengths)
    return (out if axes == 3 else vectors_of(out, 0).transpose(0, 1)).movedim((-2, -1), (0, 1)).contiguous()


def long_convolution(
    a: Float[Tensor, "features rows tokens"], b: Float[Tensor, "features rows tokens"], scalars: int,
    lengths: Int[Tensor, " rows"] | None, mode: str, norm: str = "forward", counts: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "features rows tokens"]:  # fmt: skip
    """The convolution of sequences, times the :func:`length_factor` of their lengths, or of ``counts``. The first
    ``scalars`` features are scalars. ``lengths`` has the length of each sequence; ``None`` means that all tokens are
    valid."""
    plan = _Plan.of(a, lengths, mode)._replace(scalars=scalars)
    return _scaled(_convolve(a, b, lengths, plan), lengths, norm, counts)


def vectors_of(x: Float[Tensor, "features ..."], scalars: int) -> Float[Tensor, "3 channels ..."]:
    """The vectors of features that begin with ``scalars`` scalars."""
    return x[scalars:].view(
        3, (x.shape[0] - scalars) // 3, *x.shape[1:]
    )  # batched gradients have no flatten and no unflatten


def products(
    a: Float[Tensor, "features ..."], b: Float[Tensor, "features ..."], scalars: int
) -> Float[Tensor, "features ..."]:
    """Products of the first ``scalars`` features, and cross products of the others, which are components of vectors."""
    if scalars == a.shape[0]:
        return a * b
    cross = cross_product(vectors_of(a, scalars), vectors_of(b, scalars), 0).reshape(a.shape[0] - scalars, *a.shape[1:])
    return torch.cat([a[:scalars] * b[:scalars], cross]) if scalars else cross


def lag_convolution(
    x: Float[Tensor, "... channels rows tokens"], h: Float[Tensor, "channels lags"]
) -> Float[Tensor, "... channels rows tokens"]:
    """Convolve sequences x with filters h of the lags up to tokens - 1: y_i = sum_j h_{i-j} x_j. Each channel has a
    filter, which all sequences and all components of a vector share. Zeros around a sequence change nothing."""
    length = x.shape[-1]
    total = fast_length(2 * length)
    negative, positive = h.split([h.shape[1] - length, length], 1)
    h = torch.cat([positive, h.new_zeros(len(h), total - h.shape[1]), negative], 1)  # lags modulo total
    h = h.view(*[1] * (x.ndim - 3), -1, 1, total)
    return _convolve(x, h, None, _Plan(total, length, tuple(x.shape[:-1]), fold=False))


def ring_convolution(
    x: Float[Tensor, "... channels rows tokens"],
    h: Float[Tensor, "channels lags"],
    lengths: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "... channels rows tokens"]:
    """:func:`lag_convolution` of rings: y_i = sum_j h_l x_j with l = i - j modulo the own length n, in (-n/2, n/2]."""
    place = torch.arange(x.shape[-1], device=x.device)
    length = place.new_full((1, 1), x.shape[-1]) if lengths is None else lengths[:, None]
    lag = torch.where(2 * place > length, place - length, place)
    filters = zero_beyond(h[:, lag + h.shape[1] - x.shape[-1]], lengths).expand(x.shape)
    return _convolve(x, filters, lengths, _Plan.of(x, lengths, "circular"))


def bilinear_long_conv(
    q: Float[Tensor, "left rows tokens"], k: Float[Tensor, "right rows tokens"],
    product: Callable[[Tensor, Tensor], Tensor], lengths: Int[Tensor, " rows"] | None = None, mode: str = "circular",
    norm: str = "forward", counts: Int[Tensor, " rows"] | None = None, *, block: int | None = None,
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
        norm: name of the factor s, see :func:`length_factor`.
        counts: numbers of tokens that s depends on; by default the own lengths.
        block: number of frequencies that are computed at a time. The default, ``None``, depends on the device.
    """
    if not q.shape[1] * q.shape[2]:
        nothing = product(q.flatten(1).T, k.flatten(1).T)
        return nothing.T.unflatten(1, q.shape[1:])
    pairs = tile_numbers(q.device, _TILE_PAIRS, 8)
    block = max(64, pairs // max(1, q.shape[0] * k.shape[0])) if block is None else block
    with full_precision(q.device):
        plan = _Plan.of(q, lengths, mode)
        x, y = _spectrum(q, plan), _spectrum(k, plan)
        parts = [part.flatten(1).T.contiguous() for part in (x.real, x.imag, y.real, y.imag)]
        real, imaginary = map_tiles(_at_frequencies, block, parts, product).chunk(2, -1)
        out = _invert(torch.complex(real, imaginary).T.unflatten(1, x.shape[1:]), lengths, plan)
        return _scaled(out, lengths, norm, counts)


def _at_frequencies(a: Tensor, b: Tensor, c: Tensor, d: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    first, last = product(a, c), product(b, d)
    return torch.cat([first - last, product(a + b, c + d) - first - last], -1)


class _Plan(NamedTuple):
    """The settings of a convolution or correlation.

    Attributes:
        total: length of the FFTs.
        length: number of tokens of the result.
        lead: all other sizes of the result. Axes of size 1, along which a factor is larger, are summed over.
        fold: true if the tails of linear convolutions are added back.
        scalars: number of features that are scalars; others are components of vectors, which have cross products.
            ``None`` means that all are scalars, and that factors are broadcast.
        swap: true if cross products are b x a.
        correlate: true for a correlation.
    """

    total: int
    length: int
    lead: tuple[int, ...]
    fold: bool
    scalars: int | None = None
    swap: bool = False
    correlate: bool = False

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | None, mode: str) -> _Plan:
        """The plan for sequences x with these ``lengths``."""
        length = x.shape[-1]
        whole = mode == "circular" and lengths is None and not is_traced() and is_smooth(length)
        total = length if whole else fast_length(2 * length)
        return cls(total, length, tuple(x.shape[:-1]), mode == "circular" and not whole)

    def towards(self, x: Tensor, swap: bool, correlate: bool) -> _Plan:
        """The plan of the gradient of a factor x."""
        return self._replace(length=x.shape[-1], lead=tuple(x.shape[:-1]), swap=swap, correlate=correlate)


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


def length_factor(n: Length, norm: str) -> Length:
    """The factor 1 / n ("forward"), 1 / sqrt(n) ("ortho") or 1 ("backward") of lengths n. A length 0 counts as 1."""
    n = n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1)
    return n ** {"forward": -1.0, "ortho": -0.5, "backward": 0.0}[norm]


def _scaled(
    x: Float[Tensor, "... rows tokens"], lengths: Int[Tensor, " rows"] | None, norm: str,
    counts: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "... rows tokens"]:  # fmt: skip
    counts = lengths if counts is None else counts
    return x * (
        length_factor(x.shape[-1], norm) if counts is None else length_factor(counts.to(x.dtype), norm)[:, None]
    )


def zero_beyond(x: Float[Tensor, "... rows tokens"], lengths: Int[Tensor, " rows"] | None) -> Tensor:
    """Sequences with zeros beyond their own lengths, if given."""
    if lengths is None:
        return x
    return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths[:, None], 0)


def _spectrum(x: Float[Tensor, "... rows tokens"], plan: _Plan) -> Complex[Tensor, "... rows frequencies"]:
    # MKL's FFT in torch 2.8 refuses sequences that are expanded, as gradients of sums are
    return torch.fft.rfft(x if x.stride(-1) or x.shape[-1] < 2 else x.contiguous(), plan.total)


def _invert(
    spectrum: Complex[Tensor, "... rows frequencies"], lengths: Int[Tensor, " rows"] | None, plan: _Plan
) -> Float[Tensor, "... rows tokens"]:
    """Transform the product of two spectra back to sequences."""
    raw, total, length = torch.fft.irfft(spectrum, plan.total), plan.total, plan.length
    out = raw.narrow(-1, 0, length)
    if not plan.fold:
        return out
    if lengths is None:  # tails of correlations are at the end
        return out + raw.narrow(-1, total - length if plan.correlate else length, length)
    tail = torch.arange(length, device=raw.device) + (total - lengths if plan.correlate else lengths)[:, None]
    return out + raw.gather(-1, tail.clamp(max=total - 1).expand_as(out))


def _product_of_spectra(x: Tensor, y: Tensor, plan: _Plan) -> Tensor:
    def product(x: Tensor, y: Tensor) -> Tensor:
        if plan.scalars is None:
            return x * y
        return products(*((y, x) if plan.swap else (x, y)), plan.scalars)

    if not is_traced():
        return product(x.conj().resolve_conj() if plan.correlate else x, y)
    (a, b), (c, d) = (torch.view_as_real(spectrum).unbind(-1) for spectrum in (x, y))  # compilers fuse real ones only
    b = -b if plan.correlate else b
    return torch.view_as_complex(torch.stack([product(a, c) - product(b, d), product(a, d) + product(b, c)], -1))


def _in_tiles(a: Tensor, b: Tensor, lengths: Tensor | None, plan: _Plan) -> Tensor:
    """The convolution or correlation, some channels at a time."""
    if not a.numel() or not b.numel():
        return a.new_zeros(*plan.lead, plan.length)

    def convolve(a: Tensor, b: Tensor, scalars: int | None) -> Tensor:
        settings = plan._replace(scalars=scalars)
        product = _product_of_spectra(_spectrum(a, plan), _spectrum(b, plan), settings)
        axes = [n for n, size in enumerate(plan.lead) if size == 1 and product.shape[n] != 1]
        return _invert(product.sum(axes, keepdim=True) if axes else product, lengths, plan)

    with full_precision(a.device):
        numbers, scalars = tile_numbers(a.device, _TILE_NUMBERS, 8), plan.scalars
        if is_whole(a) or max(x.numel() // x.shape[-1] for x in (a, b)) * plan.total <= numbers:
            return convolve(a, b, scalars)
        step = max(1, numbers // (max(x[..., 0, :, 0].numel() for x in (a, b)) * plan.total))  # channels of a tile
        if scalars is None:
            tiles = zip(a.split(step, -3), b.split(step, -3), strict=True)
            return joined([convolve(x, y, None) for x, y in tiles], -3)
        tiles = zip(a[:scalars].split(step), b[:scalars].split(step), strict=True)
        out = [convolve(x, y, len(x)) for x, y in tiles] if scalars else []
        if scalars < len(a):
            tiles = zip(*(vectors_of(x, scalars).split(-(-step // 3), 1) for x in (a, b)), strict=True)
            rows = a.shape[1:-1]
            flat = [(x.reshape(-1, *rows, x.shape[-1]), y.reshape(-1, *rows, y.shape[-1])) for x, y in tiles]
            vectors = joined([vectors_of(convolve(x, y, 0), 0) for x, y in flat], 1)
            out.append(vectors.reshape(-1, *rows, plan.length))
        return joined(out)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, lengths: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(a, b, lengths)
        ctx.plan = plan
        return _in_tiles(a, b, lengths, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (a, b, lengths), plan, swap = ctx.saved_tensors, ctx.plan, ctx.plan.swap
        to_a = (grad, b, plan.towards(a, not swap, True)) if plan.correlate else (b, grad, plan.towards(a, swap, True))
        to_b = (grad, a, plan.towards(b, swap, False)) if plan.correlate else (a, grad, plan.towards(b, not swap, True))
        # compilers differentiate once, and stop at functions that call themselves
        convolve: Callable[..., Tensor] = _in_tiles if is_traced() else _convolve
        grads = [
            convolve(x, y, lengths, plan) if wanted else None
            for wanted, (x, y, plan) in zip(ctx.needs_input_grad, (to_a, to_b), strict=False)
        ]
        return *grads, None, None


_convolve = by_form(_in_tiles, _Convolution.apply, traced=True)
