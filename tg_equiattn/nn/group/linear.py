"""Linear maps of single pixels, and modules that can be told which pixels of an image there are."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import relation_index
from ...groups import FiniteGroup, check_group
from ...tables import Tables
from ..modules import StoresSettings


def columns(x: Tensor) -> Tensor:
    """(B, C, *any) as (B, C, n)."""
    return x.flatten(2) if x.ndim > 2 else x[..., None]


class Pointwise(nn.Conv1d):
    """A linear map of channels, (B, in_channels, *any) to (B, out_channels, *any), the same at every pixel and group
    element; weights start as in the published models."""

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
        out = torch.einsum("oc,bcn->bon", self.weight.squeeze(-1), columns(x))
        out = out + self.bias[:, None].to(out.dtype)
        return out.reshape(x.shape[0], self.out_channels, *x.shape[2:])

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


@checks.python_numbers
class GroupLinear(StoresSettings):
    r"""A linear map of channels and group elements, the same at every pixel, that commutes with the group: a group
    convolution with a window of one pixel.

    .. math:: y(o, h) = \sum_{c, s} W[o, c, h^{-1} s]\; x(c, s) + b[o]

    Every linear map of regular features that commutes with the group at every pixel is one. Weights start normal with
    standard deviation :math:`\sqrt{2 / (C |H|)}`, biases zero.

    Args:
        group: the finite group H.
        in_channels, out_channels: channels of the input (C) and the output.
        bias: whether there is b.

    Shapes:
        ``(B, in_channels, |H|, *any)`` -> ``(B, out_channels, |H|, *any)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

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
        return {"group": (self.group.digest, repr(self.group))}

    def matrix(self) -> Tensor:
        """The map as one matrix, ``(out_channels |H|, in_channels |H|)``."""
        return self.weight[:, :, self.index(self.weight.device)].transpose(1, 2).flatten(2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        elements = self.weight.shape[-1]
        if x.ndim < 3 or tuple(x.shape[1:3]) != (self.in_channels, elements):
            raise ValueError(f"input must have shape (B, {self.in_channels}, {elements}, ...), got {tuple(x.shape)}")
        out = torch.einsum("oc,bcn->bon", self.matrix(), columns(x.flatten(1, 2)))
        if self.bias is not None:
            out = out + self.bias.repeat_interleave(elements)[:, None].to(out.dtype)
        return out.reshape(x.shape[0], self.out_channels, elements, *x.shape[3:])

    def extra_repr(self) -> str:
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}, bias={self.bias is not None}"


class Masked:
    """A mixin for modules whose ``forward`` takes a ``mask`` of pixels, bool (B or 1, *spatial), and puts zeros where
    there are none."""

    def mask_after(self, mask: Tensor) -> Tensor:
        """Which pixels of the output there are."""
        return mask


def call_masked(module: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Call a module with the mask, if there is one and the module takes masks.

    RuntimeError for a mask and a batch norm of torch, such as ``SyncBatchNorm.convert_sync_batchnorm`` makes of ours:
    its statistics would be those of hidden pixels too.
    """
    if mask is None:
        return module(x)
    if isinstance(module, Masked):
        return module(x, mask)  # type: ignore[operator]
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise RuntimeError(
            f"mask must be None with {type(module).__name__}, which takes no masks, got a mask; build the model with "
            "norm='layer' to train it with masks on several processes"
        )
    return module(x)


class MaskedSequential(Masked, nn.Sequential):
    """Modules in turn; those that can be told are told which pixels there are."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for module in self:
            x = call_masked(module, x, mask)
            mask = module.mask_after(mask) if mask is not None and isinstance(module, Masked) else mask
        return x

    def mask_after(self, mask: Tensor) -> Tensor:
        for module in self:
            mask = module.mask_after(mask) if isinstance(module, Masked) else mask
        return mask
