"""Short convolutions along sequences: every token sees its neighbors, each channel by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...precision import full_precision

MODES = ("linear", "causal")


def short_conv(x: Tensor, weight: Tensor, lengths: Tensor | None = None, mode: str = "linear") -> Tensor:
    r"""Short convolution along sequences, with one weight a channel and tap.

    .. math:: y_i = \sum_{t=0}^{K-1} w_t\, x_{i+t-s}

    with s = (K - 1) / 2, the tap in the middle being the token's own (``"linear"``), or s = K - 1, the last tap
    (``"causal"``). Tokens beyond the ends of a sequence count as zero. Weights are numbers, so vectors stay vectors.

    Args:
        x: signal, of scalars or vectors.
        weight: K taps of every channel; K is odd.
        lengths: int64 ``(B,)``, the own length of each sequence; ``None`` means N. What lies beyond is never read, and
            is zero in the output.
        mode: ``"linear"`` or ``"causal"``.

    Shapes:
        ``(B, N, C)`` or ``(B, N, C, 3)``, and ``(C, K)``, to the shape of x.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Poli et al., Hyena Hierarchy (2023), section 3.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> short_conv(x, torch.tensor([[1.0, 0.0, 0.0]])).flatten()  # of the token before
        tensor([0., 1., 2.])
    """
    checks.choice("mode", mode, MODES)
    vectors = check_signal(x)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1] % 2:
        came = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must be ({x.shape[2]}, K) with K odd, got {came}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(f"weight must be {x.dtype} on {x.device} as x is, got {weight.dtype} on {weight.device}")
    checks.lengths(lengths, x.shape[0], x.shape[1], x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(dtype), weight.to(dtype)
    if vectors:
        return short_convolution(x.permute(3, 2, 0, 1), weight, lengths, mode).permute(2, 3, 1, 0)
    return short_convolution(x.permute(2, 0, 1), weight, lengths, mode).permute(1, 2, 0)


def check_signal(x: Tensor) -> bool:
    """Whether x holds vectors (B, N, C, 3) rather than scalars (B, N, C); ValueError for anything else."""
    vectors = isinstance(x, Tensor) and x.ndim == 4
    checks.alike(4 if vectors else 3, x=x)
    if vectors and x.shape[-1] != 3:
        raise ValueError(f"x must hold vectors, 3 components on the last axis, got shape {tuple(x.shape)}")
    return vectors


def short_convolution(x: Tensor, weight: Tensor, lengths: Tensor | None, mode: str) -> Tensor:
    """:func:`short_conv` of (..., C, B, N), by one multiplication and addition a tap."""
    length, taps = x.shape[-1], weight.shape[1]
    before = taps - 1 if mode == "causal" else taps // 2
    mask = None
    if lengths is not None:
        mask = torch.arange(length, device=x.device) < lengths[:, None]
        x = torch.where(mask, x, 0.0)
    with full_precision(x.device):
        padded = torch.nn.functional.pad(x, (before, taps - 1 - before))
        out = padded[..., :length] * weight[:, 0, None, None]
        for tap in range(1, taps):
            out = torch.addcmul(out, padded[..., tap : tap + length], weight[:, tap, None, None])
    return out if mask is None else torch.where(mask, out, 0.0)
