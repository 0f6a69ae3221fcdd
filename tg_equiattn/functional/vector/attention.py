"""Vector self-attention by cross products in O(N) memory. :mod:`.cross_product_attention` has the sums over keys, and
:mod:`.plain_attention` has the definition, which transforms use."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ..backend import OPERATOR, choose_form, refuse_forward_mode
from ..second_derivatives import register_derivatives
from .cross_product_attention import cross_product_attention, cross_product_attention_backward
from .matrices import gradient_of_matrix, outer, times, times_without_trace
from .plain_attention import plain_vector_attention, valid_tokens
from .second_derivatives import vector_second_derivatives


def vector_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
    r"""Self-attention of vector sequences by cross products, each channel by itself.

    .. math::
        S_{ij} = \mathrm{softmax}_j\!\left(\tfrac{1}{\sqrt n} \|q_i \times k_j\|\right) (q_i \times k_j), \qquad
        u_i = \frac{1}{n} \sum_j S_{ij} \times v_j

    Here n is the sequence's own length. Polar vectors give polar vectors. The output is computed as
    :math:`u_i = (T_i - \mathrm{tr}\,T_i)\, q_i / n` with :math:`T_i = \sum_j p_{ij}\, k_j v_j^\top` and the softmax p,
    without a matrix of size n x n. Lengths of cross products are computed as
    :math:`\|q \times k\|^2 = |q|^2 |k|^2 - (q \cdot k)^2`. If q and k are parallel to within the rounding of float32,
    scores are therefore accurate to 1e-3 of :math:`|q||k|` only.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        lengths: Own length of each sequence, int64 ``(B,)``. Tokens beyond it are not read, and are zero in the output.
            The default, ``None``, means N.

    Shapes:
        ``(B, N, C, 3)`` each -> ``(B, N, C, 3)``, in float32 for half precision.

    Raises:
        ValueError: if ``q``, ``k`` and ``v`` differ in shape, dtype or device or have another shape, or if ``lengths``
            is not of this shape or not in [0, N].

    Source: se3-hyena appendix B, Eq. 4-5. Its Code 2 computes something else: scores are divided by n / 2 instead of
    the root of n, and :math:`v_i` stands in place of :math:`v_j`, so that values do not mix.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 11, 4, 3)
        >>> rotation = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> rotated = vector_attention(q @ rotation, k @ rotation, v @ rotation)
        >>> torch.allclose(rotated, vector_attention(q, k, v) @ rotation, atol=1e-6)
        True
    """
    checks.alike(4, q=q, k=k, v=v)
    if q.shape[-1] != 3:
        raise ValueError(f"q must hold vectors, 3 components on the last axis, got shape {tuple(q.shape)}")
    checks.lengths(lengths, q.shape[0], q.shape[1], q.device)
    return vector_attention_impl(q, k, v, lengths)


def vector_attention_impl(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """:func:`vector_attention` without checks."""
    count, length, channels, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    valid = valid_tokens(lengths, length)
    if lengths is None or valid is None:
        sizes = torch.full((count,), length, dtype=dtype, device=q.device).clamp(min=1)
    else:
        valid = valid[..., None, None]
        q, k, v = (torch.where(valid, x, 0.0) for x in (q, k, v))
        sizes, lengths = lengths.to(dtype).clamp(min=1), lengths.repeat_interleave(channels)
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    scale = sizes.rsqrt().repeat_interleave(channels)
    if choose_form(q, q.shape[0] * length**2) == OPERATOR:
        out = _operator(q, k, v, lengths, scale)[0]
    else:
        out = plain_vector_attention(q, k, v, lengths, scale)
    out = (out.unflatten(0, (count, channels)) / sizes[:, None, None, None]).transpose(1, 2)
    return out if valid is None else out.masked_fill(~valid, 0)


@torch.library.custom_op("tg_equiattn::vector_attention", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs y (G, N, 3), matrices T (G, N, 9) and log-sum-exps (G, N) of q, k and v (G, N, 3) with scale (G,).

    q, k and v are zero beyond their own ``lengths`` (G,); ``None`` means that all lengths are N.
    """
    refuse_forward_mode()
    with full_precision(q.device):
        mixed, lse = cross_product_attention(q, k, outer(k, v).flatten(-2), valid_tokens(lengths, q.shape[1]), scale)
        return times_without_trace(mixed.unflatten(-1, (3, 3)), q).contiguous(), mixed, lse


@_operator.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*q.shape[:2], 9), q.new_empty(q.shape[:2])


@torch.library.custom_op("tg_equiattn::vector_attention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor, out: Tensor, mixed: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(q.device):
        shift = (grad * out).sum(-1, keepdim=True)
        grad_mixed = gradient_of_matrix(grad, q).flatten(-2)
        valid = valid_tokens(lengths, q.shape[1])
        grad_q, grad_k, grad_outer = cross_product_attention_backward(
            q, k, outer(k, v).flatten(-2), valid, scale, shift, lse, grad_mixed
        )
        grad_outer = grad_outer.unflatten(-1, (3, 3))
        grad_q += times_without_trace(mixed.unflatten(-1, (3, 3)).mT, grad)
        grad_k += times(grad_outer, v)
        return grad_q.contiguous(), grad_k.contiguous(), times(grad_outer.mT, k)


@_backward_operator.register_fake
def _(grad: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape), grad.new_empty(grad.shape)


def _second(operands, given, cotangents, lengths, scale) -> tuple[Tensor | None, ...]:
    """Second derivatives, in the form that :func:`.register_derivatives` asks for."""
    q, k, v = operands
    found = vector_second_derivatives(q, k, v, given[0], lengths, scale, cotangents)
    return *found, None, None, None


register_derivatives(_operator, _backward_operator, plain_vector_attention, 3, keep=True, outputs=1, second=_second)
