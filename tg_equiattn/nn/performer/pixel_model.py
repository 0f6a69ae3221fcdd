"""Classifiers of pixels: embedding, Performer blocks and readout, around the core's attention or a host's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import AbsoluteEncoding
from ...modes import LayerNorm
from ..modules import reset_children
from .attention import POSITIONS, KernelAttention, PerformerAttention, PositionalPerformerAttention

REDRAW = 100  # training steps: drawing at every one keeps the paper's models from learning
EMBEDDINGS = ("linear", "mlp", "lookup")
LEVELS = 256  # of an 8-bit intensity


class PixelEmbedding(nn.Module):
    """Pixels (..., in_channels) to (..., channels): ``"linear"``, by an ``"mlp"``, or by ``"lookup"`` of 8-bit
    intensities, integers in [0, 255] or floats in [0, 1], whose tables add up, one for each channel."""

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
        checks.in_range("input", level, LEVELS - 1, " (or floats in [0, 1]) for embedding='lookup'")
        return self.table(level + LEVELS * torch.arange(self.in_channels, device=x.device)).sum(-2)


class MeanReadout(nn.Module):
    """Class scores (B, num_classes) from ``mean`` over pixels, a ``"layer"`` norm before or ``"batch"`` after it."""

    def __init__(self, channels: int, num_classes: int, norm: str = "layer") -> None:
        super().__init__()
        checks.positive(channels=channels, num_classes=num_classes)
        checks.choice("norm", norm, ("layer", "batch"))
        self.norm = LayerNorm(channels) if norm == "layer" else nn.Identity()
        self.mean_norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.Identity()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        return self.head(self.mean_norm(mean(self.norm(x))))


class PerformerBlock(nn.Module):
    r"""Pre-norm block: :math:`x \leftarrow x + \mathrm{attention}(\mathrm{norm}\,x)`, which gets all other arguments of
    the call, then the same of a feed-forward part, a GELU between two linear maps, of four times the channels."""

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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *args, **kwargs))
        return x + self.feedforward(self.feedforward_norm(x))


@checks.python_numbers
class PixelModel(nn.Module):
    """A classifier of pixels, as RelativePerformer; ``around`` is what a host makes of the attention."""

    def __init__(
        self, in_channels: int, num_classes: int, channels: int, depth: int, heads: int, embedding: str,
        position: str | None, pos_dim: int, cutoff: int, dropout: float, norm: str,
        attn_kwargs: Mapping[str, Any] | None, around: Callable[[KernelAttention], nn.Module] = lambda x: x,
    ) -> None:  # fmt: skip
        super().__init__()
        kinds = ("window", *POSITIONS, "absolute", "None")
        checks.choice("position", "None" if position is None else position, kinds)
        options: dict[str, Any] = {"pos_dim": pos_dim, "cutoff": cutoff, "redraw_interval": REDRAW}
        if position in POSITIONS:
            kind: Callable[..., KernelAttention] = PositionalPerformerAttention
            options["position"] = position
        else:
            kind, offset = PerformerAttention, "table" if position == "window" else None
            options |= {"offset": offset, "method": "features"}
        options |= attn_kwargs or {}
        self.embedding = PixelEmbedding(in_channels, channels, embedding)
        self.absolute = AbsoluteEncoding(channels, pos_dim) if position == "absolute" else None
        self.blocks = nn.ModuleList(
            PerformerBlock(around(kind(channels, channels, heads, **options)), channels, dropout) for _ in range(depth)
        )
        self.readout = MeanReadout(channels, num_classes, norm)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in every block."""
        blocks: Any = self.blocks
        for block in blocks:
            block.attention.redraw_features(generator)

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)
