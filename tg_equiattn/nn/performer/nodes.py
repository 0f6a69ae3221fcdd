"""Reads the input of a layer, dense, ragged or on a grid, as nodes one after the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ... import checks
from ...edges import lie_between, whole_offsets
from ...grids import PixelGrid
from ...neighbors import SortedPairs
from ...node_batch import NodeBatch
from ...ranks import Ranks
from .positions import Position

if TYPE_CHECKING:
    from jaxtyping import Float


_ROUNDING = 0.01  # largest rounding of positions, in units of cutoff


def check_pos(pos: object, position: Position) -> None:
    """Raise ValueError for positions with another number of coordinates than the layer has. Where values are read, also
    raise it for positions that are not finite or that are rounded too much."""
    pos_dim = position.pos_dim
    if isinstance(pos, Tensor) and pos.ndim > 1 and pos.shape[-1] != pos_dim:
        dim = pos.shape[-1]
        raise ValueError(
            f"pos has {dim} coordinates but pos_dim is {pos_dim}: pass pos_dim={dim}, with offset='distance' or 'mlp' "
            f"and a cutoff for points off a grid (in RelativeGPSBlock: attn_kwargs={{'pos_dim': {dim}, 'offset': "
            "'distance', 'cutoff': ...})"
        )
    if isinstance(pos, Tensor) and pos.is_floating_point():
        _check_values(pos.detach(), position)


@checks.of_values
def _check_values(pos: Float[Tensor, "nodes dim"], position: Position) -> None:
    size = float(pos.abs().max()) if pos.numel() else 0.0  # NaN if any is
    if not size < math.inf:
        raise ValueError("pos must be finite, got NaN or infinity; leave out nodes without a position, or mask them")
    rounding = torch.finfo(pos.dtype).eps * size
    if not position.whole_offsets and rounding > _ROUNDING * position.unit:
        raise ValueError(
            f"pos must be float64 so far from the origin: {pos.dtype} rounds {size:.3g} by up to {rounding:.2g}, and "
            f"offsets are measured in units of {position.unit:g}; convert before pos is rounded (x may stay as it is)"
        )


class Nodes:
    """The input of a layer after all checks.

    Attributes:
        x: features of the nodes.
        pos: positions, zero for masked nodes; ``None`` if none are needed.
        near: the near pairs; ``None`` if none are needed.
        node_batch: the graphs. Attention over all pairs needs ``whole`` graphs, with known sizes.
    """

    x: Float[Tensor, "nodes channels"]
    pos: Float[Tensor, "nodes dim"] | None
    near: Any

    def __init__(
        self, x: Tensor, position: Position, ranks: Ranks | None, mask: Tensor | None, batch: Tensor | None,
        batch_size: int | None, max_num_nodes: int | None, pos: Tensor | None, grid: PixelGrid | None,
        neighbors: SortedPairs | None, *, far_offsets: bool, whole: bool,
    ) -> None:  # fmt: skip
        self.shape, count = x.shape[:-1], math.prod(x.shape[:-1])
        if x.ndim == 2 and mask is not None:
            raise ValueError("mask must be None where the input is (N, channels): leave the masked nodes out")
        if x.ndim == 3 or grid is not None:
            self.node_batch = _even(x, mask, batch, grid, ranks)
        else:
            self.node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes, ranks, whole, any_order=True)
        needs_positions = position.needs_positions or far_offsets
        if grid is not None:
            self._check_grid(grid, position, count, far_offsets)
            if pos is None and needs_positions:
                pos = grid.pos(x.device, torch.promote_types(x.dtype, torch.float32))
                pos = pos.repeat(self.node_batch.count, 1).view(*self.shape, -1)
        near = position.needs_neighbors and count > 0
        found = near and neighbors is None and grid is None
        if found and not position.pos_dim:
            raise ValueError("edge_index (or neighbors) must be given with offset=None, got None")
        if needs_positions or found:
            why = "values='offset' needs it" if far_offsets and not found else position.why
            if mask is not None and isinstance(pos, Tensor) and pos.shape[:-1] == mask.shape:
                pos = torch.where(mask[..., None], pos, torch.zeros_like(pos))
            check_pos(pos, position)
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, why).reshape(-1, position.pos_dim)
        elif pos is not None and neighbors is not None and neighbors.between_positions:
            pos = checks.positions(pos, (*self.shape, position.pos_dim), x, "").reshape(-1, position.pos_dim)
        self.x, self.near = self.node_batch.zero_padding(x.reshape(-1, x.shape[-1])), None
        self.pos = pos if needs_positions or found else None
        if near:
            self.near = self._near(position, neighbors, batch, grid)
            if neighbors is not None and pos is not None and (far_offsets or neighbors.between_positions):
                _check_offsets(pos, self.near.offsets, self.near, position.whole_offsets)

    def _check_grid(self, grid: PixelGrid, position: Position, count: int, far_offsets: bool) -> None:
        """Raise ValueError if a grid does not fit the input or the kind of positions."""
        if len(grid) * self.node_batch.count != count or len(grid.shape) != position.pos_dim:
            raise ValueError(
                f"grid must have {position.pos_dim} axes and as many pixels as each graph has nodes, got {grid} "
                f"for {count} nodes in {self.node_batch.count} graphs"
            )
        if far_offsets and grid.periodic:
            raise ValueError(
                f"grid must not be periodic with values='offset', as pixels of a torus have no offset, got {grid}"
            )
        if position.whole_offsets and not grid.is_whole:
            raise ValueError(
                f"grid must have spacing 1 where offsets are counted, as by tables, got {grid}: take offset='mlp'"
            )

    def _near(
        self, position: Position, neighbors: SortedPairs | None, batch: Tensor | None, grid: PixelGrid | None
    ) -> SortedPairs:
        """Near pairs among all nodes: those given, those of the grid, or those found from positions."""
        mask = self.node_batch.mask
        if neighbors is None and grid is not None:
            neighbors = grid.neighbors(self.node_batch.count, self.x.device)
        elif neighbors is None:
            graph = batch if self.node_batch.count <= 1 else self.node_batch.batch
            if mask is not None:  # each masked node is a graph of its own, so it is near no other
                alone = self.node_batch.count + torch.arange(len(mask), device=mask.device)
                graph = torch.where(mask, self.node_batch.batch, alone)
            neighbors = position.find_neighbors(cast(Tensor, self.pos), graph)
        elif position.whole_offsets:
            whole_offsets(neighbors.offsets, name="offsets (edge_offset)")
        neighbors.check_nodes(self.x.shape[0], position.pos_dim)
        neighbors.check_graphs("edge_index", batch)
        return neighbors if mask is None else neighbors.restricted(mask)

    def restore(self, out: Float[Tensor, "nodes ..."]) -> Tensor:
        """Outputs in the form of the input, zero where masked."""
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
def _check_offsets(
    pos: Float[Tensor, "nodes dim"], given: Float[Tensor, "pairs dim"], neighbors: SortedPairs, whole: bool
) -> None:
    """Raise ValueError if offsets are not differences of positions, for example across the border of a periodic box, or
    after positions have moved."""
    fits = lie_between(pos, given, neighbors.target, neighbors.source, whole)
    fits = fits if neighbors.mask is None else fits | ~neighbors.mask
    if bool(fits.all()):
        return
    if neighbors.between_positions:
        raise ValueError(
            "neighbors must be of the same positions as pos, got near pairs whose offsets are not differences of pos: "
            "find them again with neighbors() when positions have moved"
        )
    raise ValueError(
        "edge_offset must be differences of pos with values='offset', which uses the offsets of all nodes, got "
        "others: in a periodic box distant nodes have no unique offset; take values='content'"
    )
