"""The 1x1 convolution of the attention layers, for any number of trailing axes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ... import checks


def columns(x: Tensor) -> Tensor:
    """(B, C, *any) as (B, C, n)."""
    return x.flatten(2) if x.ndim > 2 else x[..., None]


class Pointwise(nn.Conv1d):
    r"""A linear map of channels, the same at every pixel and group element (and so equivariant to all of them).

    Weights start normal with standard deviation :math:`\sqrt{2 / \mathrm{fan\_in}}` as in the published models, biases
    zero.

    Shapes:
        ``(B, in_channels, *any)`` -> ``(B, out_channels, *any)``.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        checks.positive(in_channels=in_channels, out_channels=out_channels)
        super().__init__(in_channels, out_channels, 1, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=math.sqrt(2 / self.in_channels))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"input must have shape (B, {self.in_channels}, ...), got {tuple(x.shape)}")
        weight = self.weight.squeeze(-1)
        out = torch.einsum("oc,bcn->bon", weight, columns(x))
        if self.bias is not None:
            out = out + self.bias[:, None].to(out.dtype)
        return out.reshape(x.shape[0], self.out_channels, *x.shape[2:])

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, bias={self.bias is not None}"
