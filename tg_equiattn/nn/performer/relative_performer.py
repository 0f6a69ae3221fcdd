"""The Relative Performer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...grids import PixelGrid
from ...modes import LayerNorm
from ..modules import StoresSettings, reset_children
from .attention import PerformerAttention
from .paper_positions import CUTOFF
from .random_features import DrawsFeatures

if TYPE_CHECKING:
    from jaxtyping import Float, Int

REDRAW = 100  # training steps between draws; with a draw at every step, the paper's models do not learn
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
    """Class scores from the mean over pixels, with a ``"layer"`` norm before it or a ``"batch"`` norm after it."""

    def __init__(self, channels: int, num_classes: int, norm: str = "layer") -> None:
        super().__init__()
        checks.positive(channels=channels, num_classes=num_classes)
        checks.choice("norm", norm, ("layer", "batch"))
        self.norm = LayerNorm(channels) if norm == "layer" else nn.Identity()
        self.mean_norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.Identity()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Float[Tensor, "batch pixels channels"]) -> Float[Tensor, "batch num_classes"]:
        return self.head(self.mean_norm(self.norm(x).mean(1)))


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


@checks.python_numbers
class RelativePerformer(DrawsFeatures, StoresSettings):
    r"""Image classifier whose tokens are pixels: embedding, Performer blocks, mean over pixels, linear map.

    Args:
        in_channels: Channels of the image.
        num_classes: Number of outputs.
        channels: Width of the model, a multiple of ``heads``. Default 256.
        num_layers: Number of blocks. Default 6.
        heads: Number of attention heads. Default 8.
        embedding: Embedding of a pixel: ``"linear"`` (default), ``"mlp"``, or ``"lookup"`` in a table of 8-bit
            intensities.
        position: Kind of positions: ``"window"`` (default), ``"clipped"`` (strategy 2 of the paper), ``"sinusoid"``
            (strategy 1) or ``None``, as in :class:`PerformerAttention`.
        pos_dim: Dimension of the image: 2 (default), or 3 for volumes.
        cutoff: Pixels at a smaller Manhattan distance are near. Default 6.
        periodic: Join opposite borders of the image. Default ``False``.
        dropout: Dropout probability of the outputs of attention and of the feed-forward part. Default 0.1.
        norm: Normalisation before the last linear map: ``"layer"`` (default), of every pixel before the mean, or
            ``"batch"``, after it.
        attn_kwargs: Further arguments of :class:`PerformerAttention`. If not given, ``redraw_interval`` is 100 and
            ``method`` is ``"features"``. Queries and keys are as wide as values, as in the paper.

    Shapes:
        ``(B, in_channels, H, W)`` -> ``(B, num_classes)``; any H and W, not fixed at construction.

    Raises:
        ValueError: If an argument is not allowed, or does not fit another one, or if the input has another shape.

    Source: relative-performer section 2.3 and appendix A.2. The paper's code uses a class token instead of the mean.

    Example:
        >>> import torch
        >>> model = RelativePerformer(1, 10, channels=32, num_layers=2, heads=4)
        >>> model(torch.rand(3, 1, 9, 12)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        channels: int = 256,
        num_layers: int = 6,
        heads: int = 8,
        embedding: str = "linear",
        position: str | None = "window",
        pos_dim: int = 2,
        cutoff: int = CUTOFF,
        periodic: bool = False,
        dropout: float = 0.1,
        norm: str = "layer",
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        checks.positive(num_layers=num_layers, heads=heads)
        self.in_channels, self.num_classes, self.position = in_channels, num_classes, position
        self.pos_dim, self.cutoff, self.periodic = pos_dim, cutoff, periodic
        options = {
            "position": position, "pos_dim": pos_dim, "cutoff": cutoff, "redraw_interval": REDRAW,
            "method": "features", "key_channels": max(1, channels // heads), **(attn_kwargs or {}),
        }  # fmt: skip
        self.embedding = PixelEmbedding(in_channels, channels, embedding)
        self.blocks = nn.ModuleList(
            PerformerBlock(PerformerAttention(channels, channels, heads, **options), channels, dropout)
            for _ in range(num_layers)
        )
        self.readout = MeanReadout(channels, num_classes, norm)

    def settings(self) -> dict[str, Any]:
        return {"position": self.position, "periodic": self.periodic}

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores ``(B, num_classes)`` of images ``(B, in_channels, H, W)``, or of volumes with ``pos_dim=3``."""
        if image.ndim != 2 + self.pos_dim or image.shape[1] != self.in_channels or not min(image.shape[2:]):
            axes = "H, W" if self.pos_dim == 2 else f"{self.pos_dim} axes"
            raise ValueError(f"input must be (B, {self.in_channels}, {axes}) with pixels, got {tuple(image.shape)}")
        grid = PixelGrid(tuple(image.shape[2:]), self.cutoff, self.periodic)
        first: Any = self.blocks[0]
        near = grid.neighbors(image.shape[0], image.device) if first.attention.needs.neighbors else None
        x = self.embedding(image.flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, grid=grid, neighbors=near)
        return self.readout(x)
