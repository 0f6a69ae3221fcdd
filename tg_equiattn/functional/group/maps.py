"""Attention weights of chosen pixels, from whatever weighs the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attention_weights(
    attend: Callable[[Tensor], Tensor], value: Tensor, outputs: int, pixels: Sequence[Sequence[int]]
) -> Tensor:
    """The weights (B, pixels, heads, H, S, *spatial) that ``attend`` gives the values for the outputs of some pixels.

    Outputs are linear in values, so their derivatives are the weights: each output of each pixel is asked of a channel
    of its own. Where gradients are recorded, the weights have them.

    Args:
        attend: values (B, heads, channels, S, *spatial) to outputs (B, heads, channels, H, *spatial), each channel by
            itself, for any number of channels.
        value: of this kind and shape but for channels.
        outputs: H.
        pixels: indices along the spatial axes.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        shape = (*value.shape[:2], len(pixels) * outputs, *value.shape[3:])
        probe = torch.zeros(shape, dtype=value.dtype, device=value.device, requires_grad=True)
        out = attend(probe).unflatten(2, (-1, outputs)).diagonal(0, 3, 4)  # (B, heads, pixels, *spatial, H)
        chosen = [out[(slice(None), slice(None), n, *place)].sum() for n, place in enumerate(pixels)]
        (weights,) = torch.autograd.grad(torch.stack(chosen).sum(), probe, create_graph=recorded)
    return weights.unflatten(2, (-1, outputs)).transpose(1, 2)
