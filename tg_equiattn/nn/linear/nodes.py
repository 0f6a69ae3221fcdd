"""The input of a layer, dense or ragged or a grid, as nodes one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ... import checks
from ...functional.linear.clipped import Aggregate, sum_aggregation
from ...functional.linear.rows import Rows, longest_graph
from ...grids import PixelGrid
from ...neighbors import Neighbors
from ...offsets import GIVEN, whole_offsets
from ...ragged import readable
from ...ranks import Ranks
from .positions import Position


@dataclasses.dataclass
class Graphs:
    """Whole graphs that are attended to in one way.

    Attributes:
        rows: which of their nodes form a graph.
        pairs: whether weights are of all pairs, not of random features.
        pos: ``(nodes, dim)``, zero where masked, or ``None`` where positions are not needed.
        near: their near pairs, where they are needed.
        aggregate: how values are summed over pairs.
        index: their nodes among all; ``None`` where these are all.
        edges: their near pairs among all; ``None`` where these are all.
    """

    rows: Rows
    pairs: bool
    pos: Tensor | None = None
    near: Neighbors | None = None
    aggregate: Aggregate = sum_aggregation
    index: Tensor | None = None
    edges: Tensor | None = None

    @property
    def neighbors(self) -> Neighbors:
        return cast(Neighbors, self.near)

    def take(self, x: Tensor) -> Tensor:
        """Of all nodes (N, ...) those of these graphs."""
        return x if self.index is None else x.index_select(0, self.index)


class Nodes:
    """What a layer was called with, checked, and what its kind of positions needs of it.

    Args:
        x: dense ``(B, N, C)``, or ragged ``(N, C)``.
        position: says whether positions or near pairs are needed, and finds pairs where none are given.
        needs_positions: whether they are needed besides, for offsets of all nodes.
        mask, batch, batch_size, pos, grid, neighbors, aggregate, max_num_nodes: as the layer's ``forward``.
        most: up to so many nodes graphs are attended to by pairs; infinity for all, 0 for none.
        ranks: among which the nodes of every graph are shared.

    Attributes:
        x: ``(nodes, C)``, zero where masked.
        pos: ``(nodes, dim)``, zero where masked, or ``None`` where they are not needed.
        graphs: the graphs, by how they are attended to.
        pairs: how many near pairs there are.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    def __init__(
        self,
        x: Tensor,
        position: Position,
        *,
        needs_positions: bool,
        mask: Tensor | None,
        batch: Tensor | None,
        batch_size: int | None,
        pos: Tensor | None,
        grid: PixelGrid | None,
        neighbors: Neighbors | None,
        aggregate: Aggregate,
        most: float,
        max_num_nodes: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.shape, self.mask = x.shape[:-1], mask
        count = math.prod(self.shape)
        shared = None if ranks is None else _shared_graphs(x, mask, batch, batch_size, grid, ranks)
        graphs = _number_of_graphs(x, mask, batch, batch_size, grid) if shared is None else len(shared[1])
        if grid is not None:
            if len(grid) * graphs != count or len(grid.shape) != position.pos_dim:
                raise ValueError(
                    f"grid must have {position.pos_dim} axes and as many pixels as each graph has nodes, got {grid} "
                    f"for an input of shape {tuple(x.shape)}"
                )
            if needs_positions and grid.periodic:
                raise ValueError(
                    f"grid must not be periodic with values='offset', as pixels of a torus have no offset, got {grid}"
                )
            if pos is None and (position.needs_positions or needs_positions):
                pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
                pos = pos.repeat(graphs, 1).view(*self.shape, -1)
        near = position.needs_neighbors and count > 0
        found = near and neighbors is None and grid is None
        if not (position.needs_positions or needs_positions or found):
            pos = None
        else:
            why = "values='offset' needs it" if needs_positions and not found else position.why
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, why)
            pos = _zero_where_masked(pos, mask).reshape(-1, position.pos_dim)
        self.x, self.pos, self.pairs = _zero_where_masked(x, mask).reshape(-1, x.shape[-1]), pos, 0
        if near:
            neighbors = _near(x, position, neighbors, mask, batch, graphs, pos, grid)
            self.pairs = neighbors.offsets.shape[0]
            if needs_positions and not neighbors.between_positions:
                _refuse_periodic(neighbors, cast(Tensor, pos))
            position.measure(neighbors)
        whole = Graphs(Rows(0), False, pos, neighbors if near else None, aggregate)
        if shared is not None:
            batch, _, longest = shared
            rows = Rows(count, graphs, batch, None, longest, ranks)
            self.graphs = [dataclasses.replace(whole, rows=rows)]
            return
        small = _small(batch, graphs, count, mask, max_num_nodes, most)
        if isinstance(small, bool):
            bound = longest_graph(batch, graphs, max_num_nodes) if small else None
            self.graphs = [dataclasses.replace(whole, rows=Rows(count, graphs, batch, mask, bound), pairs=small)]
        else:
            batch = torch.arange(graphs, device=x.device).repeat_interleave(count // graphs) if batch is None else batch
            self.graphs = [
                _those(whole, chosen, batch, mask, pairs) for chosen, pairs in ((small, True), (~small, False))
            ]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """What there is of nodes of each part (n, ...), of all nodes (N, ...); zero where masked."""
        if self.graphs[0].index is None:
            return parts[0]
        out = parts[0].new_zeros(self.x.shape[0], *parts[0].shape[1:])
        for graphs, part in zip(self.graphs, parts, strict=True):
            out = out.index_copy(0, cast(Tensor, graphs.index), part)
        return out

    def joined_weights(self, parts: Sequence[Tensor]) -> Tensor:
        """Those of near pairs, and then nodes, of each part (e + n, heads), of all of them (E + N, heads)."""
        if self.graphs[0].index is None:
            return parts[0]
        out = parts[0].new_zeros(self.pairs + self.x.shape[0], parts[0].shape[1])
        for graphs, part in zip(self.graphs, parts, strict=True):
            index = cast(Tensor, graphs.index)
            edges = index[:0] if graphs.edges is None else graphs.edges
            out = out.index_copy(0, torch.cat([edges, self.pairs + index]), part)
        return out

    def restore(self, out: Tensor) -> Tensor:
        """Outputs (nodes, ...) in the form of the input, zero where masked."""
        out = out.view(*self.shape, *out.shape[1:])
        return out if self.mask is None else torch.where(self.mask.view(*self.shape, *[1] * (out.ndim - 2)), out, 0.0)


def _small(
    batch: Tensor | None, graphs: int, count: int, mask: Tensor | None, max_num_nodes: int | None, most: float
) -> bool | Tensor:
    """Whether graphs have at most so many nodes: all, none, or which of them (graphs,)."""
    if most in (0, math.inf):
        return most > 0
    if batch is None or graphs <= 1:
        if count // max(1, graphs) <= most:
            return True
        if mask is None:
            return False
        sizes = mask.sum(1)
    else:
        if max_num_nodes is not None and max_num_nodes <= most:
            return True
        sizes = torch.bincount(batch, minlength=graphs) if readable(batch) else batch
    if not readable(sizes):
        raise ValueError(
            f"method must be 'features' or 'pairs', or max_num_nodes at most {int(most)}, where sizes of graphs cannot "
            "be read, as within torch.compile, got 'auto'"
        )
    small = sizes <= most
    share = int(small.sum())
    return small if 0 < share < graphs else share > 0


def _those(whole: Graphs, chosen: Tensor, batch: Tensor, mask: Tensor | None, pairs: bool) -> Graphs:
    """The chosen ones (graphs,) alone, without what is masked."""
    here = chosen[batch] if mask is None else chosen[batch] & mask.flatten()
    index = here.nonzero()[:, 0]
    batch = (chosen.cumsum(0) - 1)[batch[index]]
    count = int(chosen.sum())
    rows = Rows(len(index), count, batch, longest=longest_graph(batch, count, None) if pairs else None)
    near = edges = None
    if whole.near is not None:
        near, edges = whole.near.of_nodes(index)
    pos = None if whole.pos is None else whole.pos[index]
    return Graphs(rows, pairs, pos, near, whole.aggregate, index, edges)


def _near(
    x: Tensor,
    position: Position,
    neighbors: Neighbors | None,
    mask: Tensor | None,
    batch: Tensor | None,
    graphs: int,
    pos: Tensor | None,
    grid: PixelGrid | None,
) -> Neighbors:
    """Near pairs among all nodes: those that are given, or a grid's, or found."""
    if neighbors is None and grid is not None:
        if position.whole_offsets and not grid.is_whole:
            raise ValueError(
                f"grid must have spacing 1 where offsets are counted, as by tables, got {grid}: take offset='mlp'"
            )
        neighbors = grid.neighbors(graphs, x.device)
    elif neighbors is None:
        neighbors = position.find_neighbors(cast(Tensor, pos), _graph_of_each(x, mask, batch, graphs))
    elif position.whole_offsets:
        whole_offsets(neighbors.offsets, what=GIVEN)
    neighbors.check_nodes(math.prod(x.shape[:-1]), position.pos_dim)
    target, source = neighbors.pattern.row, neighbors.pattern.col
    free = batch is not None and checks.values_are_free(target) and checks.values_are_free(batch)
    if batch is not None and free and not torch.equal(batch[target], batch[source]):
        raise ValueError("neighbors must not join nodes of different graphs of batch")
    return neighbors if mask is None else neighbors.restricted(mask.flatten())


def _refuse_periodic(neighbors: Neighbors, pos: Tensor) -> None:
    """Raise ValueError where offsets are not the differences of positions, as across the border of a periodic box."""
    if not (checks.values_are_free(pos) and checks.values_are_free(neighbors.offsets)):
        return
    given, pos = neighbors.offsets.detach(), pos.detach()
    target, source = neighbors.pattern.row, neighbors.pattern.col
    apart = (pos[source].double() - pos[target].double() - given.double()).abs().amax(-1)
    apart = apart if neighbors.exists is None else apart[neighbors.exists]
    rounding = 16 * max((torch.finfo(t.dtype).eps for t in (pos, given) if t.is_floating_point()), default=0.0)
    if len(apart) and float(apart.max()) > 1e-3 * float(given.abs().max()) + rounding * float(pos.abs().max()):
        raise ValueError(
            "edge_offset must be differences of pos with values='offset', which reaches all nodes, got others: in a "
            "periodic box far nodes have no offset; take values='content'"
        )


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
