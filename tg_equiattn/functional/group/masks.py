"""Masked pixels, and the attention weights of chosen pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The score of a masked key. Finite, so that the weights of a masked query, whose window may hold no key at all, are
# numbers too.
MASKED_SCORE = -1e30


def fill_where_masked(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """Features (B, ..., *spatial) with a value in place of what masked pixels hold; ``mask`` is (B or 1, *spatial)."""
    if mask is None:
        return x
    return x.masked_fill(~mask.view(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:]), value)


def zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Features with zeros at masked pixels."""
    return fill_where_masked(x, mask, 0.0)


def attention_weights(
    attend: Callable[[Tensor], Tensor], value: Tensor, outputs: int, pixels: Sequence[Sequence[int]]
) -> Tensor:
    """The weights (B, pixels, heads, H, S, *spatial) that ``attend`` gives the values for the outputs of some pixels,
    as derivatives: it takes values (B, heads, channels, S, *spatial), like ``value`` but for channels, to outputs (B,
    heads, channels, H, *spatial), each channel by itself and linearly. Weights have gradients if recorded."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        shape = (*value.shape[:2], len(pixels) * outputs, *value.shape[3:])
        probe = torch.zeros(shape, dtype=value.dtype, device=value.device, requires_grad=True)
        out = attend(probe).unflatten(2, (-1, outputs)).diagonal(0, 3, 4)  # (B, heads, pixels, *spatial, H)
        chosen = [out[(slice(None), slice(None), n, *pixel)].sum() for n, pixel in enumerate(pixels)]
        (weights,) = torch.autograd.grad(torch.stack(chosen).sum(), probe, create_graph=recorded)
    return weights.unflatten(2, (-1, outputs)).transpose(1, 2)
