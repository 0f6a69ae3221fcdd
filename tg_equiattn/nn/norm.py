"""Normalisation of regular features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _checks


class RegularLayerNorm(nn.Module):
    r"""Layer normalisation over channels, separately at every group element and pixel.

    .. math:: y_c = \gamma_c\,(x_c - \mathrm{mean}_c\,x) / \sqrt{\mathrm{var}_c\,x + \epsilon} + \beta_c

    No statistic mixes pixels, group elements or images, so it is equivariant to every permutation of them.

    Args:
        channels: number of channels.
        eps: added to the variance.

    Shapes:
        ``(B, channels, *any)`` -> the same.

    Source: Ba et al. 2016, as placed in GSA-Nets Fig. F.1.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        _checks.positive(channels=channels)
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(f"input must have shape (B, {self.channels}, ...), got {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, 1, correction=0, keepdim=True)
        shape = (-1, *[1] * (x.ndim - 2))
        out = (wide - mean) * (variance + self.eps).rsqrt() * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"
