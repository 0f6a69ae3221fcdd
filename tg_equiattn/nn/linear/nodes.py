"""The input of a layer, dense or ragged or a grid, as nodes one after the other."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ... import checks
from ...functional.linear.clipped import Aggregate
from ...functional.linear.rows import Rows, longest_graph
from ...grids import PixelGrid
from ...neighbours import Neighbours
from ...offsets import GIVEN, whole_offsets
from ...ranks import Ranks
from .positions import Position


class Nodes:
    """What a layer was called with, checked, and what its kind of positions needs of it.

    Args:
        x: dense ``(B, N, C)``, or ragged ``(N, C)``.
        position: says whether positions or near pairs are needed, and finds pairs where none are given.
        mask, batch, batch_size, pos, grid, neighbours, aggregate, max_num_nodes: as the layer's ``forward``.
        whole: whether rows are to be whole graphs.
        ranks: among which the nodes of every graph are shared.

    Attributes:
        x: ``(nodes, C)``, zero where masked.
        pos: ``(nodes, dim)``, zero where masked, or ``None`` where they are not needed.
        neighbours: near pairs among all nodes; only where they are needed.
        rows: which nodes form a graph.
        aggregate: how values are summed over pairs.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    neighbours: Neighbours

    def __init__(
        self,
        x: Tensor,
        position: Position,
        *,
        mask: Tensor | None,
        batch: Tensor | None,
        batch_size: int | None,
        pos: Tensor | None,
        grid: PixelGrid | None,
        neighbours: Neighbours | None,
        aggregate: Aggregate,
        whole: bool,
        max_num_nodes: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.shape, self.mask, self.aggregate = x.shape[:-1], mask, aggregate
        count = math.prod(self.shape)
        shared = None if ranks is None else _shared_graphs(x, mask, batch, batch_size, grid, ranks)
        graphs = _number_of_graphs(x, mask, batch, batch_size, grid) if shared is None else len(shared[1])
        if grid is not None:
            if len(grid) * graphs != count or len(grid.shape) != position.pos_dim:
                raise ValueError(
                    f"grid must have {position.pos_dim} axes and as many pixels as each graph has nodes, got {grid} "
                    f"for an input of shape {tuple(x.shape)}"
                )
            if pos is None and position.needs_positions:
                pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
                pos = pos.repeat(graphs, 1).view(*self.shape, -1)
        near = position.needs_neighbours and count > 0
        if not position.needs_positions and not (near and neighbours is None and grid is None):
            pos = None
        else:
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, position.why)
            pos = _zero_where_masked(pos, mask).reshape(-1, position.pos_dim)
        self.x, self.pos = _zero_where_masked(x, mask).reshape(-1, x.shape[-1]), pos
        if shared is not None:
            batch, _, longest = shared
            self.rows = Rows(count, graphs, batch, None, longest, ranks)
        else:
            bound = longest_graph(batch, graphs, max_num_nodes) if whole else None
            self.rows = Rows(count, graphs, batch, mask, bound)
        if not near:
            return
        if neighbours is None and grid is not None:
            if position.whole_offsets and not grid.is_whole:
                raise ValueError(
                    f"grid must have spacing 1 where offsets are counted, as by tables, got {grid}: take offset='mlp'"
                )
            neighbours = grid.neighbours(graphs, x.device)
        elif neighbours is None:
            neighbours = position.find_neighbours(cast(Tensor, pos), _graph_of_each(x, mask, batch, graphs))
        elif position.whole_offsets:
            whole_offsets(neighbours.offsets, what=GIVEN)
        neighbours.check_nodes(count, position.pos_dim)
        target, source = neighbours.pattern.row, neighbours.pattern.col
        free = batch is not None and checks.values_are_free(target) and checks.values_are_free(batch)
        if batch is not None and free and not torch.equal(batch[target], batch[source]):
            raise ValueError("neighbours must not join nodes of different graphs of batch")
        self.neighbours = neighbours if mask is None else neighbours.restricted(mask.flatten())

    def restore(self, out: Tensor) -> Tensor:
        """Outputs (nodes, C) in the form of the input, zero where masked."""
        return _zero_where_masked(out.view(*self.shape, out.shape[-1]), self.mask)


def _number_of_graphs(
    x: Tensor, mask: Tensor | None, batch: Tensor | None, batch_size: int | None, grid: PixelGrid | None
) -> int:
    """How many graphs there are, where mask and batch fit the input."""
    dense = x.ndim == 3
    if mask is not None and not dense:
        raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
    if dense and batch is not None:
        raise ValueError("batch must be None where the input is (B, N, channels): use mask")
    checks.mask(mask, tuple(x.shape[:-1]))
    if dense:
        return x.shape[0]
    if grid is None:
        return checks.batch_index(batch, batch_size, x)
    if batch is not None:
        raise ValueError("batch must be None where grid is given, which says how large every graph is")
    return x.shape[0] // len(grid)


def _shared_graphs(
    x: Tensor, mask: Tensor | None, batch: Tensor | None, batch_size: int | None, grid: PixelGrid | None, ranks: Ranks
) -> tuple[Tensor, Tensor, int]:
    """As :meth:`Ranks.graphs`, of an input that can be shared."""
    if x.ndim == 3 or mask is not None or grid is not None:
        raise ValueError(
            "process_group must be None where the input is (B, N, channels) or on a grid: nodes are shared as "
            "(N, channels), with batch"
        )
    return ranks.graphs(x, batch, batch_size)


def _graph_of_each(x: Tensor, mask: Tensor | None, batch: Tensor | None, graphs: int) -> Tensor | None:
    """The graph index of every node; one that does not exist is a graph by itself, and near none."""
    if x.ndim == 2:
        return batch
    batch = torch.arange(graphs, device=x.device).repeat_interleave(x.shape[1])
    if mask is None:
        return batch
    return torch.where(mask.flatten(), batch, graphs + torch.arange(batch.shape[0], device=x.device))


def _zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask[..., None], x, torch.zeros_like(x))
