"""Softmax attention over all pairs of a row by torch's kernels, with second derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..modes import runs_eagerly
from .backend import tile_numbers, use_plain
from .tiles import map_tiles

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_BLOCK_PAIRS = 1 << 20  # pairs of a tile on a CPU


def softmax_attention(
    q: Float[Tensor, "rows nodes d"], k: Float[Tensor, "rows nodes d"], v: Float[Tensor, "rows nodes e"],
    mask: Bool[Tensor, "rows nodes"] | None,
) -> Float[Tensor, "rows nodes e"]:  # fmt: skip
    """Softmax attention within rows, with all channels as one head, over the keys that are true in ``mask``.

    ``mask=None`` means all keys. Outputs of a row without keys, and of queries outside the mask, are finite.
    """
    if mask is not None:
        q, k, v = (torch.where(mask[..., None], x, 0.0) for x in (q, k, v))
        mask = (mask | ~mask.any(1, keepdim=True))[:, None, None]  # a softmax over no keys would be NaN
    q, k, v = (x[:, None].contiguous() for x in (q, k, v))  # torch's kernels in O(N) memory need this layout
    if use_plain():
        out = _plain_attention(q, k, v, mask)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if torch.is_grad_enabled() and runs_eagerly():
            out = _SecondDerivatives.apply(out, q, k, v, mask)
    return out[:, 0]


def _plain_attention(
    q: Float[Tensor, "rows 1 nodes d"], k: Float[Tensor, "rows 1 nodes d"], v: Float[Tensor, "rows 1 nodes e"],
    mask: Bool[Tensor, "rows 1 1 nodes"] | None,
) -> Float[Tensor, "rows 1 nodes e"]:  # fmt: skip
    """The definition, with a mask of keys, in tiles of queries."""
    pairs = tile_numbers(q.device, _BLOCK_PAIRS, 4)
    step = max(1, pairs // max(1, q.shape[0] * q.shape[2]))
    return map_tiles(_of_queries, step, (q.movedim(2, 0),), k, v, mask).movedim(0, 2)


def _of_queries(
    q: Float[Tensor, "some rows 1 d"], k: Float[Tensor, "rows 1 nodes d"], v: Float[Tensor, "rows 1 nodes e"],
    mask: Bool[Tensor, "rows 1 1 nodes"] | None,
) -> Float[Tensor, "some rows 1 e"]:  # fmt: skip
    score = max(1, q.shape[-1]) ** -0.5 * (q.movedim(0, 2) @ k.mT)
    score = score if mask is None else score.masked_fill(~mask, torch.finfo(q.dtype).min)
    return (score.softmax(-1) @ v).movedim(2, 0)


class _SecondDerivatives(torch.autograd.Function):
    """The identity for the output of torch's attention, which chooses how its gradient is computed.

    torch's fast kernels have no second derivatives. In an ordinary backward pass, the gradient goes on through torch's
    attention. If gradients are being recorded in backward, it goes through the definition instead.
    """

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if not torch.is_grad_enabled():
            return grad, None, None, None, None
        q, k, v, mask = ctx.saved_tensors
        q, k, v = (x.view_as(x) for x in (q, k, v))
        needed = ctx.needs_input_grad[1:4]
        wanted = [x for x, wants in zip((q, k, v), needed, strict=True) if wants]
        found = iter(torch.autograd.grad(_plain_attention(q, k, v, mask), wanted, grad, create_graph=True))
        return None, *(next(found) if wants else None for wants in needed), None
