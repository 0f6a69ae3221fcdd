"""Softmax attention of scalars along sequences, beside attention of vectors by cross products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ragged import node_blocks
from ..backend import tile_numbers, use_plain

_BLOCK_PAIRS = 1 << 20  # of a block on a CPU


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """Softmax attention of (B, N, C) of own lengths (B,), None where all are N; all channels are one head."""
    mask = None
    if lengths is not None:
        inside = torch.arange(q.shape[1], device=q.device) < lengths.clamp(min=1)[:, None]  # one key at least: no NaN
        q, k, v = (torch.where(inside[..., None], x, 0.0) for x in (q, k, v))
        mask = inside[:, None, None]
    q, k, v = (x[:, None].contiguous() for x in (q, k, v))  # as kernels in O(N) memory want them
    if use_plain():
        out = _plain_attention(q, k, v, mask)
    elif torch.compiler.is_compiling() or not torch.is_grad_enabled():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        out = _TorchAttention.apply(q, k, v, mask)
    return out[:, 0]


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Of (B, 1, N, C) with keys that exist (B, 1, 1, N), block of queries by block."""
    scale = max(1, q.shape[-1]) ** -0.5

    def of_queries(q: Tensor) -> Tensor:
        score = scale * (q.movedim(0, 2) @ k.mT)
        score = score if mask is None else score.masked_fill(~mask, torch.finfo(q.dtype).min)
        return (score.softmax(-1) @ v).movedim(2, 0)

    pairs = tile_numbers(q.device, _BLOCK_PAIRS, 4)
    step = max(1, pairs // max(1, q.shape[0] * q.shape[2]))
    return node_blocks(of_queries, step, (q.movedim(2, 0),)).movedim(0, 2)


class _TorchAttention(torch.autograd.Function):
    """torch's attention, whose fast kernels have no second derivatives: where they may be wanted, as gradients are
    being recorded in backward, those come from the plain formula."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        a, b, c = (x.detach().requires_grad_(wants) for x, wants in zip((q, k, v), needed, strict=True))
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(a, b, c, attn_mask=mask)
        ctx.save_for_backward(q, k, v, mask, a, b, c, out)
        return out.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, mask, *inside, out = ctx.saved_tensors
        recorded, needed = torch.is_grad_enabled(), ctx.needs_input_grad[:3]
        if recorded:
            a, b, c = inside = [x.view_as(x) for x in (q, k, v)]
            out = _plain_attention(a, b, c, mask)
        wanted = [x for x, wants in zip(inside, needed, strict=True) if wants]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=recorded, retain_graph=True))
        return *(next(found) if wants else None for wants in needed), None
