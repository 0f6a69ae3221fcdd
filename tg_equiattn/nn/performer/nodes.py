"""The input of a layer, dense or ragged or a grid, as nodes one after the other."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ... import checks
from ...edges import whole_offsets
from ...functional.performer.graph_rows import graph_rows
from ...grids import PixelGrid
from ...neighbors import SortedPairs
from ...node_batch import NodeBatch
from ...ranks import Ranks
from .positions import Position


class Nodes:
    """A layer's input, checked: ``x`` (nodes, C), positions ``pos`` (nodes, dim), zero where masked, near pairs, and
    rows of nodes, of whole graphs for attention over all ``pairs``."""

    def __init__(
        self, x: Tensor, position: Position, needs_positions: bool, pairs: bool, ranks: Ranks | None,
        mask: Tensor | None, batch: Tensor | None, batch_size: int | None, max_num_nodes: int | None,
        pos: Tensor | None, grid: PixelGrid | None, neighbors: SortedPairs | None,
    ) -> None:  # fmt: skip
        self.shape, count = x.shape[:-1], math.prod(x.shape[:-1])
        if x.ndim == 2 and mask is not None:
            raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
        if x.ndim == 3 or grid is not None:
            self.node_batch = _even(x, mask, batch, grid, ranks)
        else:
            self.node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes, ranks, whole=pairs)
        if grid is not None:
            if len(grid) * self.node_batch.count != count or len(grid.shape) != position.pos_dim:
                raise ValueError(
                    f"grid must have {position.pos_dim} axes and as many pixels as each graph has nodes, got {grid} "
                    f"for an input of shape {tuple(x.shape)}"
                )
            if needs_positions and grid.periodic:
                raise ValueError(
                    f"grid must not be periodic with values='offset', as pixels of a torus have no offset, got {grid}"
                )
            if position.whole_offsets and not grid.is_whole:
                raise ValueError(
                    f"grid must have spacing 1 where offsets are counted, as by tables, got {grid}: take offset='mlp'"
                )
            if pos is None and (position.needs_positions or needs_positions):
                pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
                pos = pos.repeat(self.node_batch.count, 1).view(*self.shape, -1)
        near = position.needs_neighbors and count > 0
        found = near and neighbors is None and grid is None
        if position.needs_positions or needs_positions or found:
            why = "values='offset' needs it" if needs_positions and not found else position.why
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, why).reshape(-1, position.pos_dim)
            pos = pos if mask is None else torch.where(mask.flatten()[:, None], pos, torch.zeros_like(pos))
        else:
            pos = None
        self.x, self.pos = self.node_batch.zero_padding(x.reshape(-1, x.shape[-1])), pos
        self.near = self._near(position, neighbors, batch, grid) if near else None
        if self.near is not None and needs_positions and not self.near.between_positions:
            _refuse_periodic(cast(Tensor, pos), self.near.offsets, self.near)
        self.rows = self.node_batch.padded() if pairs else graph_rows(self.node_batch)

    def _near(
        self, position: Position, neighbors: SortedPairs | None, batch: Tensor | None, grid: PixelGrid | None
    ) -> SortedPairs:
        """Near pairs among all nodes: those that are given, or a grid's, or found."""
        mask = self.node_batch.mask
        if neighbors is None and grid is not None:
            neighbors = grid.neighbors(self.node_batch.count, self.x.device)
        elif neighbors is None:
            graph = batch if self.node_batch.count <= 1 else self.node_batch.batch
            if mask is not None:  # a node that does not exist is a graph by itself, and near none
                alone = self.node_batch.count + torch.arange(len(mask), device=mask.device)
                graph = torch.where(mask, self.node_batch.batch, alone)
            neighbors = position.find_neighbors(cast(Tensor, self.pos), graph)
        elif position.whole_offsets:
            whole_offsets(neighbors.offsets, name="offsets (edge_offset)")
        neighbors.check_nodes(self.x.shape[0], position.pos_dim)
        neighbors.check_graphs("edge_index", batch)
        return neighbors if mask is None else neighbors.restricted(mask)

    def restore(self, out: Tensor) -> Tensor:
        """Outputs (nodes, ...) in the form of the input, zero where masked."""
        return self.node_batch.zero_padding(out).view(*self.shape, *out.shape[1:])


def _even(
    x: Tensor, mask: Tensor | None, batch: Tensor | None, grid: PixelGrid | None, ranks: Ranks | None
) -> NodeBatch:
    """The graphs of a dense input, or of one on a grid."""
    if ranks is not None:
        raise ValueError(
            "process_group must be None where the input is (B, N, channels) or on a grid: nodes are shared as "
            "(N, channels), with batch"
        )
    if batch is not None:
        given = "grid is given, which says how large every graph is" if x.ndim == 2 else "the input is (B, N, channels)"
        raise ValueError(f"batch must be None where {given}")
    if x.ndim == 2 and grid is not None:
        return NodeBatch.dense(x.shape[0] // len(grid), len(grid), None, x.device)
    checks.mask(mask, tuple(x.shape[:-1]))
    return NodeBatch.dense(x.shape[0], x.shape[1], mask, x.device)


@checks.of_values
def _refuse_periodic(pos: Tensor, given: Tensor, neighbors: SortedPairs) -> None:
    """Raise ValueError where offsets are not the differences of positions, as across the border of a periodic box."""
    given, pos = given.detach(), pos.detach()
    apart = (pos[neighbors.source].double() - pos[neighbors.target].double() - given.double()).abs().amax(-1)
    apart = apart if neighbors.mask is None else apart[neighbors.mask]
    rounding = 16 * max((torch.finfo(t.dtype).eps for t in (pos, given) if t.is_floating_point()), default=0.0)
    if len(apart) and float(apart.max()) > 1e-3 * float(given.abs().max()) + rounding * float(pos.abs().max()):
        raise ValueError(
            "edge_offset must be differences of pos with values='offset', which reaches all nodes, got others: in a "
            "periodic box far nodes have no offset; take values='content'"
        )
