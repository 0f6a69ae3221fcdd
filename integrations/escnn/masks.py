"""Masks through sequences of escnn modules: a masked pixel counts as a pixel beyond the border of the image."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import escnn.nn as e
import torch
import torch.nn.functional as F
from escnn.nn import EquivariantModule, GeometricTensor, SequentialModule
from torch import Tensor, nn

from tg_equiattn import checks
from tg_equiattn.group.layers import Masked
from tg_equiattn.group.layers import MaskedSequential as CoreMaskedSequential
from tg_equiattn.group.windows import fill_where_masked, zero_where_masked

from .export import ATTENTION, exported_copy

POINTWISE = (
    e.ConcatenatedNonLinearity, e.DisentangleModule, e.ELU, e.FieldDropout, e.FourierPointwise, e.GatedNonLinearity1,
    e.GatedNonLinearity2, e.GatedNonLinearityUniform, e.GroupPooling, e.IdentityModule, e.InducedGatedNonLinearity1,
    e.InducedNormNonLinearity, e.InducedNormPool, e.LeakyReLU, e.NormNonLinearity, e.NormPool, e.PointwiseDropout,
    e.PointwiseNonLinearity, e.QuotientFourierPointwise, e.ReLU, e.ReshuffleModule, e.RestrictionModule,
    e.TensorProductModule, e.VectorFieldNonLinearity,
)  # fmt: skip
BATCH_NORMS = (e.IIDBatchNorm2d, e.IIDBatchNorm3d, e.InnerBatchNorm, e.NormBatchNorm)
MAX_POOLS = (e.PointwiseMaxPool2D, e.PointwiseMaxPool3D)
SUMS = (
    e.PointwiseAvgPool2D, e.PointwiseAvgPool3D, e.PointwiseAvgPoolAntialiased2D, e.PointwiseAvgPoolAntialiased3D,
    e.R2Conv, e.R3Conv,
)  # fmt: skip


class _Pointwise:
    """A module that does not mix pixels. apply(run, x, mask): ``x`` is zero at masked pixels, and ``run(x)`` is the
    module on tensors. A rule returns outputs and the mask of the valid ones."""

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        return run(x)

    def mask_after(self, mask: Tensor) -> Tensor:
        return mask


class _Statistics(_Pointwise):
    """A batch norm that uses the statistics of the batch: it gets the valid pixels, as one image of one column."""

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        valid, last = mask.expand(x.shape[0], *mask.shape[1:]), x.movedim(1, -1)
        pixels = last[valid].T
        if not pixels.shape[1]:
            return x
        out = run(pixels[None].unflatten(2, (-1, *[1] * (x.ndim - 3))).contiguous()).flatten(1)
        return torch.zeros_like(last).index_put((valid,), out.view_as(pixels).T).movedim(-1, 1)


@dataclass(frozen=True)
class _Window(_Pointwise):
    """A convolution or pool. An output needs a window of ``size`` pixels, which is the kernel without its padding."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    outside: float  # value of pixels beyond the border

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        return run(x if self.outside == 0 else fill_where_masked(x, mask, self.outside))

    def mask_after(self, mask: Tensor) -> Tensor:
        """An output is valid if the part of its window where windows overlap is valid, and any pixel of the rest."""
        pool: Any = F.max_pool2d if mask.ndim == 3 else F.max_pool3d
        pairs = list(zip(self.size, self.stride, strict=True))
        overlap = -pool(-mask.float()[:, None], [max(size - stride, 0) + 1 for size, stride in pairs], 1)
        return pool(overlap, [min(pair) for pair in pairs], list(self.stride))[:, 0] > 0


@dataclass(frozen=True)
class _Upsampling(_Pointwise):
    """Upsampling by an integer. Interpolation takes the mean of the valid pixels, with its own weights: at the border
    of an image, torch does the same."""

    factor: int
    mode: str

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        if self.mode == "nearest":
            return run(x)
        weight = F.interpolate(mask.to(x.dtype)[:, None], scale_factor=self.factor, mode=self.mode, align_corners=False)
        return run(x) / weight.clamp(min=0.5 ** (x.ndim - 1))  # half in each axis, or more, at valid pixels

    def mask_after(self, mask: Tensor) -> Tensor:
        for axis in range(1, mask.ndim):
            mask = mask.repeat_interleave(self.factor, axis)
        return mask


class _Refused(_Pointwise):
    """A module that mixes pixels, and does not know masks."""

    def __init__(self, message: str) -> None:
        self.message = message

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        raise ValueError(self.message)


class _TakesMask(_Pointwise):
    """A module whose ``forward`` takes a mask. Raise ValueError if it has circular attention."""

    def __init__(self, module: nn.Module) -> None:
        if any(isinstance(part, ATTENTION) and part.window.circular for part in module.modules()):
            raise _no_opposite_side(module, "circular", "mask")
        self.mask_after = getattr(module, "mask_after", super().mask_after)  # type: ignore[method-assign]

    def apply(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> Tensor:
        return run(x, mask)


def _no_opposite_side(module: nn.Module, mode: str, allowed: str) -> ValueError:
    return ValueError(
        f"mask must be None with padding_mode={mode!r} in {type(module).__name__}, got a mask: a padded image has no "
        f"opposite side; use padding_mode={allowed!r}"
    )


def _window(module: Any, outside: float) -> _Window:
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise _no_opposite_side(module, module.padding_mode, "zeros")
    kernel, stride, padding, dilation = (
        value if isinstance(value, tuple) else (value,) * module.in_type.gspace.dimensionality
        for value in (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
    )
    size = tuple(d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True))
    if min(size) < 1 or getattr(module, "ceil_mode", False):
        raise ValueError(
            f"mask must be None with padding={module.padding} and ceil_mode={getattr(module, 'ceil_mode', False)} in "
            f"{type(module).__name__}, got a mask: outputs beyond the border have no mask; use less padding than half "
            "of the kernel, and ceil_mode=False"
        )
    return _Window(size, stride, outside)


def _upsampling(module: Any) -> _Upsampling:
    factor = module._scale_factor
    if module._align_corners or factor is None or factor != int(factor):
        raise ValueError(
            f"mask must be None with scale_factor={factor} and align_corners={module._align_corners} in "
            f"{type(module).__name__}, got a mask: outputs then depend on the size with padding; use an integer "
            "scale_factor and align_corners=False"
        )
    return _Upsampling(int(factor), module._mode)


def takes_mask(module: nn.Module) -> bool:
    return "mask" in inspect.signature(module.forward).parameters


def _rule(module: EquivariantModule) -> _Pointwise:
    """The rule by which a module treats masked pixels. Raise ValueError for a module that is not known."""
    if takes_mask(module):
        return _TakesMask(module)
    if isinstance(module, BATCH_NORMS):
        by_batch = module.training or not getattr(module, "track_running_stats", True)
        return _Statistics() if by_batch else _Pointwise()
    if isinstance(module, POINTWISE):
        return _Pointwise()
    if isinstance(module, SUMS):
        return _window(module, 0.0)
    if isinstance(module, MAX_POOLS):
        return _window(module, -math.inf)
    if isinstance(module, (e.R2Upsampling, e.R3Upsampling)):
        return _upsampling(module)
    raise ValueError(
        f"mask must be None with {type(module).__name__} in a MaskedSequential, got a mask; use a pointwise module, "
        "R2Conv or R3Conv, a batch norm, PointwiseMaxPool, PointwiseAvgPool, R2Upsampling or R3Upsampling, or a module "
        "with forward(input, mask), and mask_after(mask) if it changes the size"
    )


def _flat(sequence: SequentialModule) -> Iterator[EquivariantModule]:
    for module in sequence:
        if type(module) in (SequentialModule, MaskedSequential):
            yield from _flat(module)
        else:
            yield module


class MaskedSequential(SequentialModule):
    """A ``SequentialModule`` of escnn that takes a mask, so that padded images have the outputs of the images alone.

    In every module, a masked pixel counts as a pixel beyond the border of the image. Convolutions and average pools get
    zeros there, max pools minus infinity, bilinear upsampling the mean of the valid pixels. Batch norms get the valid
    pixels only. Modules with ``forward(input, mask)``, such as the layers of this package, get the mask. Other modules
    must be pointwise. Pools, strides and upsampling change the mask, too: ``mask_after(mask)`` is the mask of the
    output.

    A padded image has the same outputs as the image alone if the strides fit its sides: with a pool of 2, even sides.
    The symmetry needs this, too. A pooled pixel is valid if any of its pixels is.

    Args:
        args (EquivariantModule): Modules of escnn or of this package, or other sequences, in order; or one
            ``OrderedDict`` of modules.

    Raises:
        ValueError: if a call has a mask, and a module mixes pixels in a way that is not known (the error names what to
            use), or the mask does not fit the input.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> image, hidden = (nn.FieldType(gspace, [r]) for r in (gspace.trivial_repr, gspace.regular_repr))
        >>> model = MaskedSequential(nn.R2Conv(image, hidden, 3, padding=1), nn.PointwiseMaxPool(hidden, 2))
        >>> mask = torch.zeros(1, 8, 8, dtype=torch.bool)
        >>> mask[:, :6, :4] = True
        >>> model(image(torch.randn(1, 1, 8, 8)), mask).shape, int(model.mask_after(mask).sum())
        (torch.Size([1, 4, 4, 4]), 6)
    """

    def forward(self, input: GeometricTensor, mask: Tensor | None = None) -> GeometricTensor:
        """Apply the modules.

        Args:
            input: Fields of ``in_type``.
            mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels. Masked pixels have no effect on
                other pixels, and their outputs are zero. ``None`` means that all pixels are valid.
        """
        if mask is None:
            return super().forward(input)
        checks.pixel_mask(mask, input.shape[0], input.shape[2:], input.tensor.device)
        x = zero_where_masked(input.tensor, mask)
        for module in _flat(self):

            def run(x: Tensor, *mask: Tensor, module: EquivariantModule = module) -> Tensor:
                return module(GeometricTensor(x, module.in_type), *mask).tensor

            rule = _rule(module)
            x, mask = rule.apply(run, x, mask), rule.mask_after(mask)
            x = zero_where_masked(x, mask)
        return GeometricTensor(x, self.out_type)

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of the output's valid pixels."""
        for module in _flat(self):
            mask = _rule(module).mask_after(mask)
        return mask

    def export(self) -> nn.Module:
        """Set eval mode and return a copy as a plain torch module, which takes tensors ``x`` and ``mask``."""
        self.eval()
        return CoreMaskedSequential(*map(_exported, _flat(self)))


def _exported(module: EquivariantModule) -> ExportedPart:
    exported = exported_copy(module)
    try:
        rule = _rule(module)
        return ExportedPart(exported, _TakesMask(exported) if isinstance(rule, _TakesMask) else rule)
    except ValueError as error:
        return ExportedPart(exported, _Refused(str(error)))


class ExportedPart(Masked, nn.Module):
    """A plain torch module with the rule of the escnn module that it was exported from."""

    def __init__(self, module: nn.Module, rule: _Pointwise) -> None:
        super().__init__()
        self.module, self.rule = module, rule

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.module(x)
        out = self.rule.apply(self.module, zero_where_masked(x, mask), mask)
        return zero_where_masked(out, self.mask_after(mask))

    def mask_after(self, mask: Tensor) -> Tensor:
        return self.rule.mask_after(mask)
