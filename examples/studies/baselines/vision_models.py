"""Vision transformers of images and volumes, plain or behind convolutions, and a plain convolutional network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.nn import FrameTransformer

from .gcnn import GCNN, convolution, gspaces


def convolution_of(dim: int, *arguments: int, **options: int) -> nn.Module:
    return (nn.Conv2d, nn.Conv3d)[dim - 2](*arguments, **options)


class PlainTransformer(nn.Module):
    """A vision transformer as timm's: patches, learned positions, pre-norm blocks, and the mean over patches.

    Args:
        dim: 2 for images, 3 for volumes.
        in_channels: channels of the input.
        classes: number of logits.
        width: channels of the tokens.
        layers: number of blocks.
        heads: attention heads.
        side: patches to a side.
        patch: side of a patch in pixels.
        std: standard deviation of the initial weights; ``None`` means sqrt(2 / inputs), as for frames.
    """

    def __init__(
        self, dim: int, in_channels: int, classes: int, width: int, layers: int, heads: int, side: int, patch: int,
        std: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = convolution_of(dim, in_channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(side**dim, width).normal_(std=0.02))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        for p in self.blocks.parameters():
            if p.ndim == 2:  # torch's encoder copies one layer
                nn.init.normal_(p, std=math.sqrt(2 / p.shape[1]) if std is None else std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


class GroupStem(nn.Module):
    """Convolutions of escnn, each with a norm and a pool of 2 pixels, and a transformer of frames on the rest."""

    def __init__(self, gspace: gspaces.GSpace, fields: int, convolutions: int, classes: int, **options: int) -> None:
        super().__init__()
        self.stem = GCNN(gspace, fields, [convolution] * (convolutions - 1), pools=range(convolutions))
        self.blocks = FrameTransformer(self.stem.group, fields, classes, patch_size=1, lifts=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem.features(x))


def stem(dim: int, widths: Sequence[int]) -> nn.Sequential:
    """Convolutions of 3 pixels, each with a batch norm, a ReLU, and a pool of 2 pixels."""
    layers: list[nn.Module] = []
    for before, width in zip((1, *widths), widths, strict=False):
        norm = (nn.BatchNorm2d, nn.BatchNorm3d)[dim - 2](width)
        pool = (nn.MaxPool2d, nn.MaxPool3d)[dim - 2](2)
        layers += [convolution_of(dim, before, width, kernel_size=3, padding=1), norm, nn.ReLU(), pool]
    return nn.Sequential(*layers)


def plain_cnn(dim: int, width: int, classes: int) -> nn.Module:
    pool = (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dim - 2](1)
    return nn.Sequential(
        stem(dim, (width, 2 * width)), convolution_of(dim, 2 * width, 4 * width, kernel_size=3, padding=1), nn.ReLU(),
        pool, nn.Flatten(), nn.Linear(4 * width, classes),
    )  # fmt: skip


def frames(group: FiniteGroup, classes: int, width: int, layers: int, heads: int, patch: int) -> FrameTransformer:
    """The transformer of frames of this width, with as many heads for each group element."""
    return FrameTransformer(
        group, 1, classes, patch_size=patch, channels=width // len(group), num_layers=layers, heads=heads
    )
