"""Gathers of nodes into slots of padded rows, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .modes import in_functorch_transform


class Slots(NamedTuple):
    """The ``node`` of each slot (S,), and which are ``filled``; the ``slot`` of each node (T,), and which are
    ``packed``. ``filled`` and ``packed`` are ``None`` if all are."""

    node: Tensor
    filled: Tensor | None
    slot: Tensor
    packed: Tensor | None

    @classmethod
    def of_order(cls, order: Tensor) -> Slots:
        """Slots that take node ``order[p]`` at position p."""
        return cls(order, None, inverse(order), None)

    def pack(self, x: Tensor) -> Tensor:
        return _gather(x, self.node, self.filled, self.slot, self.packed)

    def unpack(self, x: Tensor) -> Tensor:
        return _gather(x, self.slot, self.packed, self.node, self.filled)


class _Gather(torch.autograd.Function):
    """x[index], zero where ``mask`` is false; ``back`` and ``back_mask`` are those of the inverse.

    It has a backward of its own, a gather too: autograd's would add rows up one by one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, mask, back, back_mask)
        if not x.shape[0]:
            return x.new_zeros(index.shape[0], *x.shape[1:])
        out = x.index_select(0, index)
        return out if mask is None else out.masked_fill_(beside(~mask, x), 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, mask, back, back_mask = ctx.saved_tensors
        return _gather(grad, back, back_mask, index, mask), None, None, None, None


def _gather(x: Tensor, index: Tensor, mask: Tensor | None, back: Tensor, back_mask: Tensor | None) -> Tensor:
    if not in_functorch_transform():
        return _Gather.apply(x, index, mask, back, back_mask)
    if not x.shape[0]:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    out = x.index_select(0, index)
    return out if mask is None else torch.where(beside(mask, x), out, 0.0)


def beside(flags: Tensor, x: Tensor) -> Tensor:
    """(T,) with axes of size 1 appended, to broadcast with x (T, ...)."""
    return flags.view(-1, *[1] * (x.ndim - 1))


def nodes_of_rows(starts: Tensor, sizes: Tensor, length: int, nodes: int) -> tuple[Tensor, Tensor]:
    """The node of each slot of rows, flattened, and which slots have one, (rows, length); rows begin at ``starts``."""
    slot = torch.arange(length, device=starts.device)
    return (starts[:, None] + slot).clamp(max=max(nodes - 1, 0)).flatten(), slot < sizes[:, None]


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation (T,)."""
    return torch.zeros_like(order).index_put((order,), torch.arange(order.shape[0], device=order.device))
