"""Near pairs with true softmax weights: biases and values of their offsets, distances and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import OffsetDistance, OffsetMLP, OffsetTable, OffsetValues
from ...functional.performer.near import Near
from ...functional.performer.window import window_attention_of_nodes
from ...modes import full_precision
from ...neighbors import NeighborList
from ..modules import reset_children
from .positions import Graphs, Position

OFFSETS: dict[str, Callable[[int, int, Any], OffsetTable | OffsetMLP | OffsetDistance]] = {
    "table": OffsetTable,
    "mlp": OffsetMLP,
    "distance": OffsetDistance,
}


class WindowPosition(Position):
    """Near pairs get a true softmax weight with a bias of their offset; everything is reached by features besides."""

    needs_neighbors = weighs_pairs = True
    why = "near pairs need offsets, from pos, edges or a grid"

    def __init__(
        self, heads: int, pos_dim: int, cutoff: float, offset: str, values: bool, head_channels: int,
        edge_dim: int | None,
    ) -> None:  # fmt: skip
        self.whole_offsets, self.edge_dim = offset == "table", edge_dim
        if self.whole_offsets:
            checks.positive(cutoff=cutoff)  # type: ignore[arg-type]
        else:
            checks.positive_number(cutoff=cutoff)
        super().__init__(heads, pos_dim, cutoff)
        self.offset_bias = OFFSETS[offset](pos_dim, heads, self.unit)
        self.offset_values = OffsetValues(self.offset_bias, head_channels) if values else None
        self.edge_bias = None if edge_dim is None else nn.Linear(edge_dim, heads, bias=False)
        self.far_bias = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.zeros_(self.far_bias)

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> NeighborList:
        if self.edge_bias is not None:
            raise ValueError("edge_index and edge_attr must be given with edge_dim, got neither")
        return super().find_neighbors(pos, batch)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        offsets, values = graphs.near.offsets, None
        if not offsets.is_floating_point():
            offsets = offsets.to(torch.promote_types(query.dtype, torch.float32))
        own = offsets.new_zeros(1, self.pos_dim)
        known: tuple[Tensor, ...] = ()
        if self.offset_values is not None:
            features, itself = (self.offset_values(x, self.offset_bias) for x in (offsets, own))
            beside = value.shape[-1] - self.offset_values.map.shape[-1]  # positions, which stay as they are
            values = features, itself[0], nn.functional.pad(self.offset_values.map, (0, beside))
            known = () if self.whole_offsets else (features,)  # which a bias that is no table shares
        bias, self_bias = self.offset_bias(offsets, *known), self.offset_bias(own)
        if self.edge_bias is not None:
            of_edges, of_loops = graphs.near.features, graphs.near.self_features
            if of_edges is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            with full_precision(offsets.device):
                dtype = self.edge_bias.weight.dtype
                bias = bias + self.edge_bias(of_edges.to(dtype)).T
                self_bias = self_bias if of_loops is None else self_bias + self.edge_bias(of_loops.to(dtype)).T
        near = Near(graphs.near, bias, self_bias, self.far_bias, values)
        return window_attention_of_nodes(query, key, value, projection, near, graphs.rows, dropout)
