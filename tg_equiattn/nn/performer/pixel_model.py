"""Parts of classifiers of pixels: embedding, Performer block and readout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...modes import LayerNorm

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EMBEDDINGS = ("linear", "mlp", "lookup")
INTENSITIES = 256  # number of 8-bit intensities


class PixelEmbedding(nn.Module):
    """Embedding of pixels by a ``"linear"`` map, by an ``"mlp"``, or by a ``"lookup"``: the sum over channels of rows
    of a table of 8-bit intensities, which are integers in [0, 255] or floats in [0, 1]."""

    def __init__(self, in_channels: int, channels: int, kind: str = "linear") -> None:
        super().__init__()
        checks.positive(in_channels=in_channels, channels=channels)
        checks.choice("embedding", kind, EMBEDDINGS)
        self.in_channels, self.kind = in_channels, kind
        if kind == "lookup":
            self.table = nn.Embedding(INTENSITIES * in_channels, channels)
        elif kind == "linear":
            self.map: nn.Module = nn.Linear(in_channels, channels)
        else:
            self.map = nn.Sequential(nn.Linear(in_channels, channels), nn.GELU(), nn.Linear(channels, channels))

    def forward(
        self, x: Float[Tensor, "... in_channels"] | Int[Tensor, "... in_channels"]
    ) -> Float[Tensor, "... channels"]:
        if x.shape[-1] != self.in_channels:
            raise ValueError(f"input must have {self.in_channels} channels, got {x.shape[-1]}")
        if self.kind != "lookup":
            checks.same_kind(x, next(self.map.parameters()))
            return self.map(x)
        index = (x * (INTENSITIES - 1)).round().long() if x.is_floating_point() else x.long()
        checks.in_range("input", index, INTENSITIES - 1, " (or floats in [0, 1]) for embedding='lookup'")
        return self.table(index + INTENSITIES * torch.arange(self.in_channels, device=x.device)).sum(-2)


class MeanReadout(nn.Module):
    """Class scores from the ``mean`` over pixels, with a ``"layer"`` norm before it or a ``"batch"`` norm after it."""

    def __init__(self, channels: int, num_classes: int, norm: str = "layer") -> None:
        super().__init__()
        checks.positive(channels=channels, num_classes=num_classes)
        checks.choice("norm", norm, ("layer", "batch"))
        self.norm = LayerNorm(channels) if norm == "layer" else nn.Identity()
        self.mean_norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.Identity()
        self.head = nn.Linear(channels, num_classes)

    def forward(
        self, x: Float[Tensor, "... channels"], mean: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch num_classes"]:
        return self.head(self.mean_norm(mean(self.norm(x))))


class PerformerBlock(nn.Module):
    r"""Pre-norm block: :math:`x \leftarrow x + \mathrm{attention}(\mathrm{norm}\,x)`, then the same with a feed-forward
    part of four times the channels. The attention gets all further arguments of the call."""

    def __init__(self, attention: nn.Module, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        checks.positive(channels=channels)
        checks.probability(dropout=dropout)
        self.attention_norm, self.attention = LayerNorm(channels), attention
        self.feedforward_norm, self.dropout = LayerNorm(channels), nn.Dropout(dropout)
        self.feedforward = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(4 * channels, channels), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Float[Tensor, "... channels"], *args: Any, **kwargs: Any) -> Float[Tensor, "... channels"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), *args, **kwargs))
        return x + self.feedforward(self.feedforward_norm(x))
