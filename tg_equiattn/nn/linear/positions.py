"""Kinds of positions that attention can have without near pairs, and what all kinds have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...encodings.positions import AbsoluteEncoding, SinusoidEncoding
from ...functional.linear.attention import kept_keys, linear_attention_of_nodes
from ...functional.linear.pairs import pair_attention_of_nodes
from ...neighbors import Neighbors

if TYPE_CHECKING:
    from .nodes import Graphs


class Position(nn.Module):
    """No positions, and what all kinds of positions have in common: how the weighted means of values are made.

    Attributes:
        needs_positions: whether :meth:`encode` or :meth:`forward` read the positions of nodes.
        needs_neighbors: whether :meth:`forward` reads near pairs.
        whole_offsets: whether offsets of near pairs have to be whole numbers, up to rounding.
        weighs_pairs: whether each near pair has a weight of its own.
        invariant: whether what is learned of offsets is a function of lengths and angles alone.
        edge_dim: features that near pairs have; ``None`` for none.
        unit: the length that offsets are measured in.
        key_heads: heads that have keys.
        extra_channels: of queries and keys at the random features, beside those of a head.
        why: what an error says positions are needed for.
    """

    needs_positions = needs_neighbors = whole_offsets = weighs_pairs = invariant = False
    extra_channels = 0
    edge_dim: int | None = None
    why = ""

    def __init__(self, heads: int, pos_dim: int, unit: float = 1.0) -> None:
        super().__init__()
        self.key_heads, self.pos_dim, self.unit = heads, pos_dim, unit

    def encode(self, x: Tensor, pos: Tensor | None) -> Tensor:
        """The features (N, in_channels) that queries, keys and values are projected from."""
        return x

    def in_units(self, lengths: Tensor) -> Tensor:
        """Vectors (..., pos_dim) in the unit of offsets."""
        return lengths / self.unit

    def measure(self, near: Neighbors) -> None:
        """Take the unit from near pairs, where it is to be measured."""

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> Neighbors:
        """The near pairs of nodes at these positions (N, pos_dim)."""
        raise NotImplementedError(f"{type(self).__name__} needs no near pairs")

    def weights(self, query: Tensor, key: Tensor, projection: Tensor | None, graphs: Graphs) -> Tensor:
        """The shares (E + N, heads) of near pairs, then of nodes with themselves, in what a node attends to."""
        raise ValueError("return_attention_weights must be with near pairs, which have weights of their own")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        """The weighted means (N, heads, e) of values (N, heads, e), from queries (N, heads, d), keys (N, key_heads, d)
        and the directions of random features (m, d + extra_channels); or over all pairs, where graphs say so."""
        if graphs.pairs or projection is None:
            return pair_attention_of_nodes(query, key, value, None, graphs.rows, dropout)
        value = value * kept_keys(value, dropout) if dropout else value
        return linear_attention_of_nodes(query, key, value, projection, None, graphs.rows)[0]


class AbsolutePosition(Position):
    """Sinusoids of the position, added to the features."""

    needs_positions = True
    why = "position='absolute' needs it"

    def __init__(self, heads: int, pos_dim: int, in_channels: int) -> None:
        super().__init__(heads, pos_dim)
        self.absolute = AbsoluteEncoding(in_channels, pos_dim)

    def encode(self, x: Tensor, pos: Tensor | None) -> Tensor:
        return x + self.absolute(pos).to(x.dtype)


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get parts whose products depend on relative positions alone."""

    needs_positions = True
    why = "position='sinusoid' needs it"

    def __init__(self, heads: int, pos_dim: int) -> None:
        super().__init__(heads, pos_dim)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        position_query, position_key = self.sinusoid(graphs.pos)
        query, key = torch.cat([query, position_query], -1), torch.cat([key, position_key], -1)
        return super().forward(query, key, value, projection, graphs, dropout)
