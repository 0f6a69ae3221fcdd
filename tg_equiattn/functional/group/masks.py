"""Masked pixels, and the attention weights of chosen pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Score of a masked key. It is finite because minus infinity gives NaN for queries whose window has no valid key.
MASKED_SCORE = -1e30


def fill_where_masked(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to a value; ``mask`` is (B or 1, *spatial), true at valid
    pixels."""
    if mask is None:
        return x
    return x.masked_fill(~mask.view(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:]), value)


def zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to zero."""
    return fill_where_masked(x, mask, 0.0)


def attention_weights(
    attend: Callable[[Tensor], Tensor], value: Tensor, outputs: int, pixels: Sequence[Sequence[int]]
) -> Tensor:
    """Attention weights of chosen query pixels, (B, pixels, heads, H, S, *spatial).

    Outputs are linear in the values, so the weights are the derivatives of the outputs by the values. ``attend`` maps
    values (B, heads, channels, S, *spatial) to outputs (B, heads, channels, H, *spatial), each channel separately and
    linearly. ``value`` gives the sizes, dtype and device; its number of channels is not used. Weights can be
    differentiated if gradients are enabled.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        shape = (*value.shape[:2], len(pixels) * outputs, *value.shape[3:])
        probe = torch.zeros(shape, dtype=value.dtype, device=value.device, requires_grad=True)
        out = attend(probe).unflatten(2, (-1, outputs)).diagonal(0, 3, 4)  # (B, heads, pixels, *spatial, H)
        chosen = [out[(slice(None), slice(None), n, *pixel)].sum() for n, pixel in enumerate(pixels)]
        (weights,) = torch.autograd.grad(torch.stack(chosen).sum(), probe, create_graph=recorded)
    return weights.unflatten(2, (-1, outputs)).transpose(1, 2)
