r"""Long convolutions of a sequence with a data-dependent filter as long as itself, by FFT in O(N log N)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ..operators import tile_numbers
from ..tiles import map_tiles
from .fft_convolution import fft_convolution, invert, transform

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MODES = ("circular", "causal")
_BLOCK_PAIRS = 1 << 20  # pairs of channels times frequencies of one block on a CPU


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
    dtype = torch.promote_types(q.dtype, torch.float32)
    return fft_convolution(q.to(dtype), k.to(dtype), lengths, mode)


def bilinear_long_conv(
    q: Float[Tensor, "rows tokens left"],
    k: Float[Tensor, "rows tokens right"],
    product: Callable[[Tensor, Tensor], Tensor],
    lengths: Int[Tensor, " rows"] | None = None,
    mode: str = "circular",
    norm: str = "forward",
    counts: Int[Tensor, " rows"] | None = None,
    *,
    block: int | None = None,
) -> Float[Tensor, "rows tokens out"]:
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
        norm: name of the factor s, see :func:`.length_factor`.
        counts: numbers of tokens that s depends on; by default the own lengths.
        block: number of frequencies that are computed at a time. The default, ``None``, depends on the device.
    """
    if not q.shape[0] * q.shape[1]:
        nothing = product(q.flatten(0, 1), k.flatten(0, 1))
        return nothing.reshape(*q.shape[:2], nothing.shape[1])
    pairs = tile_numbers(q.device, _BLOCK_PAIRS, 8)
    block = max(64, pairs // max(1, q.shape[2] * k.shape[2])) if block is None else block
    with full_precision(q.device):
        x, y, total = transform(q, k, lengths, mode)
        parts = [part.flatten(0, 1) for part in (x.real, x.imag, y.real, y.imag)]
        real, imaginary = map_tiles(_at_frequencies, block, parts, product).unflatten(0, x.shape[:2]).chunk(2, -1)
        return invert(torch.complex(real, imaginary), total, q.shape[1], lengths, mode, norm=norm, counts=counts)


def _at_frequencies(a: Tensor, b: Tensor, c: Tensor, d: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    first, last = product(a, c), product(b, d)
    return torch.cat([first - last, product(a + b, c + d) - first - last], -1)
