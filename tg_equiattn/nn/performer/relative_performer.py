"""The Relative Performer: an image classifier of pixels, and its pre-norm block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import AbsoluteEncoding
from ...grids import PixelGrid
from ...layer_norm import LayerNorm
from ..children import reset_children
from .attention import CUTOFF, POSITIONS, KernelAttention, PerformerAttention, PositionalPerformerAttention
from .pixel_layers import MeanReadout, PixelEmbedding

REDRAW = 100  # training steps: drawing at every one keeps the paper's models from learning


def pixel_attention(
    channels: int, heads: int, position: str | None, attn_kwargs: Mapping[str, Any] | None, **options: Any
) -> KernelAttention:
    """The attention of a model of pixels whose positions are of this kind; ``"absolute"`` ones are added before."""
    options = {"redraw_interval": REDRAW, **options, **(attn_kwargs or {})}
    if position in ("clipped", "sinusoid"):
        return PositionalPerformerAttention(channels, channels, heads, position=position, **options)
    checks.choice("position", "None" if position is None else position, ("window", *POSITIONS, "None"))
    options = {"offset": "table" if position == "window" else None, "method": "features", **options}
    return PerformerAttention(channels, channels, heads, **options)


class PerformerBlock(nn.Module):
    r"""Pre-norm transformer block: :math:`x \leftarrow x + \mathrm{attention}(\mathrm{norm}\,x)`, then
    :math:`x \leftarrow x + \mathrm{feedforward}(\mathrm{norm}\,x)`, a GELU between two linear maps, of four times the
    channels between them.

    Args:
        attention: a module from channels to channels; it gets all other arguments of the call.
        channels: width.
        dropout: of both parts' outputs, and within the feed-forward part.
    """

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
        mask = kwargs.get("mask")
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
        x = x + self.dropout(self.attention(self.attention_norm(x), *args, **kwargs))
        return x + self.feedforward(self.feedforward_norm(x))

    def reset_parameters(self) -> None:
        reset_children(self)


def redraw_blocks(blocks: Iterable[Any], generator: torch.Generator | None) -> None:
    """Draw new random features in every block."""
    for block in blocks:
        block.attention.redraw_features(generator)


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
        position: ``"window"``, near pairs as :class:`PerformerAttention` has them; as the paper, ``"clipped"``, where
            half of the heads, one at least, weigh pixels by their Manhattan distance up to ``cutoff``, exact for any
            draw, and ``"sinusoid"``, whose products of queries and keys depend on relative positions, in expectation
            over draws only; ``"absolute"``, sinusoids that are added once, to the embedding; or ``None``.
        cutoff, periodic: which pixels are near, as :class:`~tg_equiattn.grids.PixelGrid` has ``max_distance``.
        dropout: of the outputs of attention and of the feed-forward part.
        norm: before the last linear map: ``"layer"``, at every pixel before the mean, or ``"batch"``, after it, with
            which small data are learned far faster.
        attn_kwargs: further arguments of the attention. ``redraw_interval`` is 100 unless it is among them: drawing at
            every step keeps the paper's models from learning (the authors' log has 42 % on MNIST against 98.5 %).

    Shapes:
        ``(B, in_channels, H, W)`` -> ``(B, num_classes)``; any H and W, not fixed at construction.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer section 2.3, strategies 1 (``"sinusoid"``) and 2 (``"clipped"``), and appendix A.2 (the
    paper trains with learning rate 5e-4 and batches of 22 images). The paper's code reads classes off a class token,
    without a last norm.

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
        cutoff: int = CUTOFF,
        periodic: bool = False,
        dropout: float = 0.1,
        norm: str = "layer",
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        checks.positive(depth=depth)
        self.embedding = PixelEmbedding(in_channels, channels, embedding)
        self.absolute = AbsoluteEncoding(channels, 2) if position == "absolute" else None
        self.cutoff, self.periodic = cutoff, periodic
        self.blocks = nn.ModuleList(
            PerformerBlock(pixel_attention(channels, heads, position, attn_kwargs, cutoff=cutoff), channels, dropout)
            for _ in range(depth)
        )
        self.readout = MeanReadout(channels, num_classes, norm)

    def forward(self, image: Tensor) -> Tensor:
        if image.ndim != 4 or image.shape[1] != self.embedding.in_channels or not min(image.shape[2:]):
            raise ValueError(
                f"input must be (B, {self.embedding.in_channels}, H, W) with pixels, got {tuple(image.shape)}"
            )
        grid = PixelGrid(tuple(image.shape[2:]), self.cutoff, self.periodic)
        x = self.embedding(image.flatten(2).transpose(1, 2))
        if self.absolute is not None:
            pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
            x = x + self.absolute(pos).to(x.dtype)
        first: Any = self.blocks[0]
        near = grid.neighbors(image.shape[0], x.device) if first.attention.needs_neighbors else None
        for block in self.blocks:
            x = block(x, grid=grid, neighbors=near)
        return self.readout(x, lambda x: x.mean(1))

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in every block."""
        redraw_blocks(self.blocks, generator)

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)
