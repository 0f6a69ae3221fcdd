"""Positions of nodes in linear attention: relative sinusoids, biases of offsets, outputs of mean offsets."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.harmonics import sinc
from ...modes import full_precision, in_functorch_transform, is_traced
from ...tables import Tables

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LONGEST = 1e4  # scale of the sinusoids, in units of positions: Vaswani et al., Attention is all you need (2017), 3.5
LENGTH_SCALES = 4  # learned frequencies an axis: relative-performer appendix A.2
STD = 3.0  # standard deviation of initial biases of offsets; with less, attention has no directions and learns poorly
HIDDEN = 32  # width of the MLP of offsets
RADIAL = 16  # number of functions of the distance


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
        with full_precision(pos.device):
            exact = torch.promote_types(pos.dtype, self.frequency.dtype)  # positions in float64 may be large
            angle = pos.to(exact)[..., None] * self.frequency  # (N, dim, scales)
            sin, cos = (x.to(self.frequency.dtype) for x in (angle.sin(), angle.cos()))
            alpha, beta = self.rotation[:, :, None]  # (heads, 1, dim, scales)
            query = torch.stack([alpha * sin - beta * cos, beta * sin + alpha * cos], -1)
            key = torch.stack([sin, cos], -1).flatten(1)
            return query.flatten(2), key.expand(self.heads, -1, -1)

    def extra_repr(self) -> str:
        return f"pos_dim={self.pos_dim}, heads={self.heads}"


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
        inside = ((whole >= -radius) & (whole <= radius)).all(-1)  # false for NaN and infinity
        _check_inside(inside, offsets, self.cutoff)
        whole, index = whole.long(), torch.zeros_like(inside, dtype=torch.int64)
        for axis in range(self.pos_dim):
            index = index * (2 * radius + 1) + whole[:, axis] + radius
        table = nn.functional.pad(self.table, (0, 1), value=-math.inf)  # the last column is for offsets outside
        return nn.functional.embedding(torch.where(inside, index, self.table.shape[1]), table.T).T


@checks.of_values
def _check_inside(inside: Bool[Tensor, " pairs"], offsets: Tensor, cutoff: int) -> None:
    if not bool(inside.all()):
        wanted = f"below cutoff={cutoff} on every axis, got {offsets.min()} to {offsets.max()}"
        raise ValueError(f"offsets (edge_offset, or differences of pos) must be {wanted}")


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
        with full_precision(offsets.device):
            return self._waves(self._square(offsets))

    def _waves(self, square: Float[Tensor, " pairs"]) -> Float[Tensor, "pairs 16"]:
        if not (square.requires_grad or is_traced(square) or in_functorch_transform()):
            phase = math.pi * square.clamp(max=1).sqrt()  # faster; not differentiable at 0
            phases = phase * torch.arange(1, RADIAL + 1, device=square.device)[:, None]
            return phases.sin().div_(phases).masked_fill_(phase == 0, 1.0).T
        phase = math.pi**2 * square.clamp(max=1)  # square of the phase pi |x| / r
        first, half = sinc(torch.stack([phase, phase / 4]))
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
        with full_precision(offsets.device):
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
        with full_precision(offsets.device):
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
        with full_precision(offsets.device):
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
        return bias.features(offsets) if self.first is None else self.first(offsets)  # type: ignore[operator, union-attr]

    def extra_repr(self) -> str:
        return f"features={self.map.shape[1]}"


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
        with full_precision(means.device):
            means = means.to(self.map.weight.dtype)
            if not self.invariant:
                return self.map(means.transpose(0, 1).flatten(1))
            means = means.mT.contiguous()  # sums over the last axis, of a few numbers, are slow
            first, second = (means.index_select(0, heads) for heads in self.pairs(means.device))
            products = (first * second).sum(1)
            return self.map((products * (1 + products.square()).sqrt().rsqrt()).T)
