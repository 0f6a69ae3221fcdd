"""Near pairs with true softmax weights: biases and values of their offsets, distances and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.positions import OffsetDistance, OffsetMLP, OffsetTable, OffsetValues
from ...functional.performer.near import Near
from ...functional.performer.window import window_attention_of_nodes
from ...modes import full_precision
from ...pairs import Pairs
from ..modules import reset_children
from .positions import Graphs, Position

OFFSETS: dict[str, Callable[[int, int, Any], OffsetTable | OffsetMLP | OffsetDistance]] = {
    "table": OffsetTable,
    "mlp": OffsetMLP,
    "distance": OffsetDistance,
}
_LENGTHS = 2.0  # mean lengths of edges that "auto" takes for the cutoff


class WindowPosition(Position):
    """Near pairs get a true softmax weight with a bias of their offset; everything is reached by features besides."""

    needs_neighbors = weighs_pairs = True
    why = "near pairs need offsets, from pos, edges or a grid"
    length: Tensor

    def __init__(
        self, heads: int, pos_dim: int, cutoff: float | str, offset: str, values: bool, head_channels: int,
        edge_dim: int | None,
    ) -> None:  # fmt: skip
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
        return lengths / torch.where(self.length > 0, self.length, 1.0).to(lengths.dtype) if self.measures else lengths

    def _look(self) -> None:
        """See whether there is a length, where the buffer is another, or was written to."""
        now = id(self.length), self.length._version
        if now != self._looked_at:
            self._known, self._looked_at = bool(self.length > 0), now

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.measures:
            self._look()

    def measure(self, near: Pairs) -> None:
        if self.measures and not torch.compiler.is_compiling():
            self._look()
        if not self.measures or self._known or not (len(near.offsets) or self.offset_values):
            return
        if torch.compiler.is_compiling() or not self.training:
            raise ValueError(
                "cutoff='auto' must have seen edges in training first: call the layer once in training mode, outside "
                "torch.compile, or give a number"
            )
        with torch.no_grad():
            lengths = torch.linalg.vector_norm(near.offsets.double(), dim=-1)
            mean = _LENGTHS * (lengths if near.exists is None else lengths[near.exists]).mean()
            if 0 < float(mean) < float("inf"):
                self.length.copy_(mean)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, graphs: Graphs, dropout: float = 0.0
    ) -> Tensor:
        offsets, values = graphs.near.offsets, None
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
            of_edges, of_loops = graphs.near.features, graphs.near.self_features
            if of_edges is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            with full_precision(offsets.device):
                dtype = self.edge_bias.weight.dtype
                bias = bias + self.edge_bias(of_edges.to(dtype)).T
                self_bias = self_bias if of_loops is None else self_bias + self.edge_bias(of_loops.to(dtype)).T
        near = Near(graphs.near, bias, self_bias, self.far_bias, values)
        projection = None if graphs.pairs else projection
        return window_attention_of_nodes(query, key, value, projection, near, graphs.rows, dropout)
