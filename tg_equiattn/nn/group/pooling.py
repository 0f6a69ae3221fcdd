"""Pooling over space and over the group, and symmetric crops."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ... import checks
from ...functional.group.masks import fill_where_masked, zero_where_masked
from ..modules import StoresSettings
from .linear import Masked

_REDUCTIONS: dict[str, Any] = {"max": Tensor.amax, "mean": Tensor.mean, "sum": Tensor.sum}


class GlobalPooling(Masked, StoresSettings):
    r"""Pooling over pixels and then over group elements, which gives invariant features from images of any size.

    .. math:: y_c = \max_h \, \mathrm{mean}_i \; x(c, h, i)

    This is the formula with the defaults. With a ``mask``, the reduction over pixels i includes the valid pixels only.
    The result of an image without valid pixels is zero.

    Args:
        space: Reduction over pixels i: ``"max"``, ``"mean"`` (the default) or ``"sum"``. ``None`` keeps pixels and
            reduces group elements only, which gives ordinary images.
        group: Reduction over group elements h: ``"max"`` (the default), ``"mean"`` or ``"sum"``.

    Shapes:
        ``(B, C, |H|, *spatial)`` -> ``(B, C)``, or ``(B, C, *spatial)`` with ``space=None``. The mask is bool ``(B or
        1, *spatial)``.

    Raises:
        ValueError: if ``space`` or ``group`` is not one of these names, or if the input or the mask has another shape.

    Source: GSA-Nets Fig. F.1, in the order of the published code (space, then group). The published code sums over
    pixels; our default is the mean.
    """

    def __init__(self, space: str | None = "mean", group: str = "max") -> None:
        super().__init__()
        if space is not None:
            checks.choice("space", space, _REDUCTIONS)
        checks.choice("group", group, _REDUCTIONS)
        self.space, self.group = space, group

    def settings(self) -> dict[str, Any]:
        return {"space": self.space, "group": self.group}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim < (3 if self.space is None else 4):
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        checks.pixel_mask(mask, x.shape[0], x.shape[3:], x.device)
        return _REDUCTIONS[self.group](self._over_space(x, mask), 2)

    def _over_space(self, x: Tensor, mask: Tensor | None) -> Tensor:
        axes = tuple(range(3, x.ndim))
        if self.space is None:
            return zero_where_masked(x, mask)
        if mask is None:
            return _REDUCTIONS[self.space](x, axes)
        if self.space == "max":
            pooled = fill_where_masked(x, mask, -math.inf).amax(axes)
            return pooled.masked_fill(~mask.flatten(1).any(1)[:, None, None], 0.0)
        pooled = zero_where_masked(x, mask).sum(axes)
        return pooled / mask.flatten(1).sum(1).clamp(min=1)[:, None, None] if self.space == "mean" else pooled

    def extra_repr(self) -> str:
        return f"space={self.space!r}, group={self.group!r}"


class SpatialMaxPool(Masked, nn.Module):
    """Max pooling over blocks of ``kernel_size`` pixels a side, without overlap. With a ``mask``, the maximum is taken
    over valid pixels.

    Raises:
        ValueError: if a side of the image is not a multiple of ``kernel_size``. Leaving out the last row would break
            the symmetry.
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        checks.positive(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of blocks that contain a valid pixel."""
        return self._pool(mask.float()[:, None])[:, 0] > 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        spatial = x.shape[3:]
        if len(spatial) not in (2, 3):
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if any(n % self.kernel_size for n in spatial):
            raise ValueError(
                f"input sides must be multiples of the pool's kernel_size={self.kernel_size}, got {tuple(spatial)}; "
                "change the size of the images, since leaving out a row at one side would break the symmetry"
            )
        checks.pixel_mask(mask, x.shape[0], spatial, x.device)
        pooled = self._pool(fill_where_masked(x, mask, -math.inf).flatten(1, 2)).unflatten(1, x.shape[1:3])
        return pooled if mask is None else zero_where_masked(pooled, self.mask_after(mask))

    def _pool(self, x: Tensor) -> Tensor:
        return (F.max_pool2d if x.ndim == 4 else F.max_pool3d)(x, self.kernel_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class SpatialCrop(Masked, nn.Module):
    """Crop that removes ``margin`` pixels at every side; raises ValueError if no pixel would be left."""

    def __init__(self, margin: int) -> None:
        super().__init__()
        if isinstance(margin, bool) or not isinstance(margin, int) or margin < 0:
            raise ValueError(f"crop must be a non-negative integer, got {margin!r}")
        self.margin = margin

    def mask_after(self, mask: Tensor) -> Tensor:
        return self._crop(mask, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim < 4:
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if min(x.shape[3:]) <= 2 * self.margin:
            raise ValueError(f"input sides must exceed twice the crop={self.margin}, got {tuple(x.shape[3:])}")
        checks.pixel_mask(mask, x.shape[0], x.shape[3:], x.device)
        x = self._crop(x, 3)
        return x if mask is None else zero_where_masked(x, self.mask_after(mask))

    def _crop(self, x: Tensor, first: int) -> Tensor:
        for axis in range(first, x.ndim):
            x = x.narrow(axis, self.margin, x.shape[axis] - 2 * self.margin)
        return x

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
