"""What attention by random features knows of positions: nothing, or what the Relative Performer's paper compares."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ... import checks
from ...edges import offsets_between
from ...encodings.positions import SinusoidEncoding
from ...functional.performer.attention import linear_attention_of_nodes
from ...functional.performer.clipped import clipped_attention_of_nodes
from ...functional.performer.pairs import pair_attention_of_nodes
from ...neighbors import NeighborList, neighbor_list


class Graphs(Protocol):
    """Graphs to attend to: rows of their nodes, and where a kind of positions needs them, positions (nodes, dim) and
    near pairs."""

    rows: Any
    pos: Any
    near: Any


class Position(nn.Module):
    """No positions, and what all kinds of positions have in common: how the weighted means of values are made."""

    needs_positions = False  # whether forward reads the positions of nodes
    needs_neighbors = whole_offsets = False  # whether forward reads near pairs, and their offsets are whole numbers
    weighs_pairs = False  # whether each near pair has a weight of its own
    extra_channels = 0  # of queries and keys at the random features, beside those of a head
    edge_dim: int | None = None  # features of near pairs
    why = ""  # an error says that positions are needed

    def __init__(self, heads: int, pos_dim: int, unit: float = 1.0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.pos_dim, self.unit = heads, heads, pos_dim, unit

    def in_units(self, lengths: Tensor) -> Tensor:
        """Vectors (..., pos_dim) in the unit of offsets."""
        return lengths / self.unit

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> NeighborList:
        """Nodes (N, pos_dim) nearer than the unit: by Manhattan distances where offsets are whole, or Euclidean."""
        if self.whole_offsets:
            edges, _ = neighbor_list(pos, self.unit + self.pos_dim / 2, batch=batch, metric="manhattan")
            offsets = offsets_between(pos, edges[1], edges[0], True)
            mask = offsets.abs().sum(-1) < self.unit
            return NeighborList(edges, pos.shape[0], offsets, mask=mask, between_positions=True, checked=True)
        edges, offsets = neighbor_list(pos, self.unit, batch=batch)
        return NeighborList(edges, pos.shape[0], offsets, between_positions=True, checked=True)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        """The weighted means (N, heads, e) of values (N, heads, e), from queries (N, heads, d), keys (N, key_heads, d)
        and the directions of random features (m, d + extra_channels); over all pairs where there are no directions."""
        if projection is None:
            return pair_attention_of_nodes(query, key, value, graphs.rows, dropout)
        return linear_attention_of_nodes(query, key, value, projection, graphs.rows, dropout)[0]


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get parts whose products depend on relative positions alone."""

    needs_positions = True
    why = "position='sinusoid' needs it"

    def __init__(self, heads: int, pos_dim: int) -> None:
        super().__init__(heads, pos_dim)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Any, graphs: Graphs, *rest: Any) -> Tensor:
        position_query, position_key = self.sinusoid(graphs.pos)
        query, key = torch.cat([query, position_query], -1), torch.cat([key, position_key], -1)
        return super().forward(query, key, value, projection, graphs, *rest)


class ClippedPosition(Position):
    """Strategy 2: some heads weigh values by the clipped distance alone, the others have no positions."""

    needs_neighbors = whole_offsets = True
    why = "position='clipped' needs offsets, from pos, edges or a grid"

    def __init__(self, heads: int, pos_dim: int, cutoff: int, head_channels: int) -> None:
        checks.positive(cutoff=cutoff)
        super().__init__(heads, pos_dim, cutoff)
        self.position_heads = max(1, heads // 2)
        self.key_heads = heads - self.position_heads
        self.distance_table = nn.Parameter(torch.empty(self.position_heads, cutoff + 1, head_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.distance_table)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, projection: Any, graphs: Graphs, *rest: Any) -> Tensor:
        sizes = self.key_heads, self.position_heads
        (query, position_query), (value, position_value) = query.split(sizes, 1), value.split(sizes, 1)
        by_distance = clipped_attention_of_nodes(
            position_query, position_value, projection, self.distance_table, graphs.near, graphs.rows.node_batch
        )
        if not self.key_heads:
            return by_distance
        return torch.cat([super().forward(query, key, value, projection, graphs, *rest), by_distance], 1)
