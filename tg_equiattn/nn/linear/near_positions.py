"""Kinds of positions that look at near pairs: their offsets, distances and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import OffsetDistance, OffsetMLP, OffsetTable, OffsetValues
from ...functional.linear.clipped import clipped_attention_of_nodes
from ...functional.linear.window import PairValues, window_attention_of_nodes, window_weights_of_nodes
from ...neighbors import Neighbors, near_pairs
from ...offsets import offsets_between
from ...precision import full_precision
from ..children import reset_children
from .positions import Position

if TYPE_CHECKING:
    from .nodes import Graphs

OFFSETS: dict[str, Callable[[int, int, Any], OffsetTable | OffsetMLP | OffsetDistance]] = {
    "table": OffsetTable,
    "mlp": OffsetMLP,
    "distance": OffsetDistance,
}
_REACH = 2.0  # mean lengths of edges that "auto" takes for the distance


def _whole(max_distance: float | str) -> int:
    checks.positive(max_distance=max_distance)  # type: ignore[arg-type]
    return int(max_distance)


def _length(max_distance: float | str) -> float:
    if isinstance(max_distance, str):
        raise ValueError(f"max_distance must be a positive number or 'auto', got {max_distance!r}")
    checks.positive_number(max_distance=max_distance)
    return max_distance


class NearPosition(Position):
    """What the kinds that look at near pairs share: pairs are near below a distance, which is the Manhattan distance
    where offsets are whole and Euclidean elsewhere."""

    needs_neighbors = whole_offsets = True

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> Neighbors:
        if self.whole_offsets:
            target, source = near_pairs(pos, self.unit + self.pos_dim / 2, batch=batch, metric="manhattan")
            offsets = offsets_between(pos, target, source, True)
            near = Neighbors(target, source, offsets, pos.shape[0], offsets.abs().sum(-1) < self.unit)
        else:
            target, source = near_pairs(pos, self.unit, batch=batch)
            near = Neighbors(target, source, pos[source] - pos[target], pos.shape[0])
        near.between_positions = True
        return near


class ClippedPosition(NearPosition):
    """Strategy 2: some heads weigh values by the clipped distance alone, the others have no positions."""

    why = "position='clipped' needs offsets, from pos, edges or a grid"

    def __init__(self, heads: int, pos_dim: int, max_distance: float | str, head_channels: int) -> None:
        max_distance = _whole(max_distance)
        super().__init__(heads, pos_dim, max_distance)
        self.position_heads = max(1, heads // 2)
        self.key_heads = heads - self.position_heads
        self.distance_table = nn.Parameter(torch.empty(self.position_heads, max_distance + 1, head_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.distance_table)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        projection = cast(Tensor, projection)  # features are needed
        sizes = self.key_heads, self.position_heads
        (query, position_query), (value, position_value) = query.split(sizes, 1), value.split(sizes, 1)
        by_distance = clipped_attention_of_nodes(
            position_query, position_value, projection, self.distance_table, graphs.neighbors, None, graphs.rows,
            graphs.aggregate,
        )  # fmt: skip
        if not self.key_heads:
            return by_distance
        return torch.cat([super().forward(query, key, value, projection, graphs), by_distance], 1)


class WindowPosition(NearPosition):
    """Near pairs get a true softmax weight with a bias of their offset; everything is reached by features besides.

    Args:
        heads, pos_dim: of attention.
        max_distance: in the unit of positions; ``"auto"`` measures it once, as twice the mean length of the first
            edges in training.
        offset: what the bias is made of.
        values: whether near pairs add a function of their offset to the value.
        head_channels: of values.
        edge_dim: features of an edge, which bias its score too; ``None`` for none.
    """

    weighs_pairs = True
    why = "near pairs need offsets, from pos, edges or a grid"
    length: Tensor

    def __init__(
        self,
        heads: int,
        pos_dim: int,
        max_distance: float | str,
        offset: str,
        values: str,
        head_channels: int,
        edge_dim: int | None,
    ) -> None:
        self.measures = max_distance == "auto" and offset != "table"
        unit = _whole(max_distance) if offset == "table" else 1.0 if self.measures else _length(max_distance)
        super().__init__(heads, pos_dim, unit)
        self.whole_offsets = offset == "table"
        self.invariant, self.edge_dim = offset == "distance", edge_dim
        self.offset_bias = OFFSETS[offset](pos_dim, heads, unit)
        self.offset_values = None
        if values == "offset":
            self.offset_values = OffsetValues(self.offset_bias, head_channels)
        self.edge_bias = None if edge_dim is None else nn.Linear(edge_dim, heads, bias=False)
        self.far_bias = nn.Parameter(torch.zeros(heads))
        if self.measures:
            self.register_buffer("length", torch.tensor(torch.nan, dtype=torch.float64))
            self._known, self._looked_at = False, (0, 0)

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.zeros_(self.far_bias)
        if self.measures:
            self.length.fill_(torch.nan)

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> Neighbors:
        if self.measures:
            raise ValueError(
                "max_distance must be a number where near pairs are found from pos, got 'auto': give edges"
            )
        if self.edge_bias is not None:
            raise ValueError("edge_index and edge_attr must be given with edge_dim, got neither")
        return super().find_neighbors(pos, batch)

    def in_units(self, lengths: Tensor) -> Tensor:
        return self._measured(lengths) / self.unit

    def _measured(self, lengths: Tensor) -> Tensor:
        """By the length that is measured once, where it is."""
        return lengths / self.length.to(lengths.dtype) if self.measures and self._is_known() else lengths

    def measure(self, near: Neighbors) -> None:
        if not self.measures or self._is_known() or not (len(near.offsets) or self.offset_values):
            return
        if torch.compiler.is_compiling() or not self.training:
            raise ValueError(
                "max_distance='auto' must have seen edges in training first: call the layer once in training mode, "
                "outside torch.compile, or give a number"
            )
        if not len(near.offsets):
            return
        with torch.no_grad():
            lengths = torch.linalg.vector_norm(near.offsets.double(), dim=-1)
            mean = _REACH * (lengths if near.exists is None else lengths[near.exists]).mean()
            if 0 < float(mean) < float("inf"):
                self.length.copy_(mean)

    def _is_known(self) -> bool:
        """Whether there is a length; read anew where the buffer is another, or was written to."""
        if not torch.compiler.is_compiling():
            now = id(self.length), self.length._version
            if now != self._looked_at:
                self._known, self._looked_at = bool(self.length > 0), now
        return self._known

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.measures:
            self._is_known()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        offsets, features, extra = self._offsets(query, graphs), None, None
        if self.offset_values is not None:
            own = offsets.new_zeros(1, self.pos_dim)
            features, itself = (self.offset_values(x, self.offset_bias) for x in (offsets, own))
            beside = value.shape[-1] - self.offset_values.map.shape[-1]  # positions, which stay as they are
            extra = PairValues(features, itself[0], nn.functional.pad(self.offset_values.map, (0, beside)))
        return window_attention_of_nodes(
            query, key, value, None if graphs.pairs else projection, *self._biases(offsets, graphs, features),
            graphs.neighbors, None, graphs.rows, extra, dropout,
        )  # fmt: skip

    def weights(self, query: Tensor, key: Tensor, projection: Tensor | None, graphs: Graphs) -> Tensor:
        biases = self._biases(self._offsets(query, graphs), graphs)
        projection = None if graphs.pairs else projection
        return window_weights_of_nodes(query, key, projection, *biases, graphs.neighbors, None, graphs.rows)

    def _offsets(self, query: Tensor, graphs: Graphs) -> Tensor:
        offsets = graphs.neighbors.offsets
        if not offsets.is_floating_point():
            offsets = offsets.to(torch.promote_types(query.dtype, torch.float32))
        return self._measured(offsets)

    def _biases(self, offsets: Tensor, graphs: Graphs, features: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of pairs (heads, E), from the features of their values where they share them, of nodes with themselves
        (heads, 1 or N), and of what random features reach (heads,)."""
        known = () if features is None or self.whole_offsets else (features,)
        bias, itself = self.offset_bias(offsets, *known), self.offset_bias(offsets.new_zeros(1, self.pos_dim))
        if self.edge_bias is not None:
            of_edges, of_loops = graphs.neighbors.features, graphs.neighbors.self_features
            if of_edges is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            with full_precision(offsets.device):
                bias = bias + self._of_features(of_edges)
                itself = itself if of_loops is None else itself + self._of_features(of_loops)
        return bias, itself, self.far_bias

    def _of_features(self, features: Tensor) -> Tensor:
        """What features (E, edge_dim) add to scores, (heads, E)."""
        edge_bias = cast(nn.Linear, self.edge_bias)
        return edge_bias(features.to(edge_bias.weight.dtype)).T
