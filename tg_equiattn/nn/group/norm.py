"""Normalisation of regular features."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import checks
from ...functional.group.masks import zero_where_masked
from ..modules import StoresSettings
from .linear import Masked, columns


def _checked(x: Tensor, mask: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
    """Check input and mask. Return the features with zeros at masked pixels, and the same in at least float32."""
    if x.ndim < 2 or x.shape[1] != channels:
        raise ValueError(f"input must have shape (B, {channels}, ...), got {tuple(x.shape)}")
    checks.half_precision(input=x)
    checks.pixel_mask(mask, x.shape[0], x.shape[3:], x.device)
    x = zero_where_masked(x, mask)
    return x, x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _moments(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over the given axes of the valid pixels of features (B, C, ..., *spatial). Masked pixels
    must be zero."""
    count = zero_where_masked(torch.ones_like(x), mask).sum(axes, keepdim=True)
    mean = x.sum(axes, keepdim=True) / count.clamp(min=1)
    squares = zero_where_masked(x - mean, mask).square().sum(axes, keepdim=True)
    return mean, squares / count.clamp(min=1), count


def _scaled(centred: Tensor, variance: Tensor, norm: nn.Module, like: Tensor, mask: Tensor | None) -> Tensor:
    """Divide centred features by their standard deviation and apply the norm's learned weight and bias, if it has them.
    The result has the dtype of ``like`` and zeros at masked pixels."""
    out = centred * (variance + cast(float, norm.eps)).rsqrt()
    if norm.weight is not None:
        weight, bias = (cast(Tensor, t).view(-1, *[1] * (out.ndim - 2)) for t in (norm.weight, norm.bias))
        out = out * weight + bias
    return zero_where_masked(out.to(like.dtype), mask)


@checks.python_numbers
class RegularGlobalNorm(Masked, StoresSettings, nn.GroupNorm):
    r"""Normalisation by one mean and variance of each image, over channels, group elements and pixels.

    .. math:: y = \gamma_c\,(x - \mathrm{mean}\,x) / \sqrt{\mathrm{var}\,x + \epsilon} + \beta_c

    The weight :math:`\gamma` and bias :math:`\beta` of each channel are learned. The layer is equivariant to every
    permutation of pixels and group elements, and does not mix images. With a ``mask``, statistics include the valid
    pixels only.

    Args:
        channels: Number of channels.
        eps: The constant :math:`\epsilon` that is added to the variance. The default 1e-12 is the published one.

    Shapes:
        ``(B, channels, *any)`` -> the same. With a mask ``(B or 1, *spatial)``, the input is ``(B, channels, |H|,
        *spatial)``.

    Raises:
        ValueError: if ``channels`` is not a positive integer, or if the input or the mask has another shape.

    Source: the published models of GSA-Nets and GE-ViT, which call it layer normalisation (a group norm with a single
    group).
    """

    def __init__(self, channels: int, eps: float = 1e-12) -> None:
        checks.positive(channels=channels)
        super().__init__(1, channels, eps)

    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, wide = _checked(x, mask, self.num_channels)
        if mask is None:
            return F.group_norm(wide, 1, self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)
        mean, variance, _ = _moments(wide, mask, tuple(range(1, x.ndim)))
        return _scaled(wide - mean, variance, self, x, mask)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}"


@checks.python_numbers
class RegularLayerNorm(Masked, StoresSettings):
    r"""Layer normalisation over channels, separately at every group element and pixel.

    .. math:: y_c = \gamma_c\,(x_c - \mathrm{mean}_c\,x) / \sqrt{\mathrm{var}_c\,x + \epsilon} + \beta_c

    The weight :math:`\gamma` and bias :math:`\beta` of each channel are learned. Statistics do not mix pixels, group
    elements or images, so the layer is equivariant to every permutation of them.

    Args:
        channels: Number of channels.
        eps: The constant :math:`\epsilon` that is added to the variance. The default is 1e-5.

    Shapes:
        ``(B, channels, *any)`` -> the same. With a mask ``(B or 1, *spatial)``, the input is ``(B, channels, |H|,
        *spatial)``.

    Raises:
        ValueError: if ``channels`` is not a positive integer, or if the input or the mask has another shape.

    Source: Ba et al. (2016), over channels as in transformers. The published models of GSA-Nets and GE-ViT use
    :class:`RegularGlobalNorm`.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        checks.positive(channels=channels)
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, wide = _checked(x, mask, self.channels)
        centred = wide - wide.mean(1, keepdim=True)
        return _scaled(centred, centred.square().mean(1, keepdim=True), self, x, mask)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"


class RegularBatchNorm(Masked, nn.BatchNorm1d):
    """Batch normalisation by one mean and variance of each channel, over images, group elements and valid pixels.

    It computes the same as ``escnn.nn.InnerBatchNorm``. Small networks train much more easily with it than with
    :class:`RegularLayerNorm`. ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` replaces it by a module that does not
    support masks.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, wide = _checked(x, mask, self.num_features)
        if mask is None or not (self.training or self.running_mean is None):
            return zero_where_masked(super().forward(columns(x)).view_as(x), mask)
        mean, variance, count = _moments(wide, mask, (0, *range(2, x.ndim)))
        if self.training and self.running_mean is not None:
            with torch.no_grad():  # update running statistics as torch does
                batches = cast(Tensor, self.num_batches_tracked).add_(1)
                weight = (1.0 / batches.to(mean) if self.momentum is None else self.momentum) * (count > 0).to(mean)
                unbiased = variance * count / (count - 1).clamp(min=1)
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                    kept = cast(Tensor, running)
                    kept.lerp_(new.flatten().to(kept), weight.flatten().to(kept))
        return _scaled(wide - mean, variance, self, x, mask)


NORMS = {"global": RegularGlobalNorm, "layer": RegularLayerNorm, "batch": RegularBatchNorm}


def make_norm(name: str, channels: int) -> nn.Module:
    """Make the normalisation layer of a name in ``NORMS``; raise ValueError for other names."""
    checks.choice("norm", name, NORMS)
    return cast(type[nn.Module], NORMS[name])(channels)
