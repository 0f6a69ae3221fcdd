"""The Performers of the paper, with positions in queries, keys or weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...functional.linear.clipped import Aggregate, sum_aggregation
from ...grids import PixelGrid
from ...neighbors import Neighbors
from .kernel_attention import KernelAttention
from .near_positions import ClippedPosition
from .positions import AbsolutePosition, Position, SinusoidPosition

POSITIONS = ("clipped", "sinusoid", "absolute")


class PositionalPerformerAttention(KernelAttention):
    r"""Attention by random features with the positions that the Relative Performer's paper compares.

    ==============  ================================================================================  ==============
    position        weight of key j for query i                                                       translation
    ==============  ================================================================================  ==============
    ``"clipped"``   half of the heads, one at least, :math:`\langle \phi(q_i), \phi(w_{d(i,j)})       exact, any draw
                    \rangle`, d the Manhattan distance up to ``max_distance``; the others without
                    positions
    ``"sinusoid"``  :math:`\langle \phi([q_i, q_p(x_i)]), \phi([k_j, k_p(x_j)]) \rangle`, where       in expectation
                    :math:`\langle q_p, k_p \rangle` depends on :math:`x_i - x_j`                     over draws only
    ``"absolute"``  without positions, after adding sinusoids of them to the input                    no
    ==============  ================================================================================  ==============

    For work on graphs take :class:`PerformerAttention`.

    Args:
        in_channels, out_channels, heads, pos_dim, num_random_features, redraw_interval: as
            :class:`PerformerAttention`; ``in_channels`` is not -1 with ``"absolute"``.
        position: see the table.
        max_distance: up to which ``"clipped"`` tells whole distances apart.

    Shapes:
        as :class:`PerformerAttention`.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer section 2.3, strategies 1 (``"sinusoid"``) and 2 (``"clipped"``). The paper has weights
    :math:`w_1, ..., w_k`; here there is also :math:`w_0`, for a node with itself.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> layer = PositionalPerformerAttention(16, 32, heads=4, position="clipped", max_distance=3)
        >>> layer(torch.randn(2, 35, 16), grid=PixelGrid((5, 7), max_distance=3)).shape
        torch.Size([2, 35, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str = "clipped",
        pos_dim: int = 2,
        max_distance: int = 6,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, heads)
        checks.positive(pos_dim=pos_dim)
        checks.choice("position", position, POSITIONS)
        self.position, self.pos_dim, self.max_distance = position, pos_dim, max_distance
        positions: Position
        if position == "clipped":
            positions = ClippedPosition(heads, pos_dim, max_distance, self.head_channels)
        elif position == "sinusoid":
            positions = SinusoidPosition(heads, pos_dim)
        else:
            checks.positive(in_channels=in_channels)
            positions = AbsolutePosition(heads, pos_dim, in_channels)
        self._build(in_channels, positions, num_random_features, redraw_interval)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        pos: Tensor | None = None,
        grid: PixelGrid | None = None,
        neighbors: Neighbors | None = None,
        aggregate: Aggregate = sum_aggregation,
    ) -> Any:
        """Attend; arguments as :meth:`PerformerAttention.forward`, and ``aggregate``: how ``"clipped"`` sums values
        over the pairs of a sparse relation, see :func:`~tg_equiattn.functional.clipped_attention`."""
        return self._attend(
            x, mask=mask, batch=batch, batch_size=batch_size, pos=pos, grid=grid, neighbors=neighbors,
            aggregate=aggregate,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, position={self.position!r}"
