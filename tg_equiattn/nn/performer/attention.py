"""Attention in linear time with relative positions."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...grids import PixelGrid
from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from ...ranks import Shared
from ...tables import Tables
from ..modules import NotScriptable, StoresSettings, reset_children
from .nodes import Nodes
from .positions import ClippedPosition, Position, SinusoidPosition
from .random_features import RandomFeatures
from .window_position import OFFSETS, WindowPosition

METHODS = ("features", "pairs")
VALUES = ("content", "offset")
POSITIONS = ("clipped", "sinusoid")
CUTOFF = 6  # pixels, as of the Relative Performer's windows
FEATURES = 64  # random features at least: see docs/graph_settings.md for their error
PAIRS = 2  # pairs of graphs with at most so many nodes for each feature are less work: see the same page


class KernelAttention(Shared, NotScriptable, StoresSettings):
    """Projections, features and outputs around a kind of positions; ``far_offsets`` has heads attend to offsets."""

    def __init__(
        self, in_channels: int, out_channels: int, positions: Position, num_random_features: int | None,
        redraw_interval: int | None, method: str | None = "features", dropout: float = 0.0, far_offsets: bool = False,
        invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if method is not None:
            checks.choice("method", method, METHODS)
        checks.probability(dropout=dropout)
        heads, pos_dim, d = positions.heads, positions.pos_dim, out_channels // positions.heads
        self.out_channels, self.heads, self.head_channels, self.dropout = out_channels, heads, d, dropout
        self.positions, self.pos_dim, self.method = positions, pos_dim, method or "features"
        self.needs_neighbors, self.whole_offsets = positions.needs_neighbors, positions.whole_offsets
        self.far_offsets = FarOffsets(heads, pos_dim, out_channels, invariant) if far_offsets else None
        keys = positions.key_heads * d
        self.query = _linear(in_channels, out_channels)
        self.key = _linear(in_channels, keys) if keys else None
        self.value = _linear(in_channels, out_channels)
        self.out = nn.Linear(out_channels, out_channels)
        self.features: RandomFeatures | None = None
        self._suggests_pairs = method is None
        if self.method == "features":
            count = max(FEATURES, int(d * math.log(d))) if num_random_features is None else num_random_features
            self.features = RandomFeatures(count, d + positions.extra_channels, redraw_interval)

    def why_not_shared(self) -> str | None:
        if self.needs_neighbors:
            return "near pairs, which may be of two processes"
        return "method='pairs', whose pairs may be of two processes" if self.features is None else None

    @property
    def in_channels(self) -> int:
        """Channels of the input; -1 where they are not known yet."""
        weight = self.query.weight
        return -1 if isinstance(weight, nn.UninitializedParameter) else weight.shape[1]

    def settings(self) -> dict[str, Any]:
        values = "content" if self.far_offsets is None else "offset"
        return {"heads": self.heads, "pos_dim": self.pos_dim, "method": self.method, "values": values}

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any: the seed's next ones, or from a CPU ``generator``."""
        if self.features is not None:
            self.features.redraw_features(generator)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
        pos: Tensor | None = None,
        grid: PixelGrid | None = None,
        neighbors: NeighborList | None = None,
        return_vectors: bool = False,
    ) -> Any:
        """Attend.

        Args:
            x: ``(B, N, in_channels)``, or ``(N, in_channels)`` with ``batch``.
            mask: bool ``(B, N)``, true for the nodes that exist; the output of the others is zero.
            batch: sorted int64 ``(N,)`` graph index; ``None`` means one graph.
            batch_size, max_num_nodes: number of graphs, and a bound of a graph's nodes, for pairs; ``None`` reads them
                from ``batch``, which torch.compile cannot.
            pos: ``(B, N, pos_dim)`` or ``(N, pos_dim)`` positions, of which offsets are differences, in their
                precision: give those far from the origin in float64, which x need not be.
            grid: whose pixels, in row order, every graph's nodes are; stands for ``batch``, ``pos``, ``neighbors``.
            neighbors: near pairs among all nodes, counted through the batch; ``None`` finds those closer than
                ``cutoff`` from ``pos``, at most 1,000 a node on average. Tables need offsets that are whole up to
                rounding, ``values="offset"`` differences of ``pos``: in a periodic box, far nodes have none.
            return_vectors: return besides the means :math:`o` of ``values="offset"``, ``(..., heads, pos_dim)``, in
                the unit of positions; with ``offset="distance"`` they turn along with positions.
        """
        known = self.in_channels != -1
        if x.ndim not in (2, 3) or (known and x.shape[-1] != self.in_channels):
            raise ValueError(
                f"input must be (B, N, {self.in_channels}), or (N, {self.in_channels}) with batch, got {tuple(x.shape)}"
            )
        if return_vectors and self.far_offsets is None:
            raise ValueError("return_vectors must be with values='offset', whose means vectors are")
        checks.same_kind(x, self.query.weight)
        given = mask, batch, batch_size, max_num_nodes, pos, grid, neighbors
        nodes = Nodes(x, self.positions, self.far_offsets is not None, self.features is None, self.ranks, *given)
        if self._suggests_pairs and not torch.compiler.is_compiling():
            self._suggest_pairs(nodes.node_batch)
        projection = None
        if self.features is not None:
            projection = self.features(x.device, torch.promote_types(x.dtype, torch.float32))
        if not x.numel() and self.ranks is None:  # this counted a training step, as on ranks that have nodes
            out = self.out(self.value(x))
            return (out, out.new_zeros(*x.shape[:-1], self.heads, self.pos_dim)) if return_vectors else out
        query, value = (project(nodes.x).unflatten(-1, (self.heads, -1)) for project in (self.query, self.value))
        key = query[:, :0] if self.key is None else self.key(nodes.x).unflatten(-1, (-1, self.head_channels))
        dtype, dropout = value.dtype, self.dropout if self.training else 0.0
        parts = [value]
        if self.far_offsets is not None:
            parts = [value.to(torch.promote_types(dtype, torch.float32))]
            places = nodes.node_batch.centred(cast(Tensor, nodes.pos), detach=True).to(parts[0].dtype)
            parts.append(places[:, None].expand(-1, self.heads, -1))
            parts += [torch.ones_like(parts[1][..., :1])] if dropout else []  # what is left of the sum of weights
        value = torch.cat(parts, -1) if len(parts) > 1 else value
        means = self.positions(query, key, value, projection, nodes, dropout)
        content, *far = means.split([part.shape[-1] for part in parts], -1)
        out = self.out(content.to(dtype).flatten(1))
        if self.far_offsets is None:
            return nodes.restore(out)
        vectors = far[0] - (parts[1] * far[1] if dropout else parts[1])
        out = nodes.restore(out + self.far_offsets(self.positions.in_units(vectors)).to(out.dtype))
        return (out, nodes.restore(vectors.to(self.out.weight.dtype))) if return_vectors else out

    def _suggest_pairs(self, node_batch: NodeBatch) -> None:
        """Warn, at the first call, where all pairs of these graphs are less work than random features."""
        self._suggests_pairs = False
        most, average = (
            PAIRS * cast(RandomFeatures, self.features).num_features,
            node_batch.nodes / max(1, node_batch.count),
        )
        if 0 < average <= most:
            warnings.warn(
                f"method='pairs' is exact and faster for graphs of up to {most} nodes, and these have {average:.0f} on "
                "average: pass method='pairs', or method='features' to keep random features without this warning",
                stacklevel=4,
            )


@checks.python_numbers
class PerformerAttention(KernelAttention):
    r"""Global attention in linear time by random features, with translation-equivariant relative positions.

    .. math::
        \mathrm{out}_i = W_o \frac{\sum_j w_{ij} v_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^f \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i \text{ or } i] \exp(c \langle q_i, k_j \rangle + b(x_j - x_i))

    with :math:`c = 1/\sqrt{d}`, d the width of a head, and b and f learned for each head. Exact under translations for
    every draw of the features. With ``method="pairs"`` weights have :math:`\exp(c \langle q_i, k_j \rangle)` itself in
    place of its estimate :math:`\langle \phi(q_i), \phi(k_j) \rangle`.

    With ``values="offset"`` near pairs add a learned function :math:`g(x_j - x_i)` to the value, and every head e
    attends to the offsets of all nodes, :math:`o_{ie} = \sum_j w_{ije} (x_j - x_i) / \sum_j w_{ije}`. A linear map of
    all heads' :math:`o_{ie}`, in units of ``cutoff``, is added to the output; with ``offset="distance"``, one of their
    inner products between heads, so that outputs stay invariant to rotations.

    Args:
        in_channels, out_channels: of the input, where -1 reads them from the first one; and of the output, a multiple
            of ``heads``.
        heads, pos_dim: number of attention heads; dimension of positions.
        cutoff: pairs closer than this are near, in the unit of positions: a whole number with ``offset="table"``, where
            distances are Manhattan, a real one elsewhere, where they are Euclidean. Twice
            :func:`tg_equiattn.neighbors.mean_edge_length` suits most graphs. ``None`` means 6 for tables and without
            near pairs.
        offset: what b is: a ``"table"`` over integer offsets, an ``"mlp"`` of the offset in units of ``cutoff``,
            for points off a grid, or of the ``"distance"``, invariant to rotations and smooth, with weights that vanish
            at ``cutoff``. ``None`` leaves near pairs out.
        values: ``"content"``, or ``"offset"``: see above.
        edge_dim: features of the near pairs that add a linear map to their scores; ``None`` for none.
        num_random_features: m; ``None`` means :math:`\max(64, \lfloor d \ln d \rfloor)`.
        redraw_interval: training steps, that is forward passes in training mode, between draws of the random features;
            ``None`` means none by itself. Passes that activation checkpointing repeats in backward do not count: call
            backward before the next draw. Where torch.func goes through them, a due draw raises.
        method: ``"features"``, in linear time, or ``"pairs"``, exact, in time that grows as the square of a graph's
            nodes. The two are different functions. The default, ``None``, means ``"features"``, with a warning where
            the first graphs have at most 2 m nodes: pairs are exact and faster there.
        dropout: probability of dropping, in training, the weights of near pairs, and of far ones whole keys.

    Set the attribute ``process_group`` to one of :mod:`torch.distributed` among whose processes the nodes of every
    graph are shared (see :doc:`/shared_graphs`); with ``offset=None``, and not with ``"pairs"``.

    Shapes:
        dense ``(B, N, in_channels)`` -> ``(B, N, out_channels)``; ragged ``(N, in_channels)`` -> ``(N, out_channels)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: features, Choromanski et al. (2021); question, relative-performer 2.3; near pairs, far offsets are ours.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> layer = PerformerAttention(16, 32, heads=4, cutoff=3, method="pairs")
        >>> layer(torch.randn(2, 35, 16), grid=PixelGrid((5, 7), max_distance=3)).shape
        torch.Size([2, 35, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        pos_dim: int = 2,
        cutoff: float | None = None,
        offset: str | None = "table",
        values: str = "content",
        edge_dim: int | None = None,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
        method: str | None = None,
        dropout: float = 0.0,
    ) -> None:
        head_channels = _check_sizes(in_channels, out_channels, heads, pos_dim)
        checks.choice("values", values, VALUES)
        if edge_dim is not None:
            checks.positive(edge_dim=edge_dim)
        if cutoff is None:
            if offset in ("mlp", "distance"):
                raise ValueError(
                    f"cutoff must be given with offset={offset!r}: a length in the unit of pos, twice "
                    "mean_edge_length(pos, edge_index) say"
                )
            cutoff = CUTOFF
        positions: Position
        if offset is None:
            if edge_dim is not None:
                raise ValueError(f"edge_dim must be None with offset=None, which has no near pairs, got {edge_dim}")
            checks.positive_number(cutoff=cutoff)
            positions = Position(heads, pos_dim, cutoff)
        else:
            checks.choice("offset", offset, OFFSETS)
            positions = WindowPosition(heads, pos_dim, cutoff, offset, values == "offset", head_channels, edge_dim)
        super().__init__(
            in_channels, out_channels, positions, num_random_features, redraw_interval, method, dropout,
            far_offsets=values == "offset", invariant=offset == "distance",
        )  # fmt: skip
        self.cutoff, self.offset = cutoff, offset

    def settings(self) -> dict[str, Any]:
        cutoff = None if self.offset is None and self.far_offsets is None else self.cutoff
        return super().settings() | {"offset": self.offset, "cutoff": cutoff}

    def extra_repr(self) -> str:
        values = "" if self.far_offsets is None else ", values='offset'"
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, offset={self.offset!r}{values}"


@checks.python_numbers
class PositionalPerformerAttention(KernelAttention):
    """Attention by random features with the positions that the Relative Performer's paper compares, ``"clipped"`` and
    ``"sinusoid"``: see :class:`RelativePerformer`. Other arguments as of :class:`PerformerAttention`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str = "clipped",
        pos_dim: int = 2,
        cutoff: int = CUTOFF,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
    ) -> None:
        head_channels = _check_sizes(in_channels, out_channels, heads, pos_dim)
        checks.choice("position", position, POSITIONS)
        if position == "clipped":
            positions: Position = ClippedPosition(heads, pos_dim, cutoff, head_channels)
        else:
            positions = SinusoidPosition(heads, pos_dim)
        super().__init__(in_channels, out_channels, positions, num_random_features, redraw_interval)
        self.position, self.cutoff = position, cutoff

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"position": self.position, "cutoff": self.cutoff}

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, position={self.position!r}"


class FarOffsets(nn.Module):
    r"""Outputs from each head's weighted mean :math:`o_e` of offsets, (N, heads, dim): a linear map of them, or where
    ``invariant`` of :math:`g / (1 + g^2)^{1/4}`, g their inner products between heads, smooth. It starts at zero."""

    def __init__(self, heads: int, pos_dim: int, out_channels: int, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant
        if invariant:
            self.pairs = Tables(functools.partial(torch.triu_indices, heads, heads))
        self.map = nn.Linear(heads * (heads + 1) // 2 if invariant else heads * pos_dim, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.map.weight)

    def forward(self, means: Tensor) -> Tensor:
        with full_precision(means.device):
            means = means.to(self.map.weight.dtype)
            if not self.invariant:
                return self.map(means.flatten(1))
            first, second = self.pairs(means.device)
            products = (means @ means.mT)[:, first, second]
            return self.map(products * (1 + products.square()) ** -0.25)


def _check_sizes(in_channels: int, out_channels: int, heads: int, pos_dim: int) -> int:
    """The channels of a head; ValueError for sizes that do not fit."""
    in_channels = 1 if in_channels == -1 else in_channels
    checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads, pos_dim=pos_dim)
    if out_channels % heads:
        raise ValueError(f"heads must divide out_channels={out_channels}, got {heads}")
    return out_channels // heads


def _linear(in_channels: int, out_channels: int) -> nn.Linear:
    return nn.LazyLinear(out_channels, False) if in_channels == -1 else nn.Linear(in_channels, out_channels, False)
