"""Attention in linear time with relative positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...grids import PixelGrid
from ...neighbors import Neighbors
from .far_offsets import FarOffsets
from .kernel_attention import KernelAttention
from .near_positions import OFFSETS, WindowPosition
from .positions import Position

VALUES = ("content", "offset")
RENAMED = {
    "num_features": "num_random_features",
    "position": "offset=None for attention without near pairs; PositionalPerformerAttention (PyG: "
    "PositionalPerformerConv) has the others",
    "position_heads": "PositionalPerformerAttention, whose position heads are half of the heads",
    "scale": "none: it is 1 / sqrt(d)",
    "bias": "none: the output has a bias",
    "process_group": "the attribute process_group, after construction",
    "check_batch": "the attribute check_batch, after construction",
}


class PerformerAttention(KernelAttention):
    r"""Global attention in linear time by random features, with translation-equivariant relative positions.

    .. math::
        \mathrm{out}_i = W_o \frac{\sum_j w_{ij} v_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^f \langle \phi(q_i), \phi(k_j) \rangle
        + [j \text{ near } i \text{ or } i] \exp(c \langle q_i, k_j \rangle + b(x_j - x_i))

    with :math:`c = 1/\sqrt{d}`, d the width of a head, and b and f learned for each head. Exact under translations for
    every draw of the features. Small graphs, and all with ``method="pairs"``, have
    :math:`\exp(c \langle q_i, k_j \rangle)` itself in place of its estimate
    :math:`\langle \phi(q_i), \phi(k_j) \rangle`.

    With ``values="offset"`` near pairs add a learned function :math:`g(x_j - x_i)` to the value, and every head e
    attends to the offsets of all nodes, near and far,

    .. math::
        o_{ie} = \frac{\sum_j w_{ije} (x_j - x_i)}{\sum_j w_{ije}} = \frac{\sum_j w_{ije} x_j}{\sum_j w_{ije}} - x_i,

    which add a linear map of all heads' :math:`o_{ie}`, in units of ``max_distance``, to the output; with
    ``offset="distance"``, of their inner products between heads, so that outputs stay invariant to rotations.

    Args:
        in_channels: channels of the input; -1 reads them from the first one.
        out_channels: channels of the output, a multiple of ``heads``.
        heads: attention heads.
        pos_dim: dimension of positions.
        max_distance: pairs closer than this are near, in the unit of positions: whole with ``offset="table"``, where
            distances are Manhattan; real elsewhere, where they are Euclidean, or there ``"auto"``: twice the mean
            length of the edges of the first call in training, kept in checkpoints.
        offset: what b is: a ``"table"`` over integer offsets, an ``"mlp"`` of the offset in units of ``max_distance``,
            for points off a grid, or of the ``"distance"``, invariant to rotations and smooth, with weights that vanish
            at ``max_distance`` (:class:`~tg_equiattn.encodings.OffsetDistance`). ``None`` leaves near pairs out.
        values: ``"content"``, or ``"offset"``: see above.
        edge_dim: features of the near pairs that add a linear map to their scores; ``None`` for none.
        num_random_features: m; ``None`` means :math:`\max(64, \lfloor d \ln d \rfloor)`.
        redraw_interval: training steps between draws of the random features; ``None`` means none by itself.
        method: ``"features"``, in linear time; ``"pairs"``, in time and memory that grow as the square of a graph's
            nodes; or ``"auto"``: pairs for each graph of at most 2 m nodes, features for the others. The two are
            different functions, and what is learned for one does not hold for the other: where graphs of training and
            test lie on both sides of 2 m, choose one.
        dropout: probability of dropping, in training, the weights of near pairs, and of far ones whole keys.

    Set the attribute ``process_group`` to one of :mod:`torch.distributed` among whose processes the nodes of every
    graph are shared (see :doc:`/shared_graphs`); with ``offset=None``, and not with ``"pairs"``.

    Shapes:
        dense ``(B, N, in_channels)`` -> ``(B, N, out_channels)``; ragged ``(N, in_channels)`` -> ``(N, out_channels)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Choromanski et al. (2021) for the features; relative-performer section 2.3 for the question. Near pairs and
    far offsets are ours.

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
        pos_dim: int = 2,
        max_distance: float | str = 6,
        offset: str | None = "table",
        values: str = "content",
        edge_dim: int | None = None,
        num_random_features: int | None = None,
        redraw_interval: int | None = None,
        method: str = "auto",
        dropout: float = 0.0,
        **renamed: Any,
    ) -> None:
        checks.renamed(renamed, RENAMED, type(self).__name__)
        super().__init__(in_channels, out_channels, heads, dropout)
        checks.positive(pos_dim=pos_dim)
        checks.choice("values", values, VALUES)
        if offset is not None:
            checks.choice("offset", offset, OFFSETS)
        if edge_dim is not None:
            checks.positive(edge_dim=edge_dim)
        self.pos_dim, self.max_distance, self.offset = pos_dim, max_distance, offset
        positions: Position
        if offset is None:
            if edge_dim is not None:
                raise ValueError(f"edge_dim must be None with offset=None, which has no near pairs, got {edge_dim}")
            checks.positive_number(max_distance=max_distance)  # type: ignore[arg-type]
            positions = Position(heads, pos_dim, float(max_distance))
        else:
            positions = WindowPosition(heads, pos_dim, max_distance, offset, values, self.head_channels, edge_dim)
        far = FarOffsets(heads, pos_dim, out_channels, positions.invariant) if values == "offset" else None
        self._build(in_channels, positions, num_random_features, redraw_interval, method, far)

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
        neighbors: Neighbors | None = None,
        return_attention_weights: bool = False,
        return_vectors: bool = False,
    ) -> Any:
        """Attend.

        Args:
            x: ``(B, N, in_channels)``, or ``(N, in_channels)`` with ``batch``.
            mask: bool ``(B, N)``, true for the nodes that exist; the output of the others is zero.
            batch: sorted int64 ``(N,)`` graph index; ``None`` means one graph.
            batch_size: number of graphs; ``None`` reads it from ``batch``.
            max_num_nodes: bound of a graph's nodes, for pairs; ``None`` reads it from ``batch``, which torch.compile
                cannot.
            pos: ``(B, N, pos_dim)`` or ``(N, pos_dim)`` positions. Offsets are their differences, in their precision:
                give those far from the origin, such as map coordinates of 5e6 m, in float64, which x need not be.
            grid: the nodes of every graph are all pixels of this grid, in row order; stands for ``batch``, ``pos``
                and ``neighbors``.
            neighbors: near pairs among all nodes, counted through the batch. Without it they are found from ``pos``:
                those closer than ``max_distance``, at most 1,000 a node on average (see
                :func:`~tg_equiattn.neighbors.near_pairs`). Tables need offsets that are whole up to rounding, and
                ``values="offset"`` those that are differences of ``pos``: in a periodic box, far nodes have none.
            return_attention_weights: return besides the shares ``(E + N, heads)`` that near pairs, in the order of
                ``neighbors``, and nodes themselves have in what a node attends to. Those of all pairs, estimated by
                features where they are not near, add up to one.
            return_vectors: return besides, last, the means :math:`o` of ``values="offset"``, ``(..., heads, pos_dim)``,
                in the unit of positions; with ``offset="distance"`` they turn along with positions.
        """
        return self._attend(
            x, mask=mask, batch=batch, batch_size=batch_size, max_num_nodes=max_num_nodes, pos=pos, grid=grid,
            neighbors=neighbors, return_attention_weights=return_attention_weights, return_vectors=return_vectors,
        )  # fmt: skip

    def extra_repr(self) -> str:
        values = "" if self.far_offsets is None else ", values='offset'"
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, offset={self.offset!r}{values}"
