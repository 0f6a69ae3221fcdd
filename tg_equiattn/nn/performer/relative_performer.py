"""The Relative Performer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...grids import PixelGrid
from ..modules import StoresSettings
from .attention import CUTOFF
from .pixel_model import PixelModel


@checks.python_numbers
class RelativePerformer(PixelModel, StoresSettings):
    r"""An image classifier whose tokens are pixels: embedding, Performer blocks, mean over pixels, linear.

    Args:
        in_channels, num_classes: channels of the image; outputs.
        channels, depth, heads: width; number of blocks, and of attention heads.
        embedding: of a pixel: ``"linear"``, ``"mlp"`` or ``"lookup"``.
        position: ``"window"``, near pairs as :class:`PerformerAttention` has them; the paper's ``"clipped"``, where
            half of the heads, one at least, have weights :math:`\langle \phi(q_i), \phi(w_{d(i,j)}) \rangle`, d the
            Manhattan distance up to ``cutoff``, exact for any draw of the features, and ``"sinusoid"``, :math:`\langle
            \phi([q_i, q_p(x_i)]), \phi([k_j, k_p(x_j)]) \rangle`, where :math:`\langle q_p, k_p \rangle` depends on
            :math:`x_i - x_j`, in expectation over draws only; ``"absolute"``, sinusoids that are added once, to the
            embedding; or ``None``.
        cutoff, periodic: which pixels are near, as :class:`~tg_equiattn.grids.PixelGrid` has ``max_distance``.
        dropout: of the outputs of attention and of the feed-forward part.
        norm: before the last linear map: ``"layer"``, at every pixel before the mean, or ``"batch"``, after it.
        attn_kwargs: further arguments of the attention; ``redraw_interval`` is 100 unless it is among them.

    Shapes:
        ``(B, in_channels, H, W)`` -> ``(B, num_classes)``; any H and W, not fixed at construction.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer section 2.3, strategies 1 (``"sinusoid"``) and 2 (``"clipped"``, here with a weight
    :math:`w_0` besides, for a pixel with itself), and appendix A.2. The paper's code reads classes off a class token.

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
        checks.positive(depth=depth)
        super().__init__(
            in_channels, num_classes, channels, depth, heads, embedding, position, 2, cutoff, dropout, norm, attn_kwargs
        )
        self.cutoff, self.periodic = cutoff, periodic

    def settings(self) -> dict[str, Any]:
        return {"periodic": self.periodic}

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
