"""Pointwise linear maps of channels, and of channels and group elements."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import relation_index
from ...groups import FiniteGroup, check_group
from ...tables import Tables, cached_table
from ..modules import StoresSettings

if TYPE_CHECKING:
    from jaxtyping import Float


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
    *any). Weights are initialised as in the published models."""

    bias: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        checks.positive(in_channels=in_channels, out_channels=out_channels)
        super().__init__(in_channels, out_channels, 1)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / self.in_channels))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"input must have shape (B, {self.in_channels}, ...), got {tuple(x.shape)}")
        checks.same_kind(x, self.weight)
        return pointwise(x, self.weight.squeeze(-1), self.bias, scale)

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

    @cached_table
    def matrix(self) -> Tensor:
        """The weights as one matrix, ``(out_channels |H|, in_channels |H|)``."""
        return self.weight[:, :, self.index(self.weight.device)].transpose(1, 2).flatten(2).flatten(0, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        elements = self.weight.shape[-1]
        if x.ndim < 3 or tuple(x.shape[1:3]) != (self.in_channels, elements):
            raise ValueError(f"input must have shape (B, {self.in_channels}, {elements}, ...), got {tuple(x.shape)}")
        checks.same_kind(x, self.weight)
        bias = None if self.bias is None else self.bias[:, None].expand(-1, elements).flatten()
        out = pointwise(x.flatten(1, 2), self.matrix(), bias, scale)
        return out.view(x.shape[0], self.out_channels, elements, *x.shape[3:])

    def extra_repr(self) -> str:
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}, bias={self.bias is not None}"
