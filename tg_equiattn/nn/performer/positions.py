"""Kinds of positions in linear attention: none, exact near pairs, and the strategies of the Relative Performer's paper.

Each kind is a module with parameters. Its ``forward`` returns the weighted means of values, (heads, nodes, channels).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.performer.linear_attention import Inputs, linear_attention_impl
from ...functional.performer.near_pairs import Near, clipped_attention_impl, pair_attention_impl, window_attention_impl
from ...modes import full_precision
from ..modules import reset_children
from .nodes import Needs, Nodes
from .offsets import ConstantBias, OffsetDistance, OffsetMLP, OffsetTable, OffsetValues, SinusoidEncoding

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

CUTOFF = 6  # pixels, as in the Relative Performer's paper
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

    Attributes:
        needs: inputs that are read beside features.
        key_heads: number of heads with keys.
        extra_channels: channels that are added to queries and keys before the random features.
        variance: variance of the directions of random features; ``None`` without random features.
    """

    extra_channels = 0

    def __init__(self, needs: Needs, key_heads: int) -> None:
        super().__init__()
        self.needs, self.key_heads = needs, key_heads
        self.variance: FeatureVariance | None = None

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        if inputs.projection is None:
            return pair_attention_impl(*inputs[:3], nodes.node_batch, inputs.dropout)
        return linear_attention_impl(inputs, nodes.node_batch)[0]


class SinusoidPosition(Position):
    """Strategy 1: queries and keys get more channels, whose products depend on relative positions only."""

    def __init__(self, heads: int, pos_dim: int) -> None:
        super().__init__(Needs(pos_dim, positions=True, why="position='sinusoid' needs it"), heads)
        self.sinusoid = SinusoidEncoding(pos_dim, heads)
        self.extra_channels = self.sinusoid.channels

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        query, key = self.sinusoid(nodes.pos)
        query, key = torch.cat([inputs.query, query], -1), torch.cat([inputs.key, key], -1)
        return super().forward(inputs._replace(query=query, key=key), nodes)


class ClippedPosition(Position):
    """Strategy 2: half of the heads weigh values by their clipped distance only, the others have no positions."""

    def __init__(self, heads: int, pos_dim: int, cutoff: int, key_channels: int) -> None:
        why = "position='clipped' needs offsets, from pos, edges or a grid"
        position_heads = max(1, heads // 2)
        super().__init__(Needs(pos_dim, cutoff, neighbors=True, whole=True, why=why), heads - position_heads)
        self.distance_table = nn.Parameter(torch.empty(position_heads, cutoff + 1, key_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.distance_table)

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        (query, _, value), content = inputs[:3], self.key_heads
        by_distance = inputs._replace(query=query[content:], value=value[content:])
        out = clipped_attention_impl(by_distance, self.distance_table, nodes.near, nodes.node_batch)
        if not content:
            return out
        by_content = inputs._replace(query=query[:content], value=value[:content])
        return torch.cat([super().forward(by_content, nodes), out])


class WindowPosition(Position):
    """Near pairs have an exact softmax weight with a bias of their offset, in addition to the weight of all pairs."""

    def __init__(
        self, heads: int, pos_dim: int, cutoff: float, offset: str | None, value_channels: int | None,
        edge_dim: int | None,
    ) -> None:  # fmt: skip
        needs = Needs(
            0 if offset is None else pos_dim, cutoff, neighbors=True, whole=offset == "table", edge_dim=edge_dim,
            why="near pairs need offsets, from pos, edges or a grid",
        )  # fmt: skip
        super().__init__(needs, heads)
        self.offset_bias = OFFSETS[offset](pos_dim, heads, cutoff)
        self._warns_of_cutoff = offset == "distance"
        self.offset_values = None if value_channels is None else OffsetValues(self.offset_bias, value_channels)
        self.edge_bias = None if edge_dim is None else nn.Linear(edge_dim, heads, bias=False)
        self.far_bias = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.zeros_(self.far_bias)

    def forward(self, inputs: Inputs, nodes: Nodes) -> Float[Tensor, "heads nodes e"]:
        pairs, values = nodes.near, None
        offsets = pairs.offsets
        if not offsets.is_floating_point():
            offsets = offsets.to(torch.promote_types(inputs.query.dtype, torch.float32))
        offsets = torch.cat([offsets, offsets.new_zeros(1, self.needs.dim)])  # a node with itself comes last
        shared: tuple[Tensor, ...] = ()
        if self.offset_values is not None:
            features = self.offset_values(offsets, self.offset_bias)
            padding = inputs.value.shape[-1] - self.offset_values.map.shape[-1]  # channels of far offsets
            values = features[:-1], features[-1], nn.functional.pad(self.offset_values.map, (0, padding))
            shared = () if self.needs.whole else (features,)  # the bias is a map of the same features
        bias, self_bias = self.offset_bias(offsets, *shared).split([offsets.shape[0] - 1, 1], 1)
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
        return window_attention_impl(inputs, Near(pairs, bias, self_bias, self.far_bias, values), nodes.node_batch)

    @checks.of_values
    def _warn_of_cutoff(self, bias: Float[Tensor, " pairs"], mask: Bool[Tensor, " pairs"] | None) -> None:
        """Warn, once, if most near pairs are longer than the cutoff: their weight is zero."""
        bias = bias if mask is None else bias[mask]
        beyond = int((bias == -torch.inf).sum())
        if 2 * beyond > len(bias):
            self._warns_of_cutoff = False
            warnings.warn(
                f"offset='distance' leaves out near pairs longer than cutoff={self.needs.unit:g}, with their "
                f"edge_attr: {beyond} of the {len(bias)} pairs of this call. Pass a larger cutoff, for example "
                "2 * mean_edge_length(pos, edge_index), or offset='mlp'",
                stacklevel=2,
            )


def make_position(
    position: str | None, heads: int, pos_dim: int, cutoff: float | None, offset: str | None, values: str,
    edge_dim: int | None, method: str | None, key_channels: int, head_channels: int,
) -> Position:  # fmt: skip
    """The module of a kind of positions. Raise ValueError for settings that it does not use, or that do not fit."""
    if position != "window":
        far = position is None and values != "content" and offset == "distance"
        for name, value, default in (("offset", "table" if far else offset, "table"), ("edge_dim", edge_dim, None)):
            if value != default:
                raise ValueError(
                    f"{name} must be {default!r} with position={position!r}, got {value!r}; for edges between nodes "
                    "without positions pass position='window', offset=None"
                )
    elif offset is None and values != "content":
        raise ValueError(f"values must be 'content' with offset=None, got {values!r}")
    if position in ("clipped", "sinusoid") and values != "content":
        raise ValueError(f"values must be 'content' with position={position!r}, got {values!r}")
    if position == "clipped" and method == "pairs":
        raise ValueError("method must be 'features' with position='clipped', got 'pairs'")
    unit = _cutoff(position, cutoff, offset)
    if position == "window":
        value_channels = head_channels if values == "offset" else None
        return WindowPosition(heads, pos_dim, unit, offset, value_channels, edge_dim)
    if position == "clipped":
        return ClippedPosition(heads, pos_dim, int(unit), key_channels)
    if position == "sinusoid":
        return SinusoidPosition(heads, pos_dim)
    return Position(Needs(pos_dim, unit), heads)


def _cutoff(position: str | None, cutoff: float | None, offset: str | None) -> float:
    """The cutoff of a layer, or its default. Raise ValueError if it does not fit the kind of positions."""
    if offset is None:
        if cutoff is not None:
            raise ValueError(f"cutoff must be None with offset=None, got {cutoff}: edges are the near pairs")
        return 1.0
    if cutoff is None and offset != "table":
        raise ValueError(
            f"cutoff must be given with offset={offset!r}: a length in the unit of pos, for example "
            "2 * mean_edge_length(pos, edge_index)"
        )
    cutoff = CUTOFF if cutoff is None else cutoff
    if position == "clipped" or (position == "window" and offset == "table"):
        checks.positive(cutoff=cutoff)  # type: ignore[arg-type]
    else:
        checks.positive_number(cutoff=cutoff)
    return cutoff
