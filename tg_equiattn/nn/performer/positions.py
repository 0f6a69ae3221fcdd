"""Kinds of positions in attention by random features: none, exact near pairs, and the strategies of the Relative
Performer's paper."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...edges import offsets_between
from ...encodings.positions import (
    ConstantBias,
    OffsetDistance,
    OffsetMLP,
    OffsetTable,
    OffsetValues,
    SinusoidEncoding,
)  # fmt: skip
from ...functional.performer.attention import drop_keys, linear_attention_impl
from ...functional.performer.clipped import clipped_attention_impl
from ...functional.performer.pairs import Near, pair_attention_impl
from ...functional.performer.window import window_attention_impl
from ...modes import full_precision
from ...neighbors import NeighborList, neighbor_list
from ..modules import reset_children

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from .nodes import Nodes

OFFSETS: dict[str | None, Callable[[int, int, Any], Any]] = {
    "table": OffsetTable,
    "mlp": OffsetMLP,
    "distance": OffsetDistance,
    None: ConstantBias,
}


class FeatureVariance(nn.Module):
    """The variance of the directions of random features, a learned number for each head, greater than 1/2.

    The estimate is unbiased for every variance (see :func:`softmax_features`). A small variance has a small error for
    short queries and keys, and a large variance for long ones, whose attention is sharp.

    With up to 4 channels it starts at 12: training then finds sharp attention, which it does not find from small
    variances (see docs/graph_settings.md). With more channels, features cannot follow sharp attention with any
    variance. The variance then starts where the error of a new layer is smallest, for an input of unit variance, with
    which |q|^2 + |k|^2 is 2 sqrt(dim) / 3.

    Source: Likhosherstov et al., Chefs' random tables (2022), FAVOR++, whose A is (1 - s) / 4 of the variance s.
    """

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.log = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        size = 2 * self.dim**0.5 / 3
        rho = (math.sqrt((2 * size + self.dim) ** 2 + 8 * self.dim * size) - 2 * size - self.dim) / (4 * size)
        start = 12.0 if self.dim <= 4 else (1 + 1 / rho) / 2
        nn.init.constant_(self.log, math.log(start - 0.5))

    def forward(self) -> Float[Tensor, " heads"]:
        return 0.5 + self.log.exp()


class Position(nn.Module):
    """Attention without positions, and the base class of all kinds of positions.

    ``forward`` returns the weighted means of values. ``projection`` holds the directions of random features, which are
    wider than queries by ``extra_channels``; if it is ``None``, weights are exact for all pairs.
    """

    needs_positions = False  # forward reads positions of nodes
    needs_neighbors = False  # forward reads near pairs
    whole_offsets = False  # offsets of near pairs must be whole numbers
    weighs_pairs = False  # each near pair has a weight of its own
    extra_channels = 0  # added to queries and keys before the random features
    edge_dim: int | None = None  # features of near pairs
    why = ""  # reason that an error gives where positions are missing

    def __init__(self, heads: int, pos_dim: int, unit: float = 1.0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.pos_dim, self.unit = heads, heads, pos_dim, unit
        self.variance: FeatureVariance | None = None

    def find_neighbors(self, pos: Float[Tensor, "nodes dim"], batch: Tensor | None) -> NeighborList:
        """Near pairs of nodes, which are closer than the unit, by Manhattan distance if offsets are whole numbers."""
        if self.whole_offsets:
            edges, _ = neighbor_list(pos, self.unit + self.pos_dim / 2, batch=batch, metric="manhattan")
            offsets = offsets_between(pos, edges, True)
            mask = offsets.abs().sum(-1) < self.unit
            return NeighborList(edges, pos.shape[0], offsets, mask=mask, between_positions=True, checked=True)
        edges, offsets = neighbor_list(pos, self.unit, batch=batch)
        return NeighborList(edges, pos.shape[0], offsets, between_positions=True, checked=True)

    def forward(
        self, query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "key_heads nodes d"],
        key_bias: Float[Tensor, "key_heads nodes 1"] | None, value: Float[Tensor, "heads nodes e"],
        projection: Float[Tensor, "features d"] | None, nodes: Nodes, dropout: float = 0.0,
    ) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
        if projection is None:
            return pair_attention_impl(query, key, value, nodes.node_batch, dropout)
        variance = None if self.variance is None else self.variance()
        value = drop_keys(value, dropout)
        return linear_attention_impl(query, key, value, projection, nodes.node_batch, variance, key_bias)[0]


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get more channels, whose products depend on relative positions only."""

    needs_positions = True
    why = "position='sinusoid' needs it"

    def __init__(self, heads: int, pos_dim: int) -> None:
        super().__init__(heads, pos_dim)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(
        self, query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "key_heads nodes d"],
        key_bias: Float[Tensor, "key_heads nodes 1"] | None, value: Float[Tensor, "heads nodes e"],
        projection: Float[Tensor, "features d"] | None, nodes: Nodes, dropout: float = 0.0,
    ) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
        position_query, position_key = self.sinusoid(nodes.pos)
        query, key = torch.cat([query, position_query], -1), torch.cat([key, position_key], -1)
        return super().forward(query, key, key_bias, value, projection, nodes, dropout)


class ClippedPosition(Position):
    """Strategy 2: half of the heads weigh values by their clipped distance only, the others have no positions."""

    needs_neighbors = whole_offsets = True
    why = "position='clipped' needs offsets, from pos, edges or a grid"

    def __init__(self, heads: int, pos_dim: int, cutoff: int, key_channels: int) -> None:
        super().__init__(heads, pos_dim, cutoff)
        position_heads = max(1, heads // 2)
        self.key_heads = heads - position_heads
        self.distance_table = nn.Parameter(torch.empty(position_heads, cutoff + 1, key_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.distance_table)

    def forward(
        self, query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "key_heads nodes d"],
        key_bias: Float[Tensor, "key_heads nodes 1"] | None, value: Float[Tensor, "heads nodes e"], projection: Any,
        nodes: Nodes, dropout: float = 0.0,
    ) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
        content, near = self.key_heads, nodes.near
        by_distance = clipped_attention_impl(
            query[content:], drop_keys(value[content:], dropout), projection, self.distance_table, near,
            nodes.node_batch,
        )  # fmt: skip
        if not content:
            return by_distance
        by_content = super().forward(query[:content], key, key_bias, value[:content], projection, nodes, dropout)
        return torch.cat([by_content, by_distance])


class WindowPosition(Position):
    """Near pairs have an exact softmax weight with a bias of their offset, in addition to the weight of all pairs."""

    needs_neighbors = weighs_pairs = True
    why = "near pairs need offsets, from pos, edges or a grid"

    def __init__(
        self, heads: int, pos_dim: int, cutoff: float, offset: str | None, value_channels: int | None,
        edge_dim: int | None,
    ) -> None:  # fmt: skip
        super().__init__(heads, 0 if offset is None else pos_dim, cutoff)
        self.whole_offsets, self.edge_dim = offset == "table", edge_dim
        self.offset_bias = OFFSETS[offset](pos_dim, heads, cutoff)
        self._warns_of_cutoff = offset == "distance"
        self.offset_values = None if value_channels is None else OffsetValues(self.offset_bias, value_channels)
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
        self, query: Float[Tensor, "heads nodes d"], key: Float[Tensor, "key_heads nodes d"],
        key_bias: Float[Tensor, "key_heads nodes 1"] | None, value: Float[Tensor, "heads nodes e"],
        projection: Float[Tensor, "features d"] | None, nodes: Nodes, dropout: float = 0.0,
    ) -> Float[Tensor, "heads nodes e"]:  # fmt: skip
        pairs, values = nodes.near, None
        offsets = pairs.offsets
        if not offsets.is_floating_point():
            offsets = offsets.to(torch.promote_types(query.dtype, torch.float32))
        every = torch.cat([offsets, offsets.new_zeros(1, self.pos_dim)])  # a node with itself comes last
        shared: tuple[Tensor, ...] = ()
        if self.offset_values is not None:
            features = self.offset_values(every, self.offset_bias)
            padding = value.shape[-1] - self.offset_values.map.shape[-1]  # channels of far offsets
            values = features[:-1], features[-1], nn.functional.pad(self.offset_values.map, (0, padding))
            shared = () if self.whole_offsets else (features,)  # the bias is a map of the same features
        bias, self_bias = self.offset_bias(every, *shared).split([offsets.shape[0], 1], 1)
        if self._warns_of_cutoff:
            self._warn_of_cutoff(bias[0].detach(), pairs.mask)
        if self.edge_bias is not None:
            if pairs.features is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            with full_precision(offsets.device):
                dtype = self.edge_bias.weight.dtype
                bias = bias + self.edge_bias(pairs.features.to(dtype)).T
                if pairs.self_features is not None:
                    self_bias = self_bias + self.edge_bias(pairs.self_features.to(dtype)).T
        near = Near(pairs, bias, self_bias, self.far_bias, values)
        variance = None if self.variance is None else self.variance()
        return window_attention_impl(query, key, value, projection, near, nodes.node_batch, dropout, variance, key_bias)

    @checks.of_values
    def _warn_of_cutoff(self, bias: Float[Tensor, " pairs"], mask: Bool[Tensor, " pairs"] | None) -> None:
        """Warn, once, if most near pairs are longer than the cutoff: their weight is zero."""
        bias = bias if mask is None else bias[mask]
        beyond = int((bias == -torch.inf).sum())
        if 2 * beyond > len(bias):
            self._warns_of_cutoff = False
            warnings.warn(
                f"offset='distance' leaves out near pairs longer than cutoff={self.unit:g}, with their edge_attr: "
                f"{beyond} of the {len(bias)} pairs of this call. Pass a larger cutoff, for example "
                "2 * mean_edge_length(pos, edge_index), or offset='mlp'",
                stacklevel=2,
            )
