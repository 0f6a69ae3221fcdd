r"""Vector self-attention as PyTorch operators in O(N) memory: in torch, and fused in Triton.

    y_i = sum_j p_ij (q_i x k_j) x v_j,    p_ij = softmax_j( scale |q_i x k_j| )

In torch (q x k) x v = k (q.v) - q (k.v) makes it y = (T - tr T) q with T_i = sum_j p_ij k_j v_j^T, which is what
:mod:`.cross_product_attention` sums; what the fused operator does is told in :mod:`.triton_vector_attention`. Second
derivatives of both go through :mod:`.plain_vector_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision import full_precision
from ..backend import refuse_forward_mode
from .cross_product_attention import cross_product_attention, cross_product_attention_backward
from .plain_vector_attention import second_derivatives_by_queries, tokens_there


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """k v^T (G, N, 9) of vectors (G, N, 3)."""
    return (k[..., :, None] * v[..., None, :]).flatten(-2)


def _trace(x: Tensor) -> Tensor:
    """Of 3 x 3 matrices (G, N, 9), as (G, N, 1)."""
    return x[..., ::4].sum(-1, keepdim=True)


@torch.library.custom_op("tg_equiattn::vector_attention", mutates_args=())
def torch_vector_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y (3, G, N), T (G, N, 9) and log-sum-exps (G, N) of q, k, v (3, G, N), zero beyond their own lengths (G,), None
    where all are N, with scale (G,)."""
    refuse_forward_mode()
    with full_precision(q.device):
        q, k, v = (x.permute(1, 2, 0) for x in (q, k, v))
        mixed, lse = cross_product_attention(q, k, _outer(k, v), tokens_there(lengths, q.shape[1]), scale)
        out = (mixed.unflatten(-1, (3, 3)) * q[..., None, :]).sum(-1) - _trace(mixed) * q
        return out.permute(2, 0, 1).contiguous(), mixed, lse


@torch_vector_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*q.shape[1:], 9), q.new_empty(q.shape[1:])


@torch.library.custom_op("tg_equiattn::vector_attention_backward", mutates_args=())
def torch_vector_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor,
    out: Tensor, mixed: Tensor, lse: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(q.device):
        shift = (grad * out).sum(0)[..., None]
        q, k, v, grad = (x.permute(1, 2, 0) for x in (q, k, v, grad))
        towards = (grad * q).sum(-1, keepdim=True)
        grad_mixed = _outer(grad, q)
        grad_mixed[..., ::4] -= towards
        mask = tokens_there(lengths, q.shape[1])
        grad_q, grad_k, grad_outer = cross_product_attention_backward(
            q, k, _outer(k, v), mask, scale, shift, lse, grad_mixed
        )
        matrices, grad_outer = mixed.unflatten(-1, (3, 3)), grad_outer.unflatten(-1, (3, 3))
        grad_q += (matrices * grad[..., :, None]).sum(-2) - _trace(mixed) * grad
        grad_k += (grad_outer * v[..., None, :]).sum(-1)
        grad_v = (grad_outer * k[..., :, None]).sum(-2)
        return tuple(x.permute(2, 0, 1).contiguous() for x in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


@torch_vector_attention_backward.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _lengths(q: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.full((q.shape[1],), q.shape[2], device=q.device) if lengths is None else lengths


@torch.library.custom_op("tg_equiattn::fused_vector_attention", mutates_args=())
def fused_vector_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j p_ij (q_i x k_j) x v_j (3, G, N), and what backward needs (G, N)."""
    from . import triton_vector_attention as kernels  # here, as Triton may be missing

    refuse_forward_mode()
    return kernels.forward(q, k, v, _lengths(q, lengths), scale)


@fused_vector_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1:]), q.new_empty(q.shape[1:])


@torch.library.custom_op("tg_equiattn::fused_vector_attention_backward", mutates_args=())
def fused_vector_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: Tensor,
    out: Tensor, peaks: Tensor, totals: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from . import triton_vector_attention as kernels

    refuse_forward_mode()
    return kernels.backward(q, k, v, _lengths(q, lengths), scale, out, peaks, totals, grad)


@fused_vector_attention_backward.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _save_with_grad(ctx, inputs, output) -> None:
    *given, grad = inputs
    ctx.save_for_backward(*given[:5], grad)
    ctx.set_materialize_grads(False)


def _second_derivatives(ctx, *cotangents: Tensor | None):
    """Of a backward pass as a function of q, k, v and the output's gradient, of which what else it takes is made."""
    q, k, v, lengths, scale, grad = ctx.saved_tensors
    *grads, grad_grad = second_derivatives_by_queries(q, k, v, grad, lengths, scale, cotangents)
    return *grads, *[None] * (len(ctx.needs_input_grad) - 4), grad_grad


def _register(forward, backward) -> None:
    def gradient(ctx, grad: Tensor | None, *_: Tensor | None):
        if grad is None:
            return None, None, None, None, None
        return *backward(*ctx.saved_tensors, grad), None, None

    forward.register_autograd(gradient, setup_context=_save)
    backward.register_autograd(_second_derivatives, setup_context=_save_with_grad)


_register(torch_vector_attention, torch_vector_attention_backward)
_register(fused_vector_attention, fused_vector_attention_backward)
