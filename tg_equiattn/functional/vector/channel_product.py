"""Linear maps of the channels of tokens, with fast gradients of weights for many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backend import use_plain

if TYPE_CHECKING:
    from jaxtyping import Float

MANY_TOKENS = 4096  # with at least so many tokens, an accelerator sums the gradients of weights in parts
_PARTS = 64  # number of these parts


def channel_product(
    weight: Float[Tensor, "batch out channels"],
    x: Float[Tensor, "batch channels tokens"],
    bias: Float[Tensor, "batch out 1"] | None = None,
) -> Float[Tensor, "batch out tokens"]:
    """``weight @ x + bias``.

    The gradient of the weights is a matrix product with few outputs, each a sum over all tokens. Libraries for
    accelerators compute each output of a batched product on one processor, and most of the others wait. On accelerators
    the sum over many tokens is therefore split into 64 parts, which run at the same time.
    """
    if x.device.type == "cpu" or x.shape[2] < MANY_TOKENS or use_plain():
        return _product(weight, x, bias)
    return _SummedInParts.apply(weight, x, bias)


def _product(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias, weight, x)


class _SummedInParts(torch.autograd.Function):
    """``weight @ x + bias`` with the gradient of the weights summed in parts."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, x)
        return _product(weight, x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, x = ctx.saved_tensors  # read once: torch.utils.checkpoint computes them for one reading
        dtype, weight, x = weight.dtype, weight.to(grad.dtype), x.to(grad.dtype)  # half precision under autocast
        to_weight, to_x, to_bias = ctx.needs_input_grad
        return (
            product_in_parts(grad, x).to(dtype) if to_weight else None,
            torch.bmm(weight.mT, grad).to(dtype) if to_x else None,
            grad.sum(2, keepdim=True).to(dtype) if to_bias else None,
        )


def product_in_parts(
    x: Float[Tensor, "batch rows tokens"], y: Float[Tensor, "batch columns tokens"], parts: int = _PARTS
) -> Float[Tensor, "batch rows columns"]:
    """``x @ y.mT`` as the sum of the products of ``parts`` equal parts of the tokens, and of those that are left."""
    size = x.shape[2] // parts
    first, second = (t[..., : size * parts].unflatten(2, (parts, size)).transpose(1, 2).flatten(0, 1) for t in (x, y))
    out = torch.bmm(first, second.mT).unflatten(0, (x.shape[0], parts)).sum(1)
    left = x.shape[2] - size * parts
    return out + torch.bmm(x[..., -left:], y[..., -left:].mT) if left else out
