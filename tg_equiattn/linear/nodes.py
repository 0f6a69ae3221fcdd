"""Reads the input of a layer, dense, ragged or on a grid, as nodes one after the other."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import checks
from ..graphs.edges import check_between, check_whole, offsets_between
from ..graphs.neighbors import NeighborList, pairs_within
from ..graphs.node_batch import NodeBatch
from ..grids import PixelGrid
from ..shapes import Float

MOVED = "neighbors must be of the same positions as pos: find them again with neighbors() when positions have moved"
NO_FAR_OFFSETS = (
    "edge_offset must be differences of pos with values='offset' or 'far' and position='sinusoid', which use the "
    "positions of all nodes: in a periodic box distant nodes have no unique offset; take values='content' with "
    "position='window'"
)


class Needs(NamedTuple):
    """The inputs, beside features, that a kind of positions reads.

    Attributes:
        dim: number of coordinates; 0 for edges without offsets.
        cutoff: length below which pairs are near.
        positions: positions of all nodes are read.
        neighbors: near pairs are read.
        whole: offsets of near pairs must be whole numbers, and distances are Manhattan distances.
        edge_dim: number of features of near pairs; ``None`` for none.
        far_offsets: offsets of all nodes are read, which a torus does not have.
        why: reason that an error gives where positions are missing.
    """

    dim: int
    cutoff: float = 1.0
    positions: bool = False
    neighbors: bool = False
    whole: bool = False
    edge_dim: int | None = None
    far_offsets: bool = False
    why: str = ""


class Nodes(NamedTuple):
    """The input of a layer after all checks.

    Attributes:
        x: features of the nodes.
        pos: positions, zero for masked nodes; ``None`` if none are needed.
        near: the near pairs, if they are needed.
        node_batch: the graphs.
        shape: shape of the input without channels.
    """

    x: Float[Tensor, "nodes channels"]
    pos: Float[Tensor, "nodes dim"] | None
    near: Any
    node_batch: NodeBatch
    shape: torch.Size

    def restore(self, out: Float[Tensor, "nodes ..."]) -> Tensor:
        """Outputs in the form of the input, zero where masked."""
        return self.node_batch.zero_padding(out).view(*self.shape, *out.shape[1:])


def read_nodes(
    x: Tensor, needs: Needs, mask: Tensor | None, batch: Tensor | None, batch_size: int | None,
    max_num_nodes: int | None, pos: Tensor | None, grid: PixelGrid | None, neighbors: NeighborList | None, whole: bool,
) -> Nodes:  # fmt: skip
    """Check the input of a layer, and find its near pairs. Attention over all pairs needs ``whole`` graphs, with known
    sizes."""
    shape, count = x.shape[:-1], math.prod(x.shape[:-1])
    if x.ndim == 2 and mask is not None:
        raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
    if x.ndim == 3 or grid is not None:
        node_batch = _even(x, mask, batch, grid)
    else:
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes, whole, any_order=True)
    if grid is not None:
        _check_grid(grid, needs, node_batch, count)
        if pos is None and needs.positions:
            pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
            pos = pos.repeat(node_batch.count, 1).view(*shape, -1)
    near, given = None, neighbors is not None or grid is not None
    search = needs.neighbors and count > 0 and not given
    if search and not needs.dim:
        raise ValueError("edge_index (or neighbors) must be given with offset=None, got None")
    placed = neighbors is not None and pos is not None and needs.dim > 0 and (needs.neighbors or needs.far_offsets)
    if needs.positions or search or placed:
        if mask is not None and isinstance(pos, Tensor) and pos.shape[:-1] == mask.shape:
            pos = torch.where(mask[..., None], pos, torch.zeros_like(pos))
        why = "values='offset' or 'far' needs it" if needs.far_offsets and not search else needs.why
        pos = read_pos(pos, (*shape, needs.dim), x, needs, why).reshape(-1, needs.dim)
    if count and (needs.neighbors or (placed and neighbors.dim == needs.dim)):  # type: ignore[union-attr]
        near = _near_pairs(needs, node_batch, x.device, pos, batch, grid, neighbors)
        near.check_nodes(count, needs.dim, x.device)
        near.check_graphs("edge_index", batch)
        near = near if node_batch.mask is None else near.restricted(node_batch.mask)
        if placed:
            pos = cast(Tensor, pos)
            if needs.far_offsets or near.between_positions:
                rule = MOVED if near.between_positions else NO_FAR_OFFSETS
                check_between(rule, pos, near.offsets, near.target, near.source, needs.whole, mask=near.mask)
            near = near if needs.whole else near.along(pos)
    x = node_batch.zero_padding(x.reshape(-1, x.shape[-1]))
    return Nodes(x, pos if needs.positions or search else None, near, node_batch, shape)


def _even(x: Tensor, mask: Tensor | None, batch: Tensor | None, grid: PixelGrid | None) -> NodeBatch:
    """The graphs of a dense input, or of one on a grid."""
    if batch is not None:
        where = "grid is given, which says how large every graph is" if x.ndim == 2 else "the input is (B, N, channels)"
        raise ValueError(f"batch must be None where {where}")
    if x.ndim == 2 and grid is not None:
        return NodeBatch.dense(x.shape[0] // len(grid), len(grid), None, x.device)
    if mask is not None:
        checks.tensor("mask", mask, torch.bool, [tuple(x.shape[:-1])], x.device)
    return NodeBatch.dense(x.shape[0], x.shape[1], mask, x.device)


def _check_grid(grid: PixelGrid, needs: Needs, node_batch: NodeBatch, count: int) -> None:
    """Raise ValueError if a grid does not fit the input or the kind of positions."""
    if len(grid) * node_batch.count != count or len(grid.shape) != needs.dim:
        raise ValueError(
            f"grid must have {needs.dim} axes and as many pixels as each graph has nodes, got {grid} for {count} nodes "
            f"in {node_batch.count} graphs"
        )
    if needs.far_offsets and grid.periodic:
        raise ValueError(
            f"grid must not be periodic with values='offset' or 'far', as pixels of a torus have no offset, got {grid}"
        )
    if needs.whole and not grid.is_whole:
        raise ValueError(
            f"grid must have spacing 1 where offsets are counted, as by tables, got {grid}: take "
            "position='window' with offset='mlp'"
        )


def read_pos(pos: Tensor | None, shape: tuple[int, ...], x: Tensor, needs: Needs, why: str = "") -> Tensor:
    """Positions, by :func:`.checks.positions`. Raise ValueError for another number of coordinates than the layer has.
    Where values are read, also raise it for positions that are not finite or that are rounded too much."""
    if isinstance(pos, Tensor) and pos.ndim > 1 and pos.shape[-1] != needs.dim:
        dim = pos.shape[-1]
        raise ValueError(
            f"pos has {dim} coordinates but pos_dim is {needs.dim}: pass pos_dim={dim}. Points off a grid need "
            "an offset and a cutoff too, with mean_edge_length of tg_equiattn.graphs: in RelativeGPSBlock "
            f"attn_kwargs={{'pos_dim': {dim}, 'offset': 'distance', 'cutoff': 2 * mean_edge_length(pos, edge_index)}}"
        )
    pos = checks.positions(pos, shape, x, why)
    checks.exact_positions(pos, **({} if needs.whole else {"cutoff": needs.cutoff}))
    return pos


def _near_pairs(
    needs: Needs, node_batch: NodeBatch, device: torch.device, pos: Tensor | None, batch: Tensor | None,
    grid: PixelGrid | None, neighbors: NeighborList | None,
) -> NeighborList:  # fmt: skip
    """The near pairs among all nodes: given by the caller, of the grid, or found from positions."""
    if neighbors is not None:
        if needs.whole:
            check_whole(neighbors.offsets, None, "offsets (edge_offset)")
        return neighbors
    if grid is not None:
        return grid.neighbors(node_batch.count, device)
    if needs.edge_dim is not None:
        raise ValueError("edge_index and edge_attr must be given with edge_dim, got neither")
    pos, mask = cast(Tensor, pos), node_batch.mask
    graph = batch if node_batch.count <= 1 else node_batch.batch
    if mask is not None:  # each masked node is a graph of its own, so it is near no other
        graph = torch.where(mask, node_batch.batch, node_batch.count + torch.arange(mask.shape[0], device=mask.device))
    if not needs.whole:
        edges, offsets = pairs_within(pos, needs.cutoff, graph)
        return NeighborList(edges, pos.shape[0], offsets, between_positions=True, checked=True)
    edges, _ = pairs_within(pos, needs.cutoff + needs.dim / 2, graph, norm=1)
    offsets = offsets_between(pos, edges, True)
    near = offsets.abs().sum(-1) < needs.cutoff
    return NeighborList(edges, pos.shape[0], offsets, mask=near, between_positions=True, checked=True)
