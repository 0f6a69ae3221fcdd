"""Where a classifier of pixels begins and ends: embeddings of their colours, and the readout of their mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ... import checks
from ...layer_norm import LayerNorm
from ..children import reset_children

EMBEDDINGS = ("linear", "mlp", "lookup")
LEVELS = 256  # of an 8-bit intensity


class PixelEmbedding(nn.Module):
    """Pixels (..., in_channels) to (..., channels): linear, by an MLP, or looked up by their 8-bit intensities.

    Args:
        in_channels: channels of a pixel.
        channels: width of the embedding.
        kind: ``"linear"``, ``"mlp"``, or ``"lookup"``, which takes integers in [0, 255] or floats in [0, 1] and adds
            up one table for each channel.
    """

    def __init__(self, in_channels: int, channels: int, kind: str = "linear") -> None:
        super().__init__()
        checks.positive(in_channels=in_channels, channels=channels)
        checks.choice("embedding", kind, EMBEDDINGS)
        self.in_channels, self.kind = in_channels, kind
        if kind == "lookup":
            self.table = nn.Embedding(LEVELS * in_channels, channels)
        elif kind == "linear":
            self.map: nn.Module = nn.Linear(in_channels, channels)
        else:
            self.map = nn.Sequential(nn.Linear(in_channels, channels), nn.GELU(), nn.Linear(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_channels:
            raise ValueError(f"input must have {self.in_channels} channels, got {x.shape[-1]}")
        if self.kind != "lookup":
            checks.same_kind(x, next(self.map.parameters()))
            return self.map(x)
        level = (x * (LEVELS - 1)).round().long() if x.is_floating_point() else x.long()
        if checks.values_are_free(level) and level.numel() and not 0 <= int(level.min()) <= int(level.max()) < LEVELS:
            raise ValueError(
                "input must be integers in [0, 255] or floats in [0, 1] for embedding='lookup', got levels "
                f"{int(level.min())} to {int(level.max())}"
            )
        return self.table(level + LEVELS * torch.arange(self.in_channels, device=x.device)).sum(-2)

    def reset_parameters(self) -> None:
        reset_children(self)


class MeanReadout(nn.Module):
    """Class scores from the mean over pixels: norm, mean, linear.

    Args:
        channels: width.
        num_classes: outputs.
        norm: ``"layer"``, at every pixel before the mean, or ``"batch"``, after it.

    Shapes:
        ``(..., channels)`` pixels -> ``(B, num_classes)``, with ``mean`` from pixels to ``(B, channels)``.
    """

    def __init__(self, channels: int, num_classes: int, norm: str = "layer") -> None:
        super().__init__()
        checks.positive(channels=channels, num_classes=num_classes)
        checks.choice("norm", norm, ("layer", "batch"))
        self.norm = LayerNorm(channels) if norm == "layer" else nn.Identity()
        self.mean_norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.Identity()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        return self.head(self.mean_norm(mean(self.norm(x))))

    def reset_parameters(self) -> None:
        reset_children(self)
