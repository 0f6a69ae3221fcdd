"""The kinds of positions that attention through random features can have, each with its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import AbsoluteEncoding, OffsetMLP, OffsetTable, SinusoidEncoding
from ...functional.linear.attention import linear_attention_of_nodes
from ...functional.linear.clipped import clipped_attention_of_nodes
from ...functional.linear.window import window_attention_of_nodes
from ...neighbours import Neighbours, near_pairs
from ...offsets import offsets_between
from ..children import reset_children

if TYPE_CHECKING:
    from .nodes import Nodes

POSITIONS = ("window", "clipped", "sinusoid", "absolute", None)
OFFSETS = {"table": OffsetTable, "mlp": OffsetMLP}


class Position(nn.Module):
    """No positions, and what all kinds of positions have in common: how the weighted means of values are made.

    Attributes:
        needs_positions: whether :meth:`encode` or :meth:`forward` read the positions of nodes.
        needs_neighbours: whether :meth:`forward` reads near pairs.
        whole_offsets: whether offsets of near pairs have to be whole numbers, up to rounding.
        key_heads: heads that have keys.
        extra_channels: of queries and keys at the random features, beside those of a head.
        why: what an error says positions are needed for.
    """

    needs_positions = needs_neighbours = whole_offsets = False
    extra_channels = 0
    why = ""

    def __init__(self, heads: int, pos_dim: int, scale: float | None) -> None:
        super().__init__()
        self.key_heads, self.pos_dim, self.scale = heads, pos_dim, scale

    def encode(self, x: Tensor, pos: Tensor | None) -> Tensor:
        """The features (N, in_channels) that queries, keys and values are projected from."""
        return x

    def find_neighbours(self, pos: Tensor, batch: Tensor | None) -> Neighbours:
        """The near pairs of nodes at these positions (N, pos_dim)."""
        raise NotImplementedError(f"{type(self).__name__} needs no near pairs")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor, nodes: Nodes) -> Tensor:
        """The weighted means (N, heads, e) of values (N, heads, e), from queries (N, heads, d), keys (N, key_heads, d)
        and the directions of random features (m, d + extra_channels)."""
        return linear_attention_of_nodes(query, key, value, projection, self.scale, nodes.rows)[0]


class AbsolutePosition(Position):
    """Sinusoids of the position, added to the features."""

    needs_positions = True
    why = "position='absolute' needs it"

    def __init__(self, heads: int, pos_dim: int, scale: float | None, in_channels: int) -> None:
        super().__init__(heads, pos_dim, scale)
        self.absolute = AbsoluteEncoding(in_channels, pos_dim)

    def encode(self, x: Tensor, pos: Tensor | None) -> Tensor:
        return x + self.absolute(pos).to(x.dtype)


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get parts whose products depend on relative positions alone."""

    needs_positions = True
    why = "position='sinusoid' needs it"

    def __init__(self, heads: int, pos_dim: int, scale: float | None) -> None:
        super().__init__(heads, pos_dim, scale)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor, nodes: Nodes) -> Tensor:
        position_query, position_key = self.sinusoid(nodes.pos)
        query, key = torch.cat([query, position_query], -1), torch.cat([key, position_key], -1)
        return super().forward(query, key, value, projection, nodes)


class NearPosition(Position):
    """What the kinds that look at near pairs share: pairs are near whose Manhattan distance is below a limit."""

    needs_neighbours = whole_offsets = True

    def __init__(self, heads: int, pos_dim: int, scale: float | None, max_distance: int) -> None:
        super().__init__(heads, pos_dim, scale)
        self.max_distance = max_distance

    def find_neighbours(self, pos: Tensor, batch: Tensor | None) -> Neighbours:
        reach = self.max_distance + (self.pos_dim / 2 if self.whole_offsets else 0)
        target, source = near_pairs(pos, reach, batch=batch)
        offsets = offsets_between(pos, target, source, self.whole_offsets)
        if not self.whole_offsets:
            return Neighbours(target, source, offsets, pos.shape[0])
        return Neighbours(target, source, offsets, pos.shape[0], offsets.abs().sum(-1) < self.max_distance)


class ClippedPosition(NearPosition):
    """Strategy 2: some heads weigh values by the clipped distance alone, the others have no positions."""

    why = "position='clipped' needs offsets, from pos, edges or a grid"

    def __init__(
        self,
        heads: int,
        pos_dim: int,
        scale: float | None,
        max_distance: int,
        head_channels: int,
        position_heads: int | None,
    ) -> None:
        super().__init__(heads, pos_dim, scale, max_distance)
        self.position_heads = max(1, heads // 2) if position_heads is None else position_heads
        checks.positive(position_heads=self.position_heads)
        if self.position_heads > heads:
            raise ValueError(f"position_heads must be at most heads={heads}, got {position_heads}")
        self.key_heads = heads - self.position_heads
        self.distance_table = nn.Parameter(torch.empty(self.position_heads, max_distance + 1, head_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.distance_table)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor, nodes: Nodes) -> Tensor:
        sizes = self.key_heads, self.position_heads
        (query, position_query), (value, position_value) = query.split(sizes, 1), value.split(sizes, 1)
        by_distance = clipped_attention_of_nodes(
            position_query, position_value, projection, self.distance_table, nodes.neighbours, self.scale, nodes.rows,
            nodes.aggregate,
        )  # fmt: skip
        if not self.key_heads:
            return by_distance
        return torch.cat([super().forward(query, key, value, projection, nodes), by_distance], 1)


class WindowPosition(NearPosition):
    """Near pairs get a true softmax weight with a bias of their offset; everything is reached by features besides."""

    why = "position='window' needs offsets, from pos, edges or a grid"

    def __init__(self, heads: int, pos_dim: int, scale: float | None, max_distance: int, offset: str) -> None:
        super().__init__(heads, pos_dim, scale, max_distance)
        self.whole_offsets = offset == "table"
        self.offset_bias = OFFSETS[offset](pos_dim, heads, max_distance)
        self.far_bias = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.zeros_(self.far_bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor, nodes: Nodes) -> Tensor:
        offsets = nodes.neighbours.offsets
        self_bias = self.offset_bias(offsets.new_zeros(1, self.pos_dim))[:, 0]
        return window_attention_of_nodes(
            query, key, value, projection, self.offset_bias(offsets), self_bias, self.far_bias, nodes.neighbours,
            self.scale, nodes.rows,
        )  # fmt: skip


def make_position(
    position: str | None,
    *,
    in_channels: int,
    heads: int,
    head_channels: int,
    pos_dim: int,
    max_distance: int,
    offset: str,
    position_heads: int | None,
    scale: float | None,
) -> Position:
    """The kind of positions of a name; nowhere else is asked which it is."""
    checks.choice("offset", offset, OFFSETS)
    if position == "window":
        return WindowPosition(heads, pos_dim, scale, max_distance, offset)
    if position == "clipped":
        return ClippedPosition(heads, pos_dim, scale, max_distance, head_channels, position_heads)
    if position == "sinusoid":
        return SinusoidPosition(heads, pos_dim, scale)
    if position == "absolute":
        return AbsolutePosition(heads, pos_dim, scale, in_channels)
    if position is None:
        return Position(heads, pos_dim, scale)
    raise ValueError(f"position must be one of {POSITIONS}, got {position!r}")
