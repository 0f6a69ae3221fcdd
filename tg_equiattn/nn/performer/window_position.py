"""Near pairs with true softmax weights: biases and values of their offsets, distances and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import OffsetDistance, OffsetMLP, OffsetTable, OffsetValues
from ...functional.performer.near import Near
from ...functional.performer.window import window_attention_of_nodes
from ...pairs import Pairs
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
_LENGTHS = 2.0  # mean lengths of edges that "auto" takes for the cutoff


class WindowPosition(Position):
    """Near pairs get a true softmax weight with a bias of their offset; everything is reached by features besides.

    Args:
        heads, pos_dim: of attention.
        cutoff: in the unit of positions; ``"auto"`` measures it once, as twice the mean length of the first edges in
            training.
        offset: what the bias is made of.
        values: whether near pairs add a function of their offset to the value.
        head_channels: of values.
        edge_dim: features of an edge, which bias its score too; ``None`` for none.
    """

    needs_neighbors = weighs_pairs = True
    why = "near pairs need offsets, from pos, edges or a grid"
    length: Tensor

    def __init__(
        self,
        heads: int,
        pos_dim: int,
        cutoff: float | str,
        offset: str,
        values: bool,
        head_channels: int,
        edge_dim: int | None,
    ) -> None:
        self.whole_offsets, self.edge_dim = offset == "table", edge_dim
        self.measures = cutoff == "auto" and not self.whole_offsets
        if self.whole_offsets:
            checks.positive(cutoff=cutoff)  # type: ignore[arg-type]
        elif isinstance(cutoff, str) and not self.measures:
            raise ValueError(f"cutoff must be a positive number or 'auto', got {cutoff!r}")
        elif not self.measures:
            checks.positive_number(cutoff=cutoff)  # type: ignore[arg-type]
        super().__init__(heads, pos_dim, 1.0 if self.measures else cast(float, cutoff))
        self.offset_bias = OFFSETS[offset](pos_dim, heads, self.unit)
        self.offset_values = OffsetValues(self.offset_bias, head_channels) if values else None
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

    def find_neighbors(self, pos: Tensor, batch: Tensor | None) -> Pairs:
        if self.measures:
            raise ValueError("cutoff must be a number where near pairs are found from pos, got 'auto': give edges")
        if self.edge_bias is not None:
            raise ValueError("edge_index and edge_attr must be given with edge_dim, got neither")
        return super().find_neighbors(pos, batch)

    def in_units(self, lengths: Tensor) -> Tensor:
        return self._measured(lengths) / self.unit

    def _measured(self, lengths: Tensor) -> Tensor:
        """By the length that is measured once, where it is."""
        return lengths / self.length.to(lengths.dtype) if self.measures and self._is_known() else lengths

    def measure(self, near: Pairs) -> None:
        if not self.measures or self._is_known() or not (len(near.offsets) or self.offset_values):
            return
        if torch.compiler.is_compiling() or not self.training:
            raise ValueError(
                "cutoff='auto' must have seen edges in training first: call the layer once in training mode, outside "
                "torch.compile, or give a number"
            )
        if not len(near.offsets):
            return
        with torch.no_grad():
            lengths = torch.linalg.vector_norm(near.offsets.double(), dim=-1)
            mean = _LENGTHS * (lengths if near.exists is None else lengths[near.exists]).mean()
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
        offsets, values = graphs.neighbors.offsets, None
        if not offsets.is_floating_point():
            offsets = offsets.to(torch.promote_types(query.dtype, torch.float32))
        offsets = self._measured(offsets)
        own = offsets.new_zeros(1, self.pos_dim)
        known: tuple[Tensor, ...] = ()
        if self.offset_values is not None:
            features, itself = (self.offset_values(x, self.offset_bias) for x in (offsets, own))
            beside = value.shape[-1] - self.offset_values.map.shape[-1]  # positions, which stay as they are
            values = features, itself[0], nn.functional.pad(self.offset_values.map, (0, beside))
            known = () if self.whole_offsets else (features,)  # which a bias that is no table shares
        bias, self_bias = self.offset_bias(offsets, *known), self.offset_bias(own)
        if self.edge_bias is not None:
            of_edges, of_loops = graphs.neighbors.features, graphs.neighbors.self_features
            if of_edges is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            with full_precision(offsets.device):
                bias = bias + self._of_features(of_edges)
                self_bias = self_bias if of_loops is None else self_bias + self._of_features(of_loops)
        near = Near(graphs.neighbors, bias, self_bias, self.far_bias, values)
        projection = None if graphs.pairs else projection
        return window_attention_of_nodes(query, key, value, projection, near, graphs.rows, dropout)

    def _of_features(self, features: Tensor) -> Tensor:
        """What features (E, edge_dim) add to scores, (heads, E)."""
        edge_bias = cast(nn.Linear, self.edge_bias)
        return edge_bias(features.to(edge_bias.weight.dtype)).T
