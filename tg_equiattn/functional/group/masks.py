"""Pixels that are not there."""

from __future__ import annotations

from torch import Tensor


def fill_where_hidden(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    """Features (B, ..., *spatial) with a value, not what was there, where a mask (B or 1, *spatial) has no pixel."""
    if mask is None:
        return x
    return x.masked_fill(~mask.view(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:]), value)


def zero_where_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Features with zeros where there is no pixel."""
    return fill_where_hidden(x, mask, 0.0)
