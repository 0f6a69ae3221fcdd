"""The Relative Performer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import AbsoluteEncoding
from ...grids import PixelGrid
from ..modules import StoresSettings, reset_children
from .attention import POSITIONS, PerformerAttention
from .pixel_model import MeanReadout, PerformerBlock, PixelEmbedding
from .random_features import DrawsFeatures
from .settings import CUTOFF

REDRAW = 100  # training steps between draws; with a draw at every step, the paper's models do not learn


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
            (strategy 1) or ``None``, as in :class:`PerformerAttention`; or ``"absolute"``, sinusoids that are added
            once, to the embedding, which is not equivariant to translations.
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
        checks.choice("position", str(position), (*POSITIONS, "absolute", "None"))
        self.in_channels, self.num_classes, self.position = in_channels, num_classes, position
        self.pos_dim, self.cutoff, self.periodic = pos_dim, cutoff, periodic
        options = {
            "position": None if position == "absolute" else position, "pos_dim": pos_dim, "cutoff": cutoff,
            "redraw_interval": REDRAW, "method": "features", "key_channels": max(1, channels // heads),
            **(attn_kwargs or {}),
        }  # fmt: skip
        self.embedding = PixelEmbedding(in_channels, channels, embedding)
        self.absolute = AbsoluteEncoding(channels, pos_dim) if position == "absolute" else None
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
        near = grid.neighbors(image.shape[0], image.device) if first.attention.needs_neighbors else None
        pos = None if self.absolute is None else self._grid_pos(grid, image.device)
        x = image.flatten(2).transpose(1, 2)
        return self._classify(x, pos, lambda x: x.mean(1), grid=grid, neighbors=near)

    def _grid_pos(self, grid: PixelGrid, device: torch.device) -> Tensor:
        return grid.pos(device, torch.promote_types(self.readout.head.weight.dtype, torch.float32))

    def _classify(self, x: Tensor, absolute_pos: Any, mean: Callable[[Tensor], Tensor], **attention: Any) -> Tensor:
        """Class scores of pixels x (..., in_channels). ``mean`` is the mean over pixels, and ``attention`` holds
        further arguments of attention layers."""
        x = self.embedding(x)
        if self.absolute is not None:
            x = x + self.absolute(absolute_pos).to(x.dtype)
        for block in self.blocks:
            x = block(x, **attention)
        return self.readout(x, mean)
