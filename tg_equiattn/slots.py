"""Gathers of nodes into slots of padded rows, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .modes import in_functorch_transform

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Shaped


class Slots(NamedTuple):
    """An assignment of nodes to slots.

    Attributes:
        node: the node of each slot.
        filled: true for slots with a node; ``None`` if all have one.
        slot: the slot of each node.
        packed: true for nodes with a slot; ``None`` if all have one.
    """

    node: Int[Tensor, " slots"]
    filled: Bool[Tensor, " slots"] | None
    slot: Int[Tensor, " nodes"]
    packed: Bool[Tensor, " nodes"] | None

    @classmethod
    def of_order(cls, order: Int[Tensor, " nodes"]) -> Slots:
        """Slots that take node ``order[p]`` at position p."""
        return cls(order, None, inverse(order), None)

    def pack(self, x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> Shaped[Tensor, "*before slots *after"]:
        return _gather(x, dim, self.node, self.filled, self.slot, self.packed)

    def unpack(self, x: Shaped[Tensor, "*before slots *after"], dim: int = 0) -> Shaped[Tensor, "*before nodes *after"]:
        return _gather(x, dim, self.slot, self.packed, self.node, self.filled)


class _Gather(torch.autograd.Function):
    """x[index] along an axis, zero where ``mask`` is false; ``back`` and ``back_mask`` do the same for the inverse.

    Its backward is a gather, too. The backward of autograd would add rows one by one.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, dim: int, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(index, mask, back, back_mask)
        ctx.dim = dim
        if not x.shape[dim]:
            return x.new_zeros(*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
        out = x.contiguous().index_select(dim, index)  # takes longer from other layouts
        return out if mask is None else out.masked_fill_(beside(~mask, x, dim), 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, mask, back, back_mask = ctx.saved_tensors
        return _gather(grad, ctx.dim, back, back_mask, index, mask), *[None] * 5


def _gather(x: Tensor, dim: int, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None) -> Tensor:
    if not in_functorch_transform():
        return _Gather.apply(x, dim, index, mask, back, back_mask)
    if not x.shape[dim]:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])], dim)
    out = x.index_select(dim, index)
    return out if mask is None else torch.where(beside(mask, x, dim), out, 0.0)


def beside(flags: Shaped[Tensor, " nodes"], x: Shaped[Tensor, "*before nodes *after"], dim: int = 0) -> Tensor:
    """Flags with axes of size 1 appended, to broadcast with x, whose nodes are along an axis."""
    return flags.view(-1, *[1] * (x.ndim - 1 - dim))


def inverse(order: Int[Tensor, " nodes"]) -> Int[Tensor, " nodes"]:
    """The inverse of a permutation."""
    return torch.zeros_like(order).index_put((order,), torch.arange(order.shape[0], device=order.device))
