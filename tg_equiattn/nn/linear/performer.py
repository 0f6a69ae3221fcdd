"""Attention in linear time with relative positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.linear.clipped import Aggregate, sum_aggregation
from ...grids import PixelGrid
from ...neighbours import Neighbours
from ...ranks import Shared
from ..children import reset_children
from ..not_scriptable import NotScriptable
from .nodes import Nodes
from .position_kinds import make_position
from .random_features import RandomFeatures

METHODS = ("features", "pairs")


class PerformerAttention(Shared, NotScriptable, nn.Module):
    r"""Global attention in linear time by random features, with translation-equivariant relative positions.

    ==============  ================================================================================  ==============
    position        weight of key j for query i                                                       translation
    ==============  ================================================================================  ==============
    ``"window"``    :math:`e^f \langle \phi(q_i), \phi(k_j) \rangle` plus, where j is near i,         exact, any draw
                    :math:`\exp(c \langle q_i, k_j \rangle + b(x_j - x_i))`
    ``"clipped"``   half of the heads :math:`\langle \phi(q_i), \phi(w_{d(i,j)}) \rangle`, d the      exact, any draw
                    Manhattan distance up to ``max_distance``; the others as ``None``
    ``"sinusoid"``  :math:`\langle \phi([q_i, q_p(x_i)]), \phi([k_j, k_p(x_j)]) \rangle`, where       in expectation
                    :math:`\langle q_p, k_p \rangle` depends on :math:`x_i - x_j`                     over draws only
    ``"absolute"``  as ``None``, after adding sinusoids of the position to the input                  no
    ``None``        :math:`\langle \phi(q_i), \phi(k_j) \rangle`                                      no positions
    ==============  ================================================================================  ==============

    With ``method="pairs"`` :math:`\exp(c \langle q_i, k_j \rangle)` itself takes the place of its estimate
    :math:`\langle \phi(q_i), \phi(k_j) \rangle`: softmax attention over all pairs of a graph, for graphs of up to about
    a hundred nodes. ``"sinusoid"`` is then exact, too.

    Outputs are the weighted means of the values, projected. b is a table over integer offsets (or an MLP of the
    offset), b, f and w are learned for each head.

    Args:
        in_channels: channels of the input; -1 reads them from the first one (not with ``"absolute"``).
        out_channels: channels of the output, a multiple of ``heads``.
        heads: attention heads.
        position: see the table.
        pos_dim: dimension of positions.
        num_features: random features m; ``None`` means :math:`\max(16, \lfloor d \ln d \rfloor)`, d the head width.
        max_distance: pairs closer than this are near, in the unit of positions: whole where offsets are, real
            with ``offset="mlp"`` and ``"distance"``, or there ``"auto"``: twice the mean length of the edges of
            the first call, kept in checkpoints. Distances are Manhattan, and Euclidean with ``"distance"``.
        offset: what b is (``"window"`` only): a ``"table"`` over integer offsets, an ``"mlp"`` of the offset in units
            of ``max_distance``, for points off a grid, or of the ``"distance"``, invariant to rotations and smooth,
            with weights that vanish at ``max_distance`` (:class:`~tg_equiattn.encodings.OffsetDistance`).
        values: ``"content"``, or ``"offset"``: near pairs add a learned :math:`g(x_j - x_i)` to the value, of the
            distance with ``offset="distance"``, so that equal features see the shape of a cloud (``"window"`` only).
        edge_dim: features of the near pairs that add a linear map to their scores, beside offsets from ``pos``
            (``"window"`` only); ``None`` for none.
        position_heads: heads of ``"clipped"`` that see positions; ``None`` means half of them, at least one.
        redraw_interval: training steps between draws of the random features; ``None`` means none by itself.
        method: ``"features"``, in linear time, or ``"pairs"``, in time and memory that grow as the square of a graph's
            nodes; not for ``"clipped"``.
        scale: c; ``None`` means :math:`1/\sqrt{d}`, d the width of queries with their position part.
        bias: bias of the output projection.
        dropout: probability of dropping an output channel in training.
        process_group: of :mod:`torch.distributed`, among whose processes the nodes of every graph are shared (see
            :doc:`/shared_graphs`), or ``None``. Not for positions with near pairs.

    Shapes:
        dense ``(B, N, in_channels)`` -> ``(B, N, out_channels)``; ragged ``(N, in_channels)`` -> ``(N, out_channels)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: relative-performer section 2.3 (``"sinusoid"`` and ``"clipped"`` are its strategies 1 and 2, the last two
    its baselines; ``"window"`` is ours); Choromanski et al. (2021) for the features. The paper has weights
    :math:`w_1, ..., w_k`; here there is also :math:`w_0`, for a node with itself.

    Example:
        >>> import torch
        >>> from tg_equiattn.grids import PixelGrid
        >>> layer = PerformerAttention(16, 32, heads=4, max_distance=3)
        >>> layer(torch.randn(2, 35, 16), grid=PixelGrid((5, 7), max_distance=3)).shape
        torch.Size([2, 35, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        position: str | None = "window",
        pos_dim: int = 2,
        num_features: int | None = None,
        max_distance: float | str = 6,
        offset: str = "table",
        values: str = "content",
        edge_dim: int | None = None,
        position_heads: int | None = None,
        redraw_interval: int | None = None,
        method: str = "features",
        scale: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        lazy = in_channels == -1 and position != "absolute"
        checks.positive(in_channels=1 if lazy else in_channels, out_channels=out_channels, heads=heads, pos_dim=pos_dim)
        checks.probability(dropout=dropout)
        checks.scale(scale)
        checks.choice("method", method, METHODS)
        if out_channels % heads:
            raise ValueError(f"heads must divide out_channels={out_channels}, got {heads}")
        self.out_channels, self.heads = out_channels, heads
        self.head_channels = d = out_channels // heads
        self.position, self.pos_dim, self.max_distance, self.offset = position, pos_dim, max_distance, offset
        self.edge_dim, self.method, self.dropout = edge_dim, method, dropout
        self.positions = make_position(
            position, in_channels=in_channels, heads=heads, head_channels=d, pos_dim=pos_dim,
            max_distance=max_distance, offset=offset, values=values, edge_dim=edge_dim,
            position_heads=position_heads, scale=scale,
        )  # fmt: skip
        keys = self.positions.key_heads * d
        self.query = _linear(in_channels, out_channels)
        self.key = _linear(in_channels, keys) if keys else None
        self.value = _linear(in_channels, out_channels)
        self.out = nn.Linear(out_channels, out_channels, bias=bias)
        self.features = None
        if method == "features":
            num_features = max(16, int(d * math.log(d))) if num_features is None else num_features
            self.features = RandomFeatures(num_features, d + self.positions.extra_channels, redraw_interval)
        elif self.positions.needs_features:
            raise ValueError(f"method must be 'features' with position={position!r}, got {method!r}")
        self.process_group = process_group

    def why_not_shared(self) -> str | None:
        if self.needs_neighbours:
            return f"position={self.position!r}, whose near pairs may be of two processes"
        return "method='pairs', whose pairs may be of two processes" if self.features is None else None

    @property
    def in_channels(self) -> int:
        """Channels of the input; -1 where they are not known yet."""
        weight = self.query.weight
        return -1 if isinstance(weight, nn.UninitializedParameter) else weight.shape[1]

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any; see :class:`~tg_equiattn.nn.RandomFeatures`."""
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
        neighbours: Neighbours | None = None,
        aggregate: Aggregate = sum_aggregation,
        return_attention_weights: bool = False,
    ) -> Any:
        """Attend.

        Args:
            x: ``(B, N, in_channels)``, or ``(N, in_channels)`` with ``batch``.
            mask: bool ``(B, N)``, true for the nodes that exist; the output of the others is zero.
            batch: sorted int64 ``(N,)`` graph index; ``None`` means one graph.
            batch_size: number of graphs; ``None`` reads it from ``batch``.
            max_num_nodes: bound of a graph's nodes, for ``method="pairs"``; ``None`` reads it from ``batch``, which
                torch.compile cannot.
            pos: ``(B, N, pos_dim)`` or ``(N, pos_dim)`` positions. Offsets are their differences, in their precision:
                give those far from the origin, such as map coordinates of 5e6 m, in float64, which x need not be.
            grid: the nodes of every graph are all pixels of this grid, in row order; stands for ``batch``, ``pos``
                and ``neighbours``.
            neighbours: near pairs among all nodes, counted through the batch. Without it they are found from ``pos``:
                Manhattan distance below ``max_distance``, at most 1,000 a node on average (see
                :func:`~tg_equiattn.neighbours.near_pairs`). ``"clipped"`` and tables need offsets that are whole up to
                rounding.
            aggregate: how ``"clipped"`` sums values over the pairs of a sparse relation; see
                :func:`~tg_equiattn.functional.clipped_attention`.
            return_attention_weights: with ``"window"``, return the output and the shares ``(E + N, heads)`` that near
                pairs, in the order of ``neighbours``, and nodes themselves have in what a node attends to. Those of all
                pairs, estimated by features where they are not near, add up to one.
        """
        known = self.in_channels != -1
        if x.ndim not in (2, 3) or (known and x.shape[-1] != self.in_channels):
            raise ValueError(
                f"input must be (B, N, {self.in_channels}), or (N, {self.in_channels}) with batch, got {tuple(x.shape)}"
            )
        checks.same_kind(x, self.query.weight)
        nodes = Nodes(
            x, self.positions, mask=mask, batch=batch, batch_size=batch_size, pos=pos, grid=grid,
            neighbours=neighbours, aggregate=aggregate, whole=self.features is None, max_num_nodes=max_num_nodes,
            ranks=self.ranks,
        )  # fmt: skip
        projection = None if self.features is None else self.features()
        if not x.numel() and self.ranks is None:  # this counted a training step, as on ranks that have nodes
            out = self.out(self.value(x))
            return (out, out.new_zeros(0, self.heads)) if return_attention_weights else out
        x = self.positions.encode(nodes.x, nodes.pos)
        query, value = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.query, self.value))
        key = query[:, :0] if self.key is None else self.key(x).unflatten(-1, (-1, self.head_channels))
        out = self.out(self.positions(query, key, value, projection, nodes).flatten(1))
        out = nodes.restore(nn.functional.dropout(out, self.dropout, self.training))
        return (out, self.positions.weights(query, key, projection, nodes)) if return_attention_weights else out

    @property
    def needs_neighbours(self) -> bool:
        """Whether positions need near pairs with offsets."""
        return self.positions.needs_neighbours

    @property
    def whole_offsets(self) -> bool:
        """Whether offsets index a table, or are counted as distances, and have to be whole numbers up to rounding."""
        return self.positions.whole_offsets

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, position={self.position!r}"


def _linear(in_channels: int, out_channels: int) -> nn.Linear:
    return nn.LazyLinear(out_channels, False) if in_channels == -1 else nn.Linear(in_channels, out_channels, False)
