r"""Long convolutions of a sequence with a data-dependent filter as long as itself, by FFT in O(N log N)."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from . import fourier_product

MODES = ("circular", "linear", "causal")


def scalar_long_conv(q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular") -> Tensor:
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
    _check(q, k, lengths, mode, 3)
    out = _long_conv(q.permute(2, 0, 1)[None], k.permute(2, 0, 1)[None], lengths, mode)
    return out[0].permute(1, 2, 0)


def vector_long_conv(q: Tensor, k: Tensor, lengths: Tensor | None = None, mode: str = "circular") -> Tensor:
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
    _check(q, k, lengths, mode, 4)
    if q.shape[-1] != 3:
        raise ValueError(f"q must hold vectors, 3 components on the last axis, got shape {tuple(q.shape)}")
    out = _long_conv(q.permute(3, 2, 0, 1), k.permute(3, 2, 0, 1), lengths, mode)
    return out.permute(2, 3, 1, 0)


def _check(q: Tensor, k: Tensor, lengths: Tensor | None, mode: str, axes: int) -> None:
    checks.choice("mode", mode, MODES)
    checks.alike(axes, q=q, k=k)
    checks.lengths(lengths, q.shape[0], q.shape[1], q.device)


def _long_conv(q: Tensor, k: Tensor, lengths: Tensor | None, mode: str) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if mode != "linear":
        return fourier_product.long_product(q, k, lengths, mode, False)
    length = q.shape[-1]
    if not length:
        return q * k
    if lengths is not None:
        there = torch.arange(length, device=q.device) < lengths[:, None]
        q, k = torch.where(there, q, 0.0), torch.where(there, k, 0.0)
    padding = 0, fourier_product.fast_length(2 * length - 1) - length
    q, k = torch.nn.functional.pad(q, padding), torch.nn.functional.pad(k, padding)
    out = fourier_product.long_product(q, k, None, "circular", False)[..., : 2 * length - 1] * q.shape[-1]
    if lengths is None:
        return out / length
    out = out / lengths.clamp(min=1).to(dtype)[:, None]
    return out.masked_fill(torch.arange(out.shape[-1], device=q.device) >= (2 * lengths - 1)[:, None], 0)
