"""Modules beside attention: linear maps, norms, pools and crops of regular features, with masks of valid pixels."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..groups import Group
from ..modules import StoresSettings
from ..shapes import Float
from ..torch_state import Tables
from .encodings import relation_index
from .fourier import block_matrices, block_product_of_pixels, fourier_basis, irreps, to_coordinates, to_rows
from .windows import Checked, Mask, enter, fill_where_masked, leave, zero_where_masked


class Masked:
    """A mixin for modules whose ``forward`` takes a ``mask``, bool (B or 1, *spatial), true at valid pixels, and
    returns zeros at masked pixels."""

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of the output's valid pixels."""
        return mask


def call_masked(module: nn.Module, x: Tensor, mask: Mask) -> Tensor:
    """Call a module, with the mask if the module takes masks.

    Raises:
        RuntimeError: if a mask is given for a batch norm of torch, which would include masked pixels in its statistics.
            ``SyncBatchNorm.convert_sync_batchnorm`` replaces our batch norms by such modules.
    """
    if mask is not None and isinstance(module, Masked):
        return module(x, mask)  # type: ignore[operator]
    if mask is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise RuntimeError(
            f"mask must be None with {type(module).__name__}, which does not support masks, got a mask; to train with "
            "masks on several processes, build the model with norm='layer'"
        )
    return module(x)


def mask_after(module: Masked, mask: Tensor | Checked) -> Tensor | Checked:
    """The mask of the valid pixels of a module's output, checked if that of its input is."""
    return Checked(module.mask_after(mask.pixels)) if isinstance(mask, Checked) else module.mask_after(mask)


class MaskedSequential(Masked, nn.Sequential):
    """A sequence of modules that passes the mask to each module that takes masks."""

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        for module in self:
            x = call_masked(module, x, mask)
            if mask is not None and isinstance(module, Masked):
                mask = mask_after(module, mask)
        return x

    def mask_after(self, mask: Tensor) -> Tensor:
        for module in self:
            mask = module.mask_after(mask) if isinstance(module, Masked) else mask
        return mask


def _checked(x: Tensor, mask: Mask, channels: int) -> tuple[Tensor, Checked | None, Tensor]:
    """Check input and mask. Return the features with zeros at masked pixels, the mask, and the features in at least
    float32."""
    if x.ndim < 2 or x.shape[1] != channels:
        raise ValueError(f"input must have shape (B, {channels}, ...), got {tuple(x.shape)}")
    checks.half_precision(input=x)
    x, checked = enter(x, mask)
    return x, checked, x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _moments(x: Tensor, mask: Checked, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over the given axes of the valid pixels of features (B, C, ..., *spatial). Masked pixels
    must be zero."""
    count = zero_where_masked(torch.ones_like(x), mask).sum(axes, keepdim=True)
    mean = x.sum(axes, keepdim=True) / count.clamp(min=1)
    squares = zero_where_masked(x - mean, mask).square().sum(axes, keepdim=True)
    return mean, squares / count.clamp(min=1), count


def _scaled(centred: Tensor, variance: Tensor, norm: nn.Module, like: Tensor, mask: Mask) -> Tensor:
    """Divide centred features by their standard deviation and apply the norm's learned weight and bias, if it has them.
    The result has the dtype of ``like`` and zeros at masked pixels."""
    out = centred * (variance + cast(float, norm.eps)).rsqrt()
    if norm.weight is not None:
        weight, bias = (cast(Tensor, t).view(-1, *[1] * (out.ndim - 2)) for t in (norm.weight, norm.bias))
        out = out * weight + bias
    return leave(out.to(like.dtype), mask)


@checks.arguments
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

    def __init__(self, channels: checks.Count, eps: checks.NotNegative = 1e-12) -> None:
        super().__init__(1, channels, eps)

    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        x, checked, wide = _checked(x, mask, self.num_channels)
        if checked is None:
            return F.group_norm(wide, 1, self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)
        mean, variance, _ = _moments(wide, checked, tuple(range(1, x.ndim)))
        return _scaled(wide - mean, variance, self, x, mask)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}"


@checks.arguments
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

    def __init__(self, channels: checks.Count, eps: checks.NotNegative = 1e-5) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def settings(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        x, _, wide = _checked(x, mask, self.channels)
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

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        x, checked, wide = _checked(x, mask, self.num_features)
        if checked is None or not (self.training or self.running_mean is None):
            return leave(super().forward(x.flatten(2) if x.ndim > 2 else x[..., None]).view_as(x), mask)
        mean, variance, count = _moments(wide, checked, (0, *range(2, x.ndim)))
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

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if x.ndim < (3 if self.space is None else 4):
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        x, checked = enter(x, mask)
        axes, reduced = tuple(range(3, x.ndim)), x
        if self.space is not None and checked is None:
            reduced = _REDUCTIONS[self.space](x, axes)
        elif self.space is not None and checked is not None:
            count = checked.pixels.flatten(1).sum(1)[:, None, None]
            if self.space == "max":
                reduced = fill_where_masked(x, checked, -math.inf).amax(axes).masked_fill(count == 0, 0.0)
            else:
                reduced = x.sum(axes) / (count.clamp(min=1) if self.space == "mean" else 1)
        return _REDUCTIONS[self.group](reduced, 2)

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
        self.kernel_size = kernel_size

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of blocks that contain a valid pixel."""
        return self._pool(mask.float()[:, None])[:, 0] > 0

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        spatial = x.shape[3:]
        if len(spatial) not in (2, 3):
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if any(n % self.kernel_size for n in spatial):
            raise ValueError(
                f"input sides must be multiples of the pool's kernel_size={self.kernel_size}, got {tuple(spatial)}; "
                "change the size of the images, since leaving out a row at one side would break the symmetry"
            )
        x, checked = enter(x, mask)
        pooled = self._pool(fill_where_masked(x, checked, -math.inf).flatten(1, 2)).unflatten(1, x.shape[1:3])
        return pooled if checked is None else zero_where_masked(pooled, self.mask_after(checked.pixels))

    def _pool(self, x: Tensor) -> Tensor:
        return (F.max_pool2d if x.ndim == 4 else F.max_pool3d)(x, self.kernel_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class SpatialCrop(Masked, nn.Module):
    """Crop that removes ``margin`` pixels at every side; raises ValueError if no pixel would be left."""

    def __init__(self, margin: int) -> None:
        super().__init__()
        self.margin = margin

    def mask_after(self, mask: Tensor) -> Tensor:
        return self._crop(mask, 1)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if x.ndim < 4:
            raise ValueError(f"input must have shape (B, C, |H|, *spatial), got {tuple(x.shape)}")
        if min(x.shape[3:]) <= 2 * self.margin:
            raise ValueError(f"input sides must exceed twice the crop={self.margin}, got {tuple(x.shape[3:])}")
        return self._crop(enter(x, mask)[0], 3)

    def _crop(self, x: Tensor, first: int) -> Tensor:
        for axis in range(first, x.ndim):
            x = x.narrow(axis, self.margin, x.shape[axis] - 2 * self.margin)
        return x

    def extra_repr(self) -> str:
        return f"margin={self.margin}"


def pointwise(
    x: Float[Tensor, "B C *any"], weight: Float[Tensor, "out C"], bias: Float[Tensor, " out"] | None, scale: float = 1.0
) -> Float[Tensor, "B out *any"]:
    """A linear map of channels, times a number, in one batched product."""
    weights, flat = weight.expand(x.shape[0], -1, -1), x.flatten(2) if x.ndim > 2 else x[..., None]
    if bias is None:
        out = torch.bmm(weights, flat if scale == 1 else flat * scale)
    else:
        out = torch.baddbmm(bias[:, None], weights, flat, beta=scale, alpha=scale)
    return out.view(x.shape[0], weight.shape[0], *x.shape[2:])


class Pointwise(nn.Conv1d):
    """A linear map of channels, the same at every pixel and group element: (B, in_channels, *any) -> (B, out_channels,
    *any). Weights are initialised as in the published models. The layer around it has checked the input."""

    bias: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / self.in_channels))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return pointwise(x, self.weight.squeeze(-1), self.bias, scale)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


# Matrix products take this many products in the time in which a coefficient is transformed and back. The number of
# accelerators is an estimate: their products are faster beside their memory, and each operation is a launch.
TRANSFORM, ON_ACCELERATORS = 80, 320


@checks.arguments
class GroupLinear(StoresSettings):
    r"""An equivariant linear map of channels and group elements, the same at every pixel: a group convolution with a
    window of one pixel.

    .. math:: y(o, h) = \sum_{c, s} W[o, c, h^{-1} s]\; x(c, s) + b[o]

    Here c and o are input and output channels, and s and h are group elements. Every equivariant linear map of the
    regular features of one pixel has this form. Weights are drawn from a normal distribution with standard deviation
    :math:`\sqrt{2 / (C |H|)}`, where C is ``in_channels``; biases are zero at the start.

    The layer multiplies by one matrix (few channels), or in the basis of the real irreps of H, where this matrix is
    block diagonal (many channels): 2.7 times fewer products for C4, 5.3 for D4, 9 for the rotations of the cube. The
    parameters are the same.

    Args:
        group: The finite group H.
        in_channels: Channels of the input, for each group element.
        out_channels: Channels of the output, for each group element.
        bias: Whether to add the bias b, one number for each output channel. The default is True.

    Shapes:
        ``(B, in_channels, |H|, *any)`` -> ``(B, out_channels, |H|, *any)``.

    Raises:
        ValueError: if ``group`` is not a finite group, if ``in_channels`` or ``out_channels`` is not a positive
            integer, or if the input has another shape or another dtype than the parameters.

    Source: Cohen and Welling, Group equivariant convolutional networks (2016), Eq. 11, at a single pixel.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> GroupLinear(dihedral(4), 3, 5)(torch.randn(2, 3, 8, 9, 7)).shape
        torch.Size([2, 5, 8, 9, 7])
    """

    def __init__(
        self, group: Group, in_channels: checks.Count, out_channels: checks.Count, bias: bool = True
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.in_channels, self.out_channels = group, in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, len(group)))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.index = Tables(functools.partial(relation_index, group, "relative"))  # h^-1 s
        self.fourier = Tables(functools.partial(fourier_basis, group))
        self.irreps = irreps(group)
        saved = len(group) ** 2 - sum(d * d * m for d, m in self.irreps)  # products of two channels
        channels = in_channels * out_channels / (in_channels + out_channels)
        self.saving = saved * channels / len(group)  # products saved for each coefficient
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / (self.in_channels * len(self.group))))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def settings(self) -> dict[str, Any]:
        return {"group": {"digest": self.group.digest, "text": repr(self.group)}}

    def matrix(self) -> Tensor:
        """The weights as one matrix, ``(out_channels |H|, in_channels |H|)``."""
        index = self.index(self.weight.device)  # index_select: its derivative takes less time than that of indexing
        rotated = self.weight.index_select(2, index.flatten()).unflatten(2, index.shape)  # (o, c, h, s)
        return rotated.transpose(1, 2).flatten(2).flatten(0, 1)

    def blocks(self, gain: Tensor | None = None) -> tuple[Tensor, ...]:
        """The blocks of the matrix in the Fourier basis, one for each irrep, with a gain of the input channels."""
        weight = self.weight if gain is None else self.weight * gain[:, None]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return block_matrices(weight, self.fourier(weight.device, dtype)[1], self.irreps)

    def to_coordinates(self, x: Float[Tensor, "rows H*in"], gain: Tensor | None = None) -> Float[Tensor, "H rows out"]:
        """Apply the map, after a gain of the input channels, to rows of Fourier coefficients, which come before
        channels. Coefficients are the first axis of the result."""
        return to_coordinates(x, self.blocks(gain), self.bias, self.irreps)

    def to_rows(self, x: Float[Tensor, "H rows in"]) -> Float[Tensor, "rows H*out"]:
        """Apply the map to Fourier coefficients, which are the first axis. The results are rows."""
        return to_rows(x, self.blocks(), self.bias, self.irreps)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        elements = self.weight.shape[-1]
        if x.ndim < 3 or tuple(x.shape[1:3]) != (self.in_channels, elements):
            raise ValueError(f"input must have shape (B, {self.in_channels}, {elements}, ...), got {tuple(x.shape)}")
        checks.same_kind(x, self.weight)
        if self.saving > (TRANSFORM if x.device.type == "cpu" else ON_ACCELERATORS):
            basis, pixels = self.fourier(x.device, x.dtype)[0], math.prod(x.shape[3:])
            coefficients = basis.T @ x.transpose(1, 2).flatten(2)  # (B, |H|, in_channels pixels)
            columns = coefficients.view(x.shape[0], elements * self.in_channels, pixels)
            columns = block_product_of_pixels(columns, self.blocks(), self.bias, self.irreps)
            out = (basis * scale) @ columns.view(x.shape[0], elements, self.out_channels * pixels)
            return out.view(x.shape[0], elements, self.out_channels, *x.shape[3:]).transpose(1, 2).contiguous()
        bias = None if self.bias is None else self.bias.repeat_interleave(elements)
        out = pointwise(x.flatten(1, 2), self.matrix(), bias, scale)
        return out.view(x.shape[0], self.out_channels, elements, *x.shape[3:])

    def extra_repr(self) -> str:
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}, bias={self.bias is not None}"
