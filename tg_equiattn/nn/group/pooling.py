"""Pooling over space and over the group, and symmetric crops."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ... import checks

_REDUCTIONS = ("max", "mean", "sum")


def _reduce(x: Tensor, how: str, axes: tuple[int, ...]) -> Tensor:
    if how == "max":
        return x.amax(axes)
    return x.mean(axes) if how == "mean" else x.sum(axes)


class GroupPooling(nn.Module):
    """Maximum, mean or sum over the group axis: regular features to ordinary (invariant) channels.

    Shapes:
        ``(B, C, |H|, *spatial)`` -> ``(B, C, *spatial)``.
    """

    def __init__(self, reduction: str = "max") -> None:
        super().__init__()
        checks.choice("reduction", reduction, _REDUCTIONS)
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(f"input must have shape (B, C, |H|, ...), got {tuple(x.shape)}")
        return _reduce(x, self.reduction, (2,))

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class GlobalPooling(nn.Module):
    """Pool over space and then over the group: an invariant vector, from images of any size.

    Shapes:
        ``(B, C, |H|, *spatial)`` -> ``(B, C)``.

    Source: GSA-Nets Fig. F.1, whose caption takes the maximum over the group first. The published code sums over space
    and then takes the maximum; that order is kept, with a mean, so that logits do not grow with the image.
    """

    def __init__(self, space: str = "mean", group: str = "max") -> None:
        super().__init__()
        checks.choice("space", space, _REDUCTIONS)
        self.space, self.group = space, GroupPooling(group)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 4:
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        return self.group(_reduce(x, self.space, tuple(range(3, x.ndim))))

    def extra_repr(self) -> str:
        return f"space={self.space!r}"


class SpatialMaxPool(nn.Module):
    """Maximum over blocks of ``kernel_size`` pixels a side, without overlap.

    Shapes:
        ``(B, C, |H|, *spatial)`` -> ``(B, C, |H|, *spatial / kernel_size)``.

    Raises:
        ValueError: if a side is not a multiple of ``kernel_size``: a last row left out would break the symmetry.
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        checks.positive(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        spatial = x.shape[3:]
        if len(spatial) not in (2, 3):
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if any(n % self.kernel_size for n in spatial):
            raise ValueError(
                f"input sides must be multiples of the pool's kernel_size={self.kernel_size} (a row left out at one "
                f"side would break the symmetry), got {tuple(spatial)}"
            )
        pool = F.max_pool2d if len(spatial) == 2 else F.max_pool3d
        pooled = pool(x.flatten(1, 2), self.kernel_size)
        return pooled.unflatten(1, x.shape[1:3])

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class SpatialCrop(nn.Module):
    """Remove ``margin`` pixels at every side.

    Shapes:
        ``(B, C, |H|, *spatial)`` -> ``(B, C, |H|, *spatial - 2 margin)``.

    Raises:
        ValueError: if nothing would be left.
    """

    def __init__(self, margin: int) -> None:
        super().__init__()
        if isinstance(margin, bool) or not isinstance(margin, int) or margin < 0:
            raise ValueError(f"margin must be a non-negative integer, got {margin!r}")
        self.margin = margin

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 4:
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if min(x.shape[3:]) <= 2 * self.margin:
            raise ValueError(f"input sides must exceed twice the crop margin={self.margin}, got {tuple(x.shape[3:])}")
        for axis in range(3, x.ndim):
            x = x.narrow(axis, self.margin, x.shape[axis] - 2 * self.margin)
        return x

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
