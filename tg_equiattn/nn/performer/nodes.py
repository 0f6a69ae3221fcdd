"""The input of a layer, dense or ragged or a grid, as nodes one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ... import checks
from ...grids import PixelGrid
from ...pairs import GIVEN, Pairs, whole_offsets
from ...ragged import Ragged, readable
from ...ranks import Ranks
from .positions import Graphs, Position


class Nodes:
    """A layer's input, checked: x (nodes, C), pos (nodes, dim), zero where masked; pairs up to ``most`` nodes."""

    def __init__(
        self, x: Tensor, position: Position, needs_positions: bool, most: float, ranks: Ranks | None,
        mask: Tensor | None, batch: Tensor | None, batch_size: int | None, max_num_nodes: int | None,
        pos: Tensor | None, grid: PixelGrid | None, neighbors: Pairs | None,
    ) -> None:  # fmt: skip
        self.shape, count = x.shape[:-1], math.prod(x.shape[:-1])
        if x.ndim == 2 and mask is not None:
            raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
        if x.ndim == 3 or grid is not None:
            self.ragged = _even(x, mask, batch, grid, ranks)
        else:
            self.ragged = Ragged.flat(x, batch, batch_size, max_num_nodes, ranks, whole=most > 0)
        if grid is not None:
            if len(grid) * self.ragged.count != count or len(grid.shape) != position.pos_dim:
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
                pos = pos.repeat(self.ragged.count, 1).view(*self.shape, -1)
        near = position.needs_neighbors and count > 0
        found = near and neighbors is None and grid is None
        if position.needs_positions or needs_positions or found:
            why = "values='offset' needs it" if needs_positions and not found else position.why
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, why).reshape(-1, position.pos_dim)
            pos = pos if mask is None else torch.where(mask.flatten()[:, None], pos, torch.zeros_like(pos))
        else:
            pos = None
        self.x, self.pos = self.ragged.zero_padding(x.reshape(-1, x.shape[-1])), pos
        if near:
            neighbors = self._near(position, neighbors, batch, grid)
            if needs_positions and not neighbors.between_positions:
                _refuse_periodic(neighbors, cast(Tensor, pos))
            position.measure(neighbors)
        neighbors = neighbors if near else None
        small = ranks is None and _small(self.ragged, max_num_nodes, most)
        if isinstance(small, bool):
            self.graphs = [Graphs(self.ragged.rows(whole=small), small, pos, neighbors)]
        else:
            self.graphs = [self._those(neighbors, *choice) for choice in ((small, True), (~small, False))]

    def _near(self, position: Position, neighbors: Pairs | None, batch: Tensor | None, grid: PixelGrid | None) -> Pairs:
        """Near pairs among all nodes: those that are given, or a grid's, or found."""
        mask = self.ragged.mask
        if neighbors is None and grid is not None:
            neighbors = grid.neighbors(self.ragged.count, self.x.device)
        elif neighbors is None:
            graph = batch if self.ragged.count <= 1 else self.ragged.batch
            if mask is not None:  # a node that does not exist is a graph by itself, and near none
                alone = self.ragged.count + torch.arange(len(mask), device=mask.device)
                graph = torch.where(mask, self.ragged.batch, alone)
            neighbors = position.find_neighbors(cast(Tensor, self.pos), graph)
        elif position.whole_offsets:
            whole_offsets(neighbors.offsets, what=GIVEN)
        neighbors.check_nodes(self.x.shape[0], position.pos_dim)
        neighbors.check_graphs("neighbors", batch)
        return neighbors if mask is None else neighbors.restricted(mask)

    def _those(self, near: Pairs | None, chosen: Tensor, pairs: bool) -> Graphs:
        """The chosen ones (graphs,) alone, without what is masked."""
        ragged, index = self.ragged.select(chosen)
        near = None if near is None else near.of_nodes(index)[0]
        return Graphs(ragged.rows(whole=pairs), pairs, None if self.pos is None else self.pos[index], near, index)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """What there is of nodes of each part (n, ...), of all nodes (N, ...); zero where masked."""
        if self.graphs[0].chosen is None:
            return parts[0]
        out = parts[0].new_zeros(self.x.shape[0], *parts[0].shape[1:])
        for graphs, part in zip(self.graphs, parts, strict=True):
            out = out.index_copy(0, cast(Tensor, graphs.chosen), part)
        return out

    def restore(self, out: Tensor) -> Tensor:
        """Outputs (nodes, ...) in the form of the input, zero where masked."""
        return self.ragged.zero_padding(out).view(*self.shape, *out.shape[1:])


def _even(x: Tensor, mask: Tensor | None, batch: Tensor | None, grid: PixelGrid | None, ranks: Ranks | None) -> Ragged:
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
        return Ragged.dense(x.shape[0] // len(grid), len(grid), None, x.device)
    checks.mask(mask, tuple(x.shape[:-1]))
    return Ragged.dense(x.shape[0], x.shape[1], mask, x.device)


def _small(ragged: Ragged, max_num_nodes: int | None, most: float) -> bool | Tensor:
    """Whether graphs have at most so many nodes: all, none, or which of them (graphs,)."""
    if most in (0, math.inf):
        return most > 0
    bound = ragged.longest if ragged.even else max_num_nodes
    if bound is not None and bound <= most:
        return True
    if ragged.even and ragged.mask is None:
        return False
    if not readable(ragged.sizes):
        raise ValueError(
            f"method must be 'features' or 'pairs', or max_num_nodes at most {int(most)}, where sizes of graphs cannot "
            "be read, as within torch.compile, got 'auto'"
        )
    small = ragged.sizes <= most
    share = int(small.sum())
    return small if 0 < share < ragged.count else share > 0


def _refuse_periodic(neighbors: Pairs, pos: Tensor) -> None:
    """Raise ValueError where offsets are not the differences of positions, as across the border of a periodic box."""
    if not (checks.values_are_free(pos) and checks.values_are_free(neighbors.offsets)):
        return
    given, pos = neighbors.offsets.detach(), pos.detach()
    apart = (pos[neighbors.source].double() - pos[neighbors.target].double() - given.double()).abs().amax(-1)
    apart = apart if neighbors.exists is None else apart[neighbors.exists]
    rounding = 16 * max((torch.finfo(t.dtype).eps for t in (pos, given) if t.is_floating_point()), default=0.0)
    if len(apart) and float(apart.max()) > 1e-3 * float(given.abs().max()) + rounding * float(pos.abs().max()):
        raise ValueError(
            "edge_offset must be differences of pos with values='offset', which reaches all nodes, got others: in a "
            "periodic box far nodes have no offset; take values='content'"
        )
