r"""Long convolutions of a sequence with a data-dependent filter as long as itself, by FFT in O(N log N)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision
from ...sequences import token_blocks
from .fft_convolution import NORMS, fast_length, fft_convolution, invert, length_factor, transform

MODES = ("circular", "linear", "causal")
_BLOCK_PAIRS = {"cpu": 1 << 20, "other": 1 << 26}  # pairs of channels times frequencies of one block


def scalar_long_conv(
    q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular", norm: str = "forward"
) -> Tensor:
    r"""Long convolution of scalar sequences, each channel by itself.

    .. math:: u_i = \frac{1}{n} \sum_j q_j\, k_{i-j}

    with n the sequence's own length and indices modulo n (``"circular"``), all of the 2n - 1 values without wrapping
    round (``"linear"``), or the first n of these, which depend on the past only (``"causal"``).

    Args:
        q: signal.
        k: filter.
        lengths: int64 ``(B,)``, the own length of each sequence; ``None`` means N. What lies beyond is never read, and
            is zero in the output.
        mode: ``"circular"``, ``"linear"`` or ``"causal"``.
        norm: the factor, as of ``torch.fft``: 1 / n (``"forward"``, the paper's), :math:`1 / \sqrt n` (``"ortho"``),
            with which outputs of random tokens keep their size whatever n is, or 1 (``"backward"``).

    Shapes:
        ``(B, N, C)`` each -> ``(B, N, C)``; ``(B, 2N - 1, C)`` for ``"linear"``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena Eq. 1, divided by the length as its Code 1 does.

    Example:
        >>> import torch
        >>> q = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> scalar_long_conv(q, torch.tensor([0.0, 3.0, 0.0]).view(1, 3, 1)).flatten()  # shifted by one
        tensor([3., 1., 2.])
    """
    _check(q, k, lengths, mode, norm, 3)
    out = _by_component(q.permute(2, 0, 1)[None], k.permute(2, 0, 1)[None], lengths, mode, norm)
    return out[0].permute(1, 2, 0)


def vector_long_conv(
    q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular", norm: str = "forward"
) -> Tensor:
    r"""Long convolution of vector sequences by cross products, each channel by itself.

    .. math:: u_i = \frac{1}{n} \sum_j q_j \times k_{i-j}

    Rotating q and k rotates u; reflecting them does too, but for the sign: the cross product of polar vectors is an
    axial one. Nine real FFTs: three and three there, three back. Where q and k have one and the same direction
    throughout, u is zero.

    Args:
        q: signal.
        k: filter.
        lengths: int64 ``(B,)``, the own length n of each sequence; ``None`` means N. What lies beyond is never read,
            and is zero in the output.
        mode: indices modulo n (``"circular"``), all of the 2n - 1 values without wrapping round (``"linear"``), or the
            first n of these, which depend on the past only (``"causal"``).
        norm: as of :func:`scalar_long_conv`.

    Shapes:
        ``(B, N, C, 3)`` each -> ``(B, N, C, 3)``; ``(B, 2N - 1, C, 3)`` for ``"linear"``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena Eq. 2-3 and Code 1. Eq. 2 as printed, with :math:`q_i \times k_{j-i}`, would not mix the queries;
    the paper's code computes what is above.

    Example:
        >>> import torch
        >>> q, k = torch.zeros(2, 1, 5, 1, 3)
        >>> q[0, 1, 0, 0], k[0, 2, 0, 1] = 5.0, 1.0  # x at token 1, y at token 2
        >>> vector_long_conv(q, k)[0, 3, 0].round()  # z at token 3
        tensor([0., 0., 1.])
    """
    _check(q, k, lengths, mode, norm, 4)
    if q.shape[-1] != 3:
        raise ValueError(f"q must hold vectors, 3 components on the last axis, got shape {tuple(q.shape)}")
    out = _by_component(q.permute(3, 2, 0, 1), k.permute(3, 2, 0, 1), lengths, mode, norm)
    return out.permute(2, 3, 1, 0)


def bilinear_long_conv(
    q: Tensor,
    k: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    lengths: Tensor | None = None,
    mode: str = "circular",
    norm: str = "forward",
    *,
    block: int | None = None,
) -> Tensor:
    r"""Long convolution by any bilinear product of two features, a tensor product of irreps for one.

    .. math:: u_i = \frac{1}{n} \sum_j q_j \otimes k_{i-j}

    A bilinear product commutes with the Fourier transform, so it is evaluated at frequencies instead of pairs of
    tokens. With real and imaginary parts a + ib and c + id it is a x c - b x d + i ((a + b) x (c + d) - a x c - b x d):
    three evaluations a frequency. :func:`scalar_long_conv` and :func:`vector_long_conv` are the same with products of
    numbers and cross products, in an operator of their own, which keeps its inputs only and is its own backward.

    Args:
        q: signal.
        k: filter.
        product: maps ``(M, C)`` and ``(M, D)`` to ``(M, E)``, row by row, linear in both.
        lengths, mode, norm: as of :func:`scalar_long_conv`.
        block: how many frequencies the product is evaluated at at a time; backward computes blocks again. ``None``
            means as many as keep its pairs of channels in the cache (on a GPU, within 64 million).

    Shapes:
        ``(B, N, C)`` and ``(B, N, D)`` -> ``(B, N, E)``; ``(B, 2N - 1, E)`` for ``"linear"``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena section 3.2, beyond vectors.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 11, 3), torch.randn(2, 11, 3)
        >>> dot = bilinear_long_conv(q, k, lambda a, b: (a * b).sum(1, keepdim=True))
        >>> torch.allclose(dot, scalar_long_conv(q, k).sum(2, keepdim=True), atol=1e-6)
        True
    """
    _check(q, k, lengths, mode, norm, 3, alike=False)
    if block is not None:
        checks.positive(block=block)
    if not q.shape[0] * q.shape[1]:
        nothing = product(q.flatten(0, 1), k.flatten(0, 1))
        length = max(0, 2 * q.shape[1] - 1) if mode == "linear" else q.shape[1]
        return nothing.reshape(q.shape[0], length, nothing.shape[1])
    pairs = _BLOCK_PAIRS.get(q.device.type, _BLOCK_PAIRS["other"])
    block = max(64, pairs // max(1, q.shape[2] * k.shape[2])) if block is None else block

    def at_frequencies(*parts: Tensor) -> Tensor:
        a, b, c, d = (part.T for part in parts)
        first, last = product(a, c), product(b, d)
        both = product(a + b, c + d)
        return torch.cat([first - last, both - first - last], -1).T

    def convolve(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, norm: str) -> Tensor:
        x, y, total = transform(a, b, lengths, mode)
        parts = [part.flatten(1) for part in (x.real, x.imag, y.real, y.imag)]
        real, imaginary = token_blocks(at_frequencies, block, parts).unflatten(-1, x.shape[1:]).chunk(2)
        return invert(torch.complex(real, imaginary), total, a.shape[-1], lengths, mode, norm=norm)

    with full_precision(q.device):
        return _in_mode(convolve, q.permute(2, 0, 1), k.permute(2, 0, 1), lengths, mode, norm).permute(1, 2, 0)


def _check(q: Tensor, k: Tensor, lengths: Tensor | None, mode: str, norm: str, axes: int, alike: bool = True) -> None:
    checks.choice("mode", mode, MODES)
    checks.choice("norm", norm, NORMS)
    if alike:
        checks.alike(axes, q=q, k=k)
    else:
        checks.alike(axes, q=q)
        checks.alike(axes, k=k)
        if q.shape[:2] != k.shape[:2] or q.dtype != k.dtype or q.device != k.device:
            raise ValueError(
                f"k must be ({q.shape[0]}, {q.shape[1]}, D) of {q.dtype} on {q.device} as q is, got {tuple(k.shape)} "
                f"of {k.dtype} on {k.device}"
            )
    checks.lengths(lengths, q.shape[0], q.shape[1], q.device)


def _by_component(q: Tensor, k: Tensor, lengths: Tensor | None, mode: str, norm: str) -> Tensor:
    """Of numbers (1, C, B, N), or of vectors (3, C, B, N)."""

    def convolve(a: Tensor, b: Tensor, lengths: Tensor | None, mode: str, norm: str) -> Tensor:
        return fft_convolution(a, b, lengths, mode, norm=norm)

    return _in_mode(convolve, q, k, lengths, mode, norm)


def _in_mode(
    convolve: Callable[..., Tensor], q: Tensor, k: Tensor, lengths: Tensor | None, mode: str, norm: str
) -> Tensor:
    """A convolution of (..., B, N) that keeps the length, also where none wraps round and all of it is wanted."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    length = q.shape[-1]
    if mode != "linear" or not length:
        return convolve(q, k, lengths, mode, norm)
    if lengths is not None:
        mask = torch.arange(length, device=q.device) < lengths[:, None]
        q, k = torch.where(mask, q, 0.0), torch.where(mask, k, 0.0)
    padding = 0, fast_length(2 * length - 1) - length
    q, k = torch.nn.functional.pad(q, padding), torch.nn.functional.pad(k, padding)
    out = convolve(q, k, None, "circular", "backward")[..., : 2 * length - 1]
    if lengths is None:
        return out * length_factor(length, norm)
    out = out * length_factor(lengths.to(dtype), norm)[:, None]
    return out.masked_fill(torch.arange(out.shape[-1], device=q.device) >= (2 * lengths - 1)[:, None], 0)
