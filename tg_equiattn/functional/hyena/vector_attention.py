r"""Vector self-attention by cross products, streamed in O(N) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ..backend import use_plain, use_triton
from .plain_vector_attention import plain_vector_attention, tokens_there
from .vector_attention_operators import fused_vector_attention, torch_vector_attention


def vector_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Self-attention of vector sequences by cross products, each channel by itself.

    .. math::
        S_{ij} = \mathrm{softmax}_j\!\left(\tfrac{1}{\sqrt n} \|q_i \times k_j\|\right) (q_i \times k_j), \qquad
        u_i = \frac{1}{n} \sum_j S_{ij} \times v_j

    with n the sequence's own length. As :math:`(q \times k) \times v = k\,(q \cdot v) - q\,(k \cdot v)`, all pairs
    enter through :math:`T_i = \sum_j p_{ij}\, k_j v_j^\top` alone, :math:`u_i = (T_i - \mathrm{tr}\,T_i)\, q_i / n`,
    and nothing of size n x n is kept, in backward neither. In torch lengths come from
    :math:`\|q \times k\|^2 = |q|^2 |k|^2 - (q \cdot k)^2`, so where q and k are parallel to within float32's rounding
    the scores are exact to 1e-3 of :math:`|q||k|` only; Triton's kernels form the products. Polar vectors give a polar
    vector.

    Args:
        q, k, v: query, key, value.
        lengths: int64 ``(B,)``, the own length n of each sequence; ``None`` means N. What lies beyond is never read,
            and is zero in the output.
        scale: what the lengths of cross products are multiplied with, in place of one over the root of n.
        backend: ``"torch"``, ``"triton"`` for a fused kernel (on a CUDA device, or in Triton's interpreter), or
            ``"auto"``, whichever was measured faster: torch, today; ``"plain"`` for the formula above, block by block,
            as operations of torch: what transforms and second derivatives go through.

    Shapes:
        ``(B, N, C, 3)`` each -> ``(B, N, C, 3)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena appendix B, Eq. 4-5. Its Code 2 computes something else: scores are divided by n / 2 instead of
    the root of n, and :math:`v_i` stands in place of :math:`v_j`, so that values do not mix.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 11, 4, 3)
        >>> turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> turned = vector_attention(q @ turn, k @ turn, v @ turn)
        >>> torch.allclose(turned, vector_attention(q, k, v) @ turn, atol=1e-6)
        True
    """
    checks.scale(scale)
    if scale is not None and scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    checks.alike(4, q=q, k=k, v=v)
    if q.shape[-1] != 3:
        raise ValueError(f"q must hold vectors, 3 components on the last axis, got shape {tuple(q.shape)}")
    checks.lengths(lengths, q.shape[0], q.shape[1], q.device)
    q, k, v = (x.permute(3, 2, 0, 1) for x in (q, k, v))
    return vector_attention_by_component(q, k, v, lengths, scale, backend).permute(2, 3, 1, 0)


def vector_attention_by_component(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`vector_attention` on (3, C, B, N)."""
    fused = use_triton(backend, q.device)
    channels, count, length = q.shape[1:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    there = tokens_there(lengths, length)
    if lengths is None or there is None:
        sizes = torch.full((count,), length, dtype=dtype, device=q.device).clamp(min=1)
    else:
        q, k, v = (torch.where(there, x, 0.0) for x in (q, k, v))
        sizes, lengths = lengths.to(dtype).clamp(min=1), lengths.repeat(channels)
    factor = sizes.rsqrt() if scale is None else torch.full_like(sizes, scale)
    q, k, v = (x.to(dtype).flatten(1, 2) for x in (q, k, v))
    factor = factor.repeat(channels)
    if use_plain(backend):
        out = plain_vector_attention(q, k, v, lengths, factor)
    else:
        out = (fused_vector_attention if fused else torch_vector_attention)(q, k, v, lengths, factor)[0]
    out = out.unflatten(1, (channels, count)) / sizes[:, None]
    return out if there is None else out.masked_fill(~there, 0)
