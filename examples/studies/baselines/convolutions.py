"""A plain convolutional network, and the same filters at several dilations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tg_equiattn.nn import GlobalPooling
from tg_equiattn.nn.group.linear import Pointwise
from tg_equiattn.nn.group.norm import RegularBatchNorm


class Convolutions(nn.Module):
    """3 x 3 convolutions with batch norm and SiLU, a pointwise classifier, the mean over space.

    With several ``scales`` all filters are applied to every scale j by itself, dilated by :math:`2^j`, and the greatest
    logit of all scales counts, as in deep scale-spaces (Worrall & Welling, 2019), without their kernels over scales.

    Args:
        channels: of every layer.
        layers: number of convolutions.
        scales: dilations by 1, 2, 4 ...; with one, a plain network.
        classes: number of logits.

    Shapes:
        ``(B, 1, H, W)`` -> ``(B, classes)``.
    """

    def __init__(self, channels: int, layers: int, scales: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.scales = scales
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels if number else 1, channels, 3, bias=False) for number in range(layers)
        )
        self.norms = nn.ModuleList(RegularBatchNorm(channels) for _ in range(layers))
        self.classifier, self.pooling = Pointwise(channels, classes), GlobalPooling(space="mean", group="max")

    def features(self, x: Tensor) -> Tensor:
        """The last feature map of every scale, ``(B, channels, scales, H, W)``."""
        x = x[:, :, None].expand(-1, -1, self.scales, -1, -1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            parts = [
                F.conv2d(part, convolution.weight, padding=2**number, dilation=2**number)
                for number, part in enumerate(x.unbind(2))
            ]
            x = F.silu(norm(torch.stack(parts, 2)))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.pooling(self.classifier(self.features(x)))
