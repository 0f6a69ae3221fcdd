"""Attention in linear time with relative positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import AbsoluteEncoding, OffsetMLP, OffsetTable, SinusoidEncoding
from ...functional.linear.attention import features_attention, log_norm
from ...functional.linear.random_features import KERNELS
from ...functional.linear.relative_attention import clipped_attention, distance_weights, ring_sums, window_attention
from ...functional.linear.rows import Rows
from ...grids import PixelGrid
from ...neighbours import Neighbours, Pattern, near_pairs
from ..children import reset_children
from .random_features import RandomFeatures

POSITIONS = ("window", "clipped", "sinusoid", "absolute", None)
OFFSETS = {"table": OffsetTable, "mlp": OffsetMLP}
NEAR = ("window", "clipped")  # positions that need pairs with offsets

Aggregate = Callable[[Tensor, Pattern], Tensor]


class PerformerAttention(nn.Module):
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

    Outputs are the weighted means of the values, projected. b is a table over integer offsets (or an MLP of the
    offset), b, f and w are learned for each head.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of ``heads``.
        heads: attention heads.
        position: see the table.
        pos_dim: dimension of positions.
        num_features: random features m; ``None`` means :math:`\max(16, \lfloor d \ln d \rfloor)`, d the head width.
        max_distance: pairs closer than this are near; :class:`~tg_equiattn.grids.PixelGrid` says how near is measured.
        offset: ``"table"`` over integer offsets, or ``"mlp"``, for points off a grid (``"window"`` only).
        kernel: ``"softmax"``, or ``"relu"``.
        position_heads: heads of ``"clipped"`` that see positions; ``None`` means half of them, at least one.
        length_scales: learned frequencies an axis of ``"sinusoid"``.
        redraw_interval: training steps between draws of the random features; ``None`` means none by itself.
        scale: c; ``None`` means :math:`1/\sqrt{d}`, d the width of queries with their position part.
        qkv_bias: bias of the query, key and value projections.
        bias: bias of the output projection.
        dropout: probability of dropping an output channel in training.

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
        max_distance: int = 6,
        offset: str = "table",
        kernel: str = "softmax",
        position_heads: int | None = None,
        length_scales: int = 4,
        redraw_interval: int | None = None,
        scale: float | None = None,
        qkv_bias: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads, pos_dim=pos_dim)
        checks.positive(max_distance=max_distance)
        checks.probability(dropout=dropout)
        checks.scale(scale)
        checks.choice("kernel", kernel, KERNELS)
        checks.choice("offset", offset, OFFSETS)
        if position not in POSITIONS:
            raise ValueError(f"position must be one of {POSITIONS}, got {position!r}")
        if out_channels % heads:
            raise ValueError(f"heads must divide out_channels={out_channels}, got {heads}")
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.head_channels = out_channels // heads
        self.position, self.pos_dim, self.max_distance, self.offset = position, pos_dim, max_distance, offset
        self.kernel, self.scale, self.dropout = kernel, scale, dropout
        self.position_heads = 0
        if position == "clipped":
            self.position_heads = max(1, heads // 2) if position_heads is None else position_heads
            checks.positive(position_heads=self.position_heads)
            if self.position_heads > heads:
                raise ValueError(f"position_heads must be at most heads={heads}, got {position_heads}")
        self.query = nn.Linear(in_channels, out_channels, bias=qkv_bias)
        content_channels = (heads - self.position_heads) * self.head_channels
        self.key = nn.Linear(in_channels, content_channels, bias=qkv_bias) if content_channels else None
        self.value = nn.Linear(in_channels, out_channels, bias=qkv_bias)
        self.out = nn.Linear(out_channels, out_channels, bias=bias)
        width = self.head_channels
        if position == "absolute":
            self.absolute = AbsoluteEncoding(in_channels, pos_dim)
        elif position == "sinusoid":
            self.sinusoid = SinusoidEncoding(pos_dim, heads, length_scales)
            width += self.sinusoid.channels
        elif position == "clipped":
            self.distance_table = nn.Parameter(torch.empty(self.position_heads, max_distance + 1, width))
        elif position == "window":
            self.offset_bias = OFFSETS[offset](pos_dim, heads, max_distance)
            self.far_bias = nn.Parameter(torch.empty(heads))
        if num_features is None:
            num_features = max(16, int(self.head_channels * math.log(self.head_channels)))
        self.features = RandomFeatures(num_features, width, redraw_interval)
        self._reset_own()

    def _reset_own(self) -> None:
        if self.position == "clipped":
            nn.init.normal_(self.distance_table)
        elif self.position == "window":
            nn.init.zeros_(self.far_bias)

    def reset_parameters(self) -> None:
        """Give every parameter a new initial value and draw the random features again."""
        reset_children(self)
        self._reset_own()

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features; see :class:`~tg_equiattn.nn.RandomFeatures`."""
        self.features.redraw_features(generator)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        pos: Tensor | None = None,
        grid: PixelGrid | None = None,
        neighbours: Neighbours | None = None,
        aggregate: Aggregate = ring_sums,
    ) -> Tensor:
        """Attend.

        Args:
            x: ``(B, N, in_channels)``, or ``(N, in_channels)`` with ``batch``.
            mask: bool ``(B, N)``, true for the nodes that exist; the output of the others is zero.
            batch: sorted int64 ``(N,)`` graph index; ``None`` means one graph.
            batch_size: number of graphs; ``None`` reads it from ``batch``.
            pos: ``(B, N, pos_dim)`` or ``(N, pos_dim)`` positions.
            grid: the nodes of every graph are all pixels of this grid, in row order; stands for ``batch``, ``pos``
                and ``neighbours``.
            neighbours: near pairs among all nodes, counted through the batch. Without it they are found from ``pos``:
                Manhattan distance below ``max_distance``, rounded to whole offsets for tables.
            aggregate: how ``"clipped"`` adds values up by distance; for integrations.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.in_channels:
            raise ValueError(
                f"input must be (B, N, {self.in_channels}), or (N, {self.in_channels}) with batch, got {tuple(x.shape)}"
            )
        checks.same_kind(x, self.query.weight)
        dense, shape = x.ndim == 3, x.shape[:-1]
        if mask is not None and not dense:
            raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
        if dense and batch is not None:
            raise ValueError("batch must be None where the input is (B, N, channels): use mask")
        checks.mask(mask, tuple(shape))
        if dense:
            graphs = shape[0]
        elif grid is None:
            graphs = checks.batch_index(batch, batch_size, x)
        else:
            graphs = shape[0] // len(grid)
            if batch is not None:
                raise ValueError("batch must be None where grid is given, which says how large every graph is")
        if grid is not None:
            if len(grid) * graphs != math.prod(shape) or len(grid.shape) != self.pos_dim:
                raise ValueError(
                    f"grid must have {self.pos_dim} axes and as many pixels as each graph has nodes, got {grid} for "
                    f"an input of shape {tuple(x.shape)}"
                )
            if pos is None and self.position in ("absolute", "sinusoid"):
                pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
                pos = pos.repeat(graphs, 1).view(*shape, -1)
        if self.position in ("absolute", "sinusoid") or pos is not None:
            pos = checks.positions(pos, (*shape, self.pos_dim), x, f"position={self.position!r} needs it")
        if not math.prod(shape):
            self.features()  # counts the step, as on ranks that have nodes
            return self.out(self.value(x))
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
            pos = pos if pos is None else torch.where(mask[..., None], pos, torch.zeros_like(pos))
        rows = Rows(math.prod(shape), graphs, batch, mask)
        flat = x.reshape(-1, self.in_channels)
        pos = pos if pos is None else pos.reshape(-1, self.pos_dim)
        if self.position in NEAR:
            if neighbours is None and grid is not None:
                neighbours = grid.neighbours(graphs, x.device)
            elif neighbours is None:
                if dense:
                    batch = torch.arange(graphs, device=x.device).repeat_interleave(shape[1])
                neighbours = self._find_neighbours(pos, batch, len(flat))
            elif neighbours.nodes != len(flat) or neighbours.dim != self.pos_dim:
                raise ValueError(
                    f"neighbours must be of {len(flat)} nodes in {self.pos_dim} dimensions, got {neighbours.nodes} "
                    f"in {neighbours.dim}"
                )
            neighbours = neighbours if mask is None else neighbours.restricted(mask.flatten())
        elif self.position == "absolute":
            flat = flat + self.absolute(pos).to(flat.dtype)
        out = self.out(self._attend(flat, pos, rows, neighbours, aggregate).flatten(1)).view(*shape, -1)
        out = nn.functional.dropout(out, self.dropout, self.training)
        return out if mask is None else torch.where(mask[..., None], out, 0.0)

    @property
    def whole_offsets(self) -> bool:
        """Whether offsets index a table, and are rounded to whole numbers."""
        return self.position == "clipped" or self.offset == "table"

    def _find_neighbours(self, pos: Tensor | None, batch: Tensor | None, nodes: int) -> Neighbours:
        """Near pairs by position."""
        why = f"position={self.position!r} needs offsets, from pos, edges or a grid"
        pos = checks.positions(pos, (nodes, self.pos_dim), self.query.weight, why)
        reach = self.max_distance + (self.pos_dim / 2 if self.whole_offsets else 0)
        target, source = near_pairs(pos, reach, batch=batch)
        offsets = pos[source] - pos[target]
        if not self.whole_offsets:
            return Neighbours(target, source, offsets, nodes)
        offsets = offsets.round() if offsets.is_floating_point() else offsets
        return Neighbours(target, source, offsets, nodes, offsets.abs().sum(-1) < self.max_distance)

    def _attend(
        self, x: Tensor, pos: Tensor | None, rows: Rows, neighbours: Neighbours | None, aggregate: Aggregate
    ) -> Tensor:
        query, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.query, self.value))
        content = self.heads - self.position_heads
        key = query[:, :0] if self.key is None else self.key(x).unflatten(-1, (content, -1))
        options = self.features(), self.kernel, self.scale
        if self.position == "sinusoid" and pos is not None:
            position_query, position_key = self.sinusoid(pos)
            query, key = torch.cat([query, position_query], -1), torch.cat([key, position_key], -1)
        if neighbours is None or self.position not in NEAR:
            return features_attention(query, key, value, *options, rows)[0]
        if self.position == "window":
            far, level = features_attention(query, key, value, *options, rows)
            whole = query.to(level.dtype)
            level = level + log_norm(whole, self.kernel, self.scale, len(options[0])) + self.far_bias[:, None]
            centre = neighbours.offsets.new_zeros(1, self.pos_dim)
            biases = self.offset_bias(neighbours.offsets), self.offset_bias(centre)[:, 0]
            out = window_attention(query, key, value, *biases, (far, level), neighbours, self.scale)
            return out.to(value.dtype)
        heads = []
        if content:
            heads.append(features_attention(query[:, :content], key, value[:, :content], *options, rows)[0])
        query, seen = query[:, content:], value[:, content:]
        weights = distance_weights(query, self.distance_table, *options)
        bins = neighbours.bins(self.max_distance)
        sums = aggregate(seen.flatten(1).to(weights.dtype), bins)[:-1]
        sums = sums.view(len(x), self.max_distance, *seen.shape[1:])
        counts = bins.crow.diff()[:-1].view(len(x), self.max_distance)
        heads.append(clipped_attention(seen, weights, sums, counts, rows).to(value.dtype))
        return torch.cat(heads, 1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, position={self.position!r}"
