"""Positions in linear attention: none, or near pairs with a bias of their offset; and outputs of mean offsets."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.neighbors import NeighborList
from ..modules import reset_children
from ..shapes import Bool, Float, Int
from ..torch_state import Tables, is_readable, is_traced, is_transformed
from .linear_attention import Inputs, linear_attention
from .near_pairs import Near, clipped_attention, pair_attention, window_attention
from .nodes import Needs, Nodes

STD = 3.0  # standard deviation of initial biases of offsets; with less, attention has no directions and learns poorly
HIDDEN = 32  # width of the MLP of offsets
RADIAL = 16  # number of functions of the distance


class FeatureVariance(nn.Module):
    """The variance of the directions of random features, a learned number for each head, greater than 1/2.

    The estimate is unbiased for every variance (see :mod:`.linear_attention`). A small variance has a small error for
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
            return pair_attention(inputs, nodes.node_batch)
        return linear_attention(inputs, nodes.node_batch)[0]


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
        return window_attention(inputs, self._near(inputs, nodes.near), nodes.node_batch)

    def _near(self, inputs: Inputs, pairs: NeighborList) -> Near:
        """Biases of the pairs, and terms of their values."""
        offsets, values, dtype = pairs.offsets, None, inputs.query.dtype
        offsets = offsets if offsets.is_floating_point() else offsets.to(dtype)
        offsets = torch.cat([offsets, offsets.new_zeros(1, self.needs.dim)])  # a node with itself comes last
        shared: tuple[Tensor, ...] = ()
        if self.offset_values is not None:
            features = self.offset_values(offsets, self.offset_bias)
            padding = inputs.value.shape[-1] - self.offset_values.map.shape[-1]  # channels of far offsets
            of_features = nn.functional.pad(self.offset_values.map, (0, padding)).to(dtype)
            values = features[:-1].to(dtype), features[-1].to(dtype), of_features
            shared = () if self.needs.whole else (features,)  # the bias is a map of the same features
        bias, self_bias = self.offset_bias(offsets, *shared).split([offsets.shape[0] - 1, 1], 1)
        if self._warns_of_cutoff:
            self._warn_of_cutoff(bias[0].detach(), pairs.mask)
        if self.edge_bias is not None:
            if pairs.features is None:
                raise ValueError("edge_attr must be given with edge_dim, got None")
            own = self.edge_bias.weight.dtype
            bias = bias + self.edge_bias(pairs.features.to(own)).T
            if pairs.self_features is not None:
                self_bias = self_bias + self.edge_bias(pairs.self_features.to(own)).T
        return Near(pairs, bias.to(dtype), self_bias.to(dtype), self.far_bias.to(dtype), values)

    def _warn_of_cutoff(self, bias: Float[Tensor, " pairs"], mask: Bool[Tensor, " pairs"] | None) -> None:
        """Warn, once, if most near pairs are longer than the cutoff: their weight is zero."""
        if not is_readable(bias, mask):
            return
        bias = bias if mask is None else bias[mask]
        beyond = int((bias == -torch.inf).sum())
        if 2 * beyond > len(bias):
            self._warns_of_cutoff = False
            warnings.warn(
                f"offset='distance' leaves out near pairs longer than cutoff={self.needs.cutoff:g}, with their "
                f"edge_attr: {beyond} of the {len(bias)} pairs of this call. Pass a larger cutoff, for example "
                "2 * mean_edge_length(pos, edge_index), or offset='mlp'",
                stacklevel=2,
            )


class _OffsetBias(nn.Module):
    """Base class of biases of pairs, a number for each head, as functions of the offset in units of ``cutoff``.

    Some are linear maps of ``features`` of the offset, and ``forward`` then takes features that are already known.
    """

    def __init__(self, pos_dim: int, heads: int, cutoff: float) -> None:
        super().__init__()
        self.pos_dim, self.heads, self.cutoff = pos_dim, heads, cutoff

    def extra_repr(self) -> str:
        return f"pos_dim={self.pos_dim}, heads={self.heads}, cutoff={self.cutoff}"


class ConstantBias(_OffsetBias):
    """A bias for each head that is the same for all near pairs: for edges between nodes without positions."""

    def __init__(self, pos_dim: int, heads: int, cutoff: float) -> None:
        super().__init__(pos_dim, heads, cutoff)
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias, std=STD)

    def forward(self, offsets: Float[Tensor, "pairs dim"]) -> Float[Tensor, "heads pairs"]:
        return self.bias[:, None].expand(-1, offsets.shape[0])


class OffsetTable(_OffsetBias):
    """A bias for each head and each integer offset with coordinates from ``1 - cutoff`` to ``cutoff - 1``.

    Offsets are rounded. Offsets outside of the table raise ValueError. Where values cannot be read, their bias is minus
    infinity instead, so that such pairs are not near.
    """

    cutoff: int

    def __init__(self, pos_dim: int, heads: int, cutoff: int) -> None:
        super().__init__(pos_dim, heads, cutoff)
        self.table = nn.Parameter(torch.empty(heads, (2 * cutoff - 1) ** pos_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=STD)

    def forward(self, offsets: Float[Tensor, "pairs dim"] | Int[Tensor, "pairs dim"]) -> Float[Tensor, "heads pairs"]:
        radius = self.cutoff - 1
        whole = offsets.round() if offsets.is_floating_point() else offsets
        inside = (whole.abs() <= radius).all(-1)  # false for NaN and infinity
        if not checks.passes(inside.all, inside):
            wanted = f"below cutoff={self.cutoff} on every axis, got {offsets.min()} to {offsets.max()}"
            raise ValueError(f"offsets (edge_offset, or differences of pos) must be {wanted}")
        index, *rest = whole.long().unbind(-1)
        for along in rest:
            index = torch.add(along, index, alpha=2 * radius + 1)
        columns = self.table.shape[1]
        index = torch.where(inside, index + columns // 2, columns)
        table = nn.functional.pad(self.table, (0, 1), value=-math.inf)  # the last column is for offsets outside
        return nn.functional.embedding(index, table.T).T


class OffsetDistance(_OffsetBias):
    r"""A bias for each head as a smooth function of the distance, invariant to rotations and reflections.

    .. math:: b(x) = \sum_n a_n\, \mathrm{sinc}(n |x| / r) + 1 - \frac{1}{1 - |x|^2 / r^2}

    Here r is ``cutoff``. The weight :math:`e^b` of a pair and all its derivatives vanish where the distance reaches r,
    and the weight is zero beyond r.

    Source: Gasteiger et al., DimeNet (2020), for the basis.
    """

    def __init__(self, pos_dim: int, heads: int, cutoff: float) -> None:
        super().__init__(pos_dim, heads, cutoff)
        self.last = nn.Linear(RADIAL, heads, bias=False)
        self.divisors = Tables(_divisors)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.last.weight, std=STD)

    def features(self, offsets: Float[Tensor, "pairs dim"]) -> Float[Tensor, "pairs 16"]:
        """sinc(n |x| / r) for n = 1 ... 16: analytic in the squared distance, zero beyond r."""
        return self._waves(self._square(offsets))

    def _waves(self, square: Float[Tensor, " pairs"]) -> Float[Tensor, "pairs 16"]:
        if not (square.requires_grad or is_traced(square) or is_transformed()):
            phase = math.pi * square.clamp(max=1).sqrt()  # faster; not differentiable at 0
            phases = phase * torch.arange(1, RADIAL + 1, device=square.device)[:, None]
            return phases.sin().div_(phases).masked_fill_(phase == 0, 1.0).T
        phase = math.pi**2 * square.clamp(max=1)  # square of the phase pi |x| / r
        first, half = _sinc(torch.stack([phase, phase / 4]))
        twice_cosine = 2 - phase * half.square()
        waves = [torch.zeros_like(first), first]  # sin(n x) / x by their recursion, with the signs of the divisors
        for n in range(2, RADIAL + 1):
            waves.append(torch.addcmul(waves[-2], twice_cosine, waves[-1], value=(-1) ** (n + 1)))
        return torch.stack(waves[1:], -1) / self.divisors(square.device, square.dtype)

    def _square(self, offsets: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
        return (offsets.to(self.last.weight.dtype) / self.cutoff).square().sum(-1)

    def forward(
        self, offsets: Float[Tensor, "pairs dim"], features: Float[Tensor, "pairs features"] | None = None
    ) -> Float[Tensor, "heads pairs"]:
        square = self._square(offsets)
        bias = self.last(self._waves(square) if features is None else features).T
        inside = square < 1
        return (bias + 1 - 1 / torch.where(inside, 1 - square, 1.0)).masked_fill(~inside, -math.inf)


def _divisors() -> Float[Tensor, " 16"]:
    """1 to 16, with the signs of the recursion of :class:`OffsetDistance`."""
    return torch.tensor([n * (-1) ** (n // 2) for n in range(1, RADIAL + 1)], dtype=torch.float64)


class _Hidden(nn.Linear):
    """The hidden layer of an MLP of offsets in units of ``cutoff``. Initial weights are large, so that its outputs vary
    within the cutoff."""

    def __init__(self, pos_dim: int, cutoff: float) -> None:
        super().__init__(pos_dim, HIDDEN)
        self.cutoff = cutoff

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=2.0)
        nn.init.uniform_(self.bias, -2.0, 2.0)

    def forward(self, offsets: Float[Tensor, "pairs dim"]) -> Float[Tensor, "pairs 32"]:
        return nn.functional.silu(super().forward(offsets.to(self.weight.dtype) / self.cutoff))


class OffsetMLP(_OffsetBias):
    """A bias for each head as an MLP of the offset, for points off a grid."""

    def __init__(self, pos_dim: int, heads: int, cutoff: float) -> None:
        super().__init__(pos_dim, heads, cutoff)
        self.first, self.last = _Hidden(pos_dim, cutoff), nn.Linear(HIDDEN, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.first.reset_parameters()
        nn.init.normal_(self.last.weight, std=STD / math.sqrt(1.5 * HIDDEN))
        nn.init.zeros_(self.last.bias)

    def features(self, offsets: Float[Tensor, "pairs dim"]) -> Float[Tensor, "pairs 32"]:
        return self.first(offsets)

    def forward(
        self, offsets: Float[Tensor, "pairs dim"], features: Float[Tensor, "pairs features"] | None = None
    ) -> Float[Tensor, "heads pairs"]:
        return self.last(self.first(offsets) if features is None else features).T


class OffsetValues(nn.Module):
    r"""Terms g(x) = f(x) M that are added to the values of near pairs, with features f of the offset x.

    The features are those of the bias of offsets. A table has none; the features are then the hidden layer of an MLP,
    as in :class:`OffsetMLP`. M is the parameter ``map``, ``(heads, features, head_channels)``. ``forward`` returns f.
    """

    def __init__(self, bias: OffsetTable | OffsetMLP | OffsetDistance, head_channels: int) -> None:
        super().__init__()
        self.first = _Hidden(bias.pos_dim, bias.cutoff) if isinstance(bias, OffsetTable) else None
        features = RADIAL if isinstance(bias, OffsetDistance) else HIDDEN
        self.map = nn.Parameter(torch.empty(bias.heads, features, head_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.first is not None:
            self.first.reset_parameters()
        nn.init.normal_(self.map, std=self.map.shape[1] ** -0.5)

    def forward(
        self, offsets: Float[Tensor, "pairs dim"], bias: OffsetTable | OffsetMLP | OffsetDistance
    ) -> Float[Tensor, "pairs features"]:
        return bias.features(offsets) if self.first is None else self.first(offsets)  # type: ignore

    def extra_repr(self) -> str:
        return f"features={self.map.shape[1]}"


OFFSETS: dict[str | None, Callable[[int, int, Any], Any]] = {
    "table": OffsetTable,
    "mlp": OffsetMLP,
    "distance": OffsetDistance,
    None: ConstantBias,
}


class FarOffsets(nn.Module):
    r"""A smooth map from the weighted mean offsets :math:`o_e` of all heads to outputs. It starts at zero.

    The outputs are a linear map of the mean offsets. If ``invariant``, they are a linear map of
    :math:`g / (1 + g^2)^{1/4}` with the inner products g of mean offsets between heads.
    """

    def __init__(self, heads: int, pos_dim: int, out_channels: int, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        if invariant:
            self.pairs = Tables(functools.partial(torch.triu_indices, heads, heads))
        self.map = nn.Linear(heads * (heads + 1) // 2 if invariant else heads * pos_dim, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.map.weight)

    def forward(self, means: Float[Tensor, "heads nodes dim"]) -> Float[Tensor, "nodes channels"]:
        means = means.to(self.map.weight.dtype)
        if not self.invariant:
            return self.map(means.transpose(0, 1).flatten(1))
        means = means.mT.contiguous()  # sums over the last axis, of a few numbers, are slow
        first, second = (means.index_select(0, heads) for heads in self.pairs(means.device))
        products = (first * second).sum(1)
        return self.map((products * (1 + products.square()).sqrt().rsqrt()).T)


CUTOFF = 6  # pixels
LONGEST = 1e4  # scale of the sinusoids, in units of positions: Vaswani et al., Attention is all you need (2017), 3.5
LENGTH_SCALES = 4  # learned frequencies an axis: relative-performer appendix A.2


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


def _frequencies(count: int, device: torch.device | None = None) -> Float[Tensor, " count"]:
    return LONGEST ** -(torch.arange(count, device=device) / count)


class SinusoidEncoding(nn.Module):
    r"""Channels of queries and keys whose products depend on relative positions only (strategy 1).

    .. math:: q_p = [\sin \omega x, \cos \omega x] \begin{bmatrix} \alpha & \beta \\ -\beta & \alpha \end{bmatrix},
        \quad k_p = [\sin \omega x, \cos \omega x], \quad
        \langle q_p(x), k_p(x') \rangle = \alpha \cos \omega (x - x') + \beta \sin \omega (x - x')

    Every axis has 4 learned frequencies :math:`\omega`, which start at 1 and fall geometrically towards 1e-4.
    :math:`\alpha` and :math:`\beta` are learned for each head and frequency (Lemma 1). The products are exact functions
    of relative positions; attention that estimates their exponential by random features is one in expectation only.
    There are 8 · pos_dim channels.

    Source: relative-performer section 2.3, strategy 1, and appendix A.1. The appendix's second line has the sign of
    :math:`\beta` wrong twice; its result is right.
    """

    def __init__(self, pos_dim: int, heads: int) -> None:
        super().__init__()
        self.pos_dim, self.heads, self.channels = pos_dim, heads, 2 * pos_dim * LENGTH_SCALES
        self.frequency = nn.Parameter(torch.empty(pos_dim, LENGTH_SCALES))
        self.rotation = nn.Parameter(torch.empty(2, heads, pos_dim, LENGTH_SCALES))  # alpha, beta
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.frequency.copy_(_frequencies(LENGTH_SCALES).expand(self.pos_dim, -1))
            self.rotation.normal_(std=2.0)

    def forward(
        self, pos: Float[Tensor, "nodes dim"]
    ) -> tuple[Float[Tensor, "heads nodes channels"], Float[Tensor, "heads nodes channels"]]:
        exact = torch.promote_types(pos.dtype, self.frequency.dtype)  # positions in float64 may be large
        angle = pos.to(exact)[..., None] * self.frequency  # (N, dim, scales)
        sin, cos = (x.to(self.frequency.dtype) for x in (angle.sin(), angle.cos()))
        alpha, beta = self.rotation[:, :, None]  # (heads, 1, dim, scales)
        query = torch.stack([alpha * sin - beta * cos, beta * sin + alpha * cos], -1)
        key = torch.stack([sin, cos], -1).flatten(1)
        return query.flatten(2), key.expand(self.heads, -1, -1)

    def extra_repr(self) -> str:
        return f"pos_dim={self.pos_dim}, heads={self.heads}"


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
        out = clipped_attention(by_distance, self.distance_table, nodes.near, nodes.node_batch)
        if not content:
            return out
        by_content = inputs._replace(query=query[:content], value=value[:content])
        return torch.cat([super().forward(by_content, nodes), out])


def _sinc(square: Tensor) -> Tensor:
    r""":math:`\sin(z) / z` as a function of :math:`z^2`, which is analytic at 0, too."""
    small = square < 1
    z, near = torch.where(small, 1.0, square).sqrt(), torch.where(small, square, 0.0)
    last = 9 if square.dtype == torch.float64 else 6  # terms beyond are below rounding, in derivatives too
    series = near * ((-1) ** last / math.factorial(2 * last + 1))
    for k in range(last - 1, 0, -1):
        series = (series + (-1) ** k / math.factorial(2 * k + 1)) * near
    series = series + 1
    return torch.where(small, series, z.sin() / z)
