"""Pointwise linear maps, and modules that take a mask of valid pixels."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import relation_index
from ...groups import FiniteGroup, check_group
from ...tables import Tables
from ..modules import StoresSettings

if TYPE_CHECKING:
    from jaxtyping import Float


def columns(x: Float[Tensor, "B C *any"]) -> Float[Tensor, "B C n"]:
    """Flatten pixels."""
    return x.flatten(2) if x.ndim > 2 else x[..., None]


def pointwise(
    x: Float[Tensor, "B C *any"], weight: Float[Tensor, "out C"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "B out *any"]:
    """A linear map of channels, in one batched product."""
    weights, flat = weight.expand(x.shape[0], -1, -1), columns(x)
    out = torch.bmm(weights, flat) if bias is None else torch.baddbmm(bias[:, None], weights, flat)
    return out.view(x.shape[0], weight.shape[0], *x.shape[2:])


class Pointwise(nn.Conv1d):
    """A linear map of channels, the same at every pixel and group element: (B, in_channels, *any) -> (B, out_channels,
    *any). Weights are initialised as in the published models."""

    bias: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        checks.positive(in_channels=in_channels, out_channels=out_channels)
        super().__init__(in_channels, out_channels, 1)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / self.in_channels))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"input must have shape (B, {self.in_channels}, ...), got {tuple(x.shape)}")
        checks.same_kind(x, self.weight)
        return pointwise(x, self.weight.squeeze(-1), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


@checks.python_numbers
class GroupLinear(StoresSettings):
    r"""An equivariant linear map of channels and group elements, the same at every pixel: a group convolution with a
    window of one pixel.

    .. math:: y(o, h) = \sum_{c, s} W[o, c, h^{-1} s]\; x(c, s) + b[o]

    Here c and o are input and output channels, and s and h are group elements. Every equivariant linear map of the
    regular features of one pixel has this form. Weights are drawn from a normal distribution with standard deviation
    :math:`\sqrt{2 / (C |H|)}`, where C is ``in_channels``; biases are zero at the start.

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

    def __init__(self, group: FiniteGroup, in_channels: int, out_channels: int, bias: bool = True) -> None:
        super().__init__()
        check_group(group)
        checks.positive(in_channels=in_channels, out_channels=out_channels)
        self.group, self.in_channels, self.out_channels = group, in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, len(group)))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.index = Tables(functools.partial(relation_index, group, "relative"))  # h^-1 s
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / (self.in_channels * len(self.group))))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def settings(self) -> dict[str, Any]:
        return {"group": {"digest": self.group.digest, "text": repr(self.group)}}

    def matrix(self) -> Tensor:
        """The weights as one matrix, ``(out_channels |H|, in_channels |H|)``."""
        return self.weight[:, :, self.index(self.weight.device)].transpose(1, 2).flatten(2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        elements = self.weight.shape[-1]
        if x.ndim < 3 or tuple(x.shape[1:3]) != (self.in_channels, elements):
            raise ValueError(f"input must have shape (B, {self.in_channels}, {elements}, ...), got {tuple(x.shape)}")
        checks.same_kind(x, self.weight)
        bias = None if self.bias is None else self.bias[:, None].expand(-1, elements).flatten()
        out = pointwise(x.flatten(1, 2), self.matrix(), bias)
        return out.view(x.shape[0], self.out_channels, elements, *x.shape[3:])

    def extra_repr(self) -> str:
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}, bias={self.bias is not None}"


class Masked:
    """A mixin for modules whose ``forward`` takes a ``mask``, bool (B or 1, *spatial), true at valid pixels, and
    returns zeros at masked pixels."""

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of the output's valid pixels."""
        return mask


def call_masked(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Call a module, with the mask if the module takes masks.

    Raises:
        RuntimeError: if a mask is given for a batch norm of torch, which would include masked pixels in its statistics.
            ``SyncBatchNorm.convert_sync_batchnorm`` replaces our batch norms by such modules.
    """
    if mask is None:
        return module(x)
    if isinstance(module, Masked):
        return module(x, mask)  # type: ignore[operator]
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise RuntimeError(
            f"mask must be None with {type(module).__name__}, which does not support masks, got a mask; to train with "
            "masks on several processes, build the model with norm='layer'"
        )
    return module(x)


class MaskedSequential(Masked, nn.Sequential):
    """A sequence of modules that passes the mask to each module that takes masks."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for module in self:
            x = call_masked(module, x, mask)
            mask = module.mask_after(mask) if mask is not None and isinstance(module, Masked) else mask
        return x

    def mask_after(self, mask: Tensor) -> Tensor:
        for module in self:
            mask = module.mask_after(mask) if isinstance(module, Masked) else mask
        return mask
