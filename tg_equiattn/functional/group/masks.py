"""Masked pixels, and the attention weights of chosen pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

# Score of a masked key. It is finite because minus infinity gives NaN for queries whose window has no valid key.
MASKED_SCORE = -1e30


def fill_where_masked(x: Tensor, mask: Bool[Tensor, "#B *spatial"] | None, value: float) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to a value; ``mask`` is true at valid pixels."""
    if mask is None:
        return x
    return x.masked_fill(~mask.view(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:]), value)


def zero_where_masked(x: Tensor, mask: Bool[Tensor, "#B *spatial"] | None) -> Tensor:
    """Set masked pixels of features (B, ..., *spatial) to zero."""
    return fill_where_masked(x, mask, 0.0)


def zero_without_keys(out: Tensor, lse: Float[Tensor, "B heads H T *spatial"]) -> Tensor:
    """Set outputs (B, ..., *spatial) of queries without a valid key to zero; ``lse`` are the log-sum-exps of scores.

    Such a query has the score :data:`MASKED_SCORE` for each key. Attention gives it an average of masked values, and
    its backward cannot tell how many there are. The fill removes both, so that outputs and gradients are zero. All
    heads and elements of a pixel have the same keys.
    """
    return zero_where_masked(out, lse[:, 0, 0, 0] > MASKED_SCORE / 2)


def attention_weights(
    attend: Callable[[Float[Tensor, "B heads C S *spatial"]], Float[Tensor, "B heads C H *query_spatial"]],
    value: Float[Tensor, "B heads _ S *spatial"], outputs: int, pixels: Sequence[Sequence[int]],
) -> Float[Tensor, "B pixels heads H S *spatial"]:  # fmt: skip
    """Attention weights of chosen query pixels.

    Outputs are linear in the values, so the weights are the derivatives of the outputs by the values. ``attend`` maps
    values to outputs, each channel separately and linearly. ``value`` gives the sizes, dtype and device; its number of
    channels is not used. Weights can be differentiated if gradients are enabled.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        shape = (*value.shape[:2], len(pixels) * outputs, *value.shape[3:])
        probe = torch.zeros(shape, dtype=value.dtype, device=value.device, requires_grad=True)
        out = attend(probe).unflatten(2, (-1, outputs)).diagonal(0, 3, 4)  # (B, heads, pixels, *spatial, H)
        chosen = [out[(slice(None), slice(None), n, *pixel)].sum() for n, pixel in enumerate(pixels)]
        (weights,) = torch.autograd.grad(torch.stack(chosen).sum(), probe, create_graph=recorded)
    return weights.unflatten(2, (-1, outputs)).transpose(1, 2)
