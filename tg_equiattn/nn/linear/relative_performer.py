"""The Relative Performer: an image classifier of pixels, and its pre-norm block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import AbsoluteEncoding
from ...grids import PixelGrid
from ..children import reset_children
from .performer import NEAR, PerformerAttention
from .random_features import redraw_children

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


def readout_norms(norm: str, channels: int) -> tuple[nn.Module, nn.Module]:
    """The norms of pixels and of their mean: a layer norm first, or a batch norm last."""
    checks.choice("norm", norm, ("layer", "batch"))
    if norm == "layer":
        return nn.LayerNorm(channels), nn.Identity()
    return nn.Identity(), nn.BatchNorm1d(channels)


class PerformerBlock(nn.Module):
    r"""Pre-norm transformer block: :math:`x \leftarrow x + \mathrm{attention}(\mathrm{norm}\,x)`, then
    :math:`x \leftarrow x + \mathrm{feedforward}(\mathrm{norm}\,x)`, a GELU between two linear maps.

    Args:
        attention: a module from channels to channels; it gets all other arguments of the call.
        channels: width.
        feedforward_channels: width between the two linear maps; ``None`` means four times ``channels``.
        dropout: of the feed-forward part.
    """

    def __init__(
        self, attention: nn.Module, channels: int, feedforward_channels: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        feedforward_channels = 4 * channels if feedforward_channels is None else feedforward_channels
        checks.positive(channels=channels, feedforward_channels=feedforward_channels)
        checks.probability(dropout=dropout)
        self.attention_norm, self.attention = nn.LayerNorm(channels), attention
        self.feedforward_norm = nn.LayerNorm(channels)
        self.feedforward = nn.Sequential(
            nn.Linear(channels, feedforward_channels), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(feedforward_channels, channels), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("mask")
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
        x = x + self.attention(self.attention_norm(x), *args, **kwargs)
        return x + self.feedforward(self.feedforward_norm(x))

    def reset_parameters(self) -> None:
        reset_children(self)


class RelativePerformer(nn.Module):
    r"""An image classifier whose tokens are pixels: embedding, Performer blocks, mean over pixels, linear.

    With the defaults and 10 classes it has 4.7 million parameters, 4.5 with ``position="clipped"``, whose position
    heads need no keys; the paper gives the same numbers.

    Args:
        in_channels: channels of the image.
        num_classes: outputs.
        channels: width.
        depth: number of blocks.
        heads: attention heads.
        embedding: of a pixel: ``"linear"``, ``"mlp"`` or ``"lookup"``.
        position: as :class:`PerformerAttention`; ``"absolute"`` is added once, to the embedding.
        max_distance, metric, periodic: which pixels are near, as :class:`~tg_equiattn.grids.PixelGrid`.
        redraw_interval: training steps between draws. Drawing at every step keeps the paper's models from learning
            (the authors' log has 42 % on MNIST against 98.5 % at every 100 steps).
        attention_dropout, dropout: of attention's output and of the feed-forward part.
        feedforward_channels: ``None`` means four times ``channels``.
        norm: before the last linear map: ``"layer"``, at every pixel before the mean, or ``"batch"``, after it, with
            which small data are learned far faster.
        options: further keyword arguments of :class:`PerformerAttention`.

    Shapes:
        ``(B, in_channels, H, W)`` -> ``(B, num_classes)``; any H and W, not fixed at construction.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer appendix A.2 (the paper trains with learning rate 5e-4 and batches of 22 images).

    Example:
        >>> import torch
        >>> model = RelativePerformer(1, 10, channels=32, depth=2, heads=4)
        >>> model(torch.rand(3, 1, 9, 12)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        channels: int = 256,
        depth: int = 6,
        heads: int = 8,
        embedding: str = "linear",
        position: str | None = "window",
        max_distance: int = 6,
        metric: str = "manhattan",
        periodic: bool = False,
        redraw_interval: int | None = 100,
        attention_dropout: float = 0.1,
        dropout: float = 0.1,
        feedforward_channels: int | None = None,
        norm: str = "layer",
        **options: Any,
    ) -> None:
        super().__init__()
        checks.positive(num_classes=num_classes, depth=depth)
        self.embedding = PixelEmbedding(in_channels, channels, embedding)
        self.absolute = AbsoluteEncoding(channels, 2) if position == "absolute" else None
        self.position = position
        self.max_distance, self.metric, self.periodic = max_distance, metric, periodic
        self.blocks = nn.ModuleList(
            PerformerBlock(
                PerformerAttention(
                    channels, channels, heads, position=None if position == "absolute" else position,
                    max_distance=max_distance, redraw_interval=redraw_interval, dropout=attention_dropout, **options,
                ),
                channels, feedforward_channels, dropout,
            )
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.pooled_norm = readout_norms(norm, channels)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        if image.ndim != 4 or image.shape[1] != self.embedding.in_channels or not min(image.shape[2:]):
            raise ValueError(
                f"input must be (B, {self.embedding.in_channels}, H, W) with pixels, got {tuple(image.shape)}"
            )
        grid = PixelGrid(tuple(image.shape[2:]), self.max_distance, self.metric, self.periodic)
        x = self.embedding(image.flatten(2).transpose(1, 2))
        if self.absolute is not None:
            pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
            x = x + self.absolute(pos).to(x.dtype)
        near = None
        if self.position in NEAR:
            near = grid.neighbours(len(image), x.device)
        for block in self.blocks:
            x = block(x, grid=grid, neighbours=near)
        return self.head(self.pooled_norm(self.norm(x).mean(1)))

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in every block."""
        redraw_children(self, generator)

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)
