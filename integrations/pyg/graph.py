"""Conversion of PyG's arguments, edges of any kind and a batch index, to those of the core."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from tg_equiattn import checks
from tg_equiattn.edges import check_edges, lie_between

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Num

ONE_SET = "attention is among the nodes of one set; bipartite graphs have two"


class SharesNodes:
    """A layer whose ``attention`` may share the nodes of graphs among processes."""

    attention: Any

    @property
    def process_group(self) -> Any:
        """The :mod:`torch.distributed` group whose processes share the nodes of graphs; :obj:`None` without one."""
        return self.attention.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        self.attention.process_group = process_group


def plain_edges(
    edge_index, edge_attr: Float[Tensor, "edges ..."] | None, nodes: int
) -> tuple[Int[Tensor, "2 edges"], Float[Tensor, "edges ..."] | None]:
    """Edges (2, E) and their features, from a Tensor, an EdgeIndex, or an adjacency with targets as rows, as in PyG.

    Values of an adjacency with several columns are features, unless ``edge_attr`` is given, in the order of its rows.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    elif is_sparse(edge_index):
        size = tuple(edge_index.sizes()[:2] if isinstance(edge_index, SparseTensor) else edge_index.shape[:2])
        if size != (nodes, nodes):
            raise ValueError(f"edge_index must be a {nodes} x {nodes} adjacency, got {size}")
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_csc:
            edge_index = edge_index.to_sparse_coo().coalesce()
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_coo:
            (target, source), values = edge_index._indices(), edge_index._values()  # pairs given twice stay apart
        else:
            (target, source), values = to_edge_index(edge_index)
        edge_index = torch.stack([source, target])
        edge_attr = values if edge_attr is None and values is not None and values.ndim == 2 else edge_attr
    if isinstance(edge_index, Tensor) and edge_index.dtype == torch.int32:
        edge_index = edge_index.long()
    check_edges(edge_index, nodes)
    return edge_index, edge_attr


def check_nodes(x: object, channels: int, signals: bool = False) -> None:
    """Raise ValueError unless x holds features of one set of nodes, or if allowed of several ``signals`` on them."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be one tensor of shape (N, {channels}), got {type(x).__name__}: {ONE_SET}")
    if x.ndim != 2 and not (signals and x.ndim == 3):
        wanted = f"(N, {channels}){f', or (B, N, {channels}) for signals on one graph' if signals else ''}"
        how = "" if signals else "; with signals (B, N, F) on one graph make a batch of B graphs"
        raise ValueError(f"x must have shape {wanted}, got {tuple(x.shape)}{how}")


def check_sources(edge_index: object, edge_attr: object, edge_offset: object, grid: object, cell: object) -> None:
    """Raise ValueError for arguments that would have no effect."""
    for name, given in (("edge_attr", edge_attr), ("edge_offset", edge_offset)):
        if given is not None and edge_index is None:
            raise ValueError(f"{name} must be None where edge_index is None: it has a row for each edge")
    if cell is not None and edge_offset is None:
        raise ValueError("cell must be None without edge_offset, which says where edges cross the border of the cell")
    if grid is not None and edge_index is not None:
        raise ValueError("edge_index must be None where neighbors is a grid, which stands for edges")


def batch_of(
    batch: Int[Tensor, " nodes"] | None, ptr: Int[Tensor, " starts"] | None, nodes: int
) -> tuple[Int[Tensor, " nodes"] | None, int | None]:
    """The graph index of a ``batch`` or of ``ptr``, the positions where graphs begin, and the number of graphs."""
    for name, index in (("batch", batch), ("ptr", ptr)):
        if index is not None and not isinstance(index, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(index).__name__}")
    if ptr is None:
        return batch, None
    if batch is not None:
        raise ValueError("ptr must be None where batch is given: they say the same")
    if ptr.dtype != torch.int64 or ptr.ndim != 1 or ptr.shape[0] < 2:
        raise ValueError(f"ptr must be int64 (graphs + 1,), got {ptr.dtype} of shape {tuple(ptr.shape)}")
    _check_ptr(ptr, nodes)
    index = torch.searchsorted(ptr, torch.arange(nodes, device=ptr.device), right=True) - 1
    return index, ptr.shape[0] - 1


@checks.of_values
def _check_ptr(ptr: Int[Tensor, " starts"], nodes: int) -> None:
    if int(ptr[0]) != 0 or int(ptr[-1]) != nodes or bool((ptr.diff() < 0).any()):
        raise ValueError(f"ptr must rise from 0 to {nodes}, got {ptr.tolist()[:8]}")


def check_offsets(
    pos: Num[Tensor, "nodes dim"], edge_offset: Num[Tensor, "edges dim"], edge_index: Int[Tensor, "2 edges"],
    batch: Int[Tensor, " nodes"] | None, cell: Float[Tensor, "*graphs dim dim"] | None, whole: bool,
) -> None:  # fmt: skip
    """Raise ValueError unless offsets are differences of positions, up to whole lattice vectors if there is a ``cell``.
    Values are read on a CPU only."""
    if cell is not None:
        dim = pos.shape[-1]
        fits = isinstance(cell, Tensor) and cell.ndim in (2, 3) and cell.shape[-1] == dim and cell.is_floating_point()
        if not fits or cell.device != pos.device or cell.numel() % dim**2 or (cell.ndim == 3 and cell.shape[1] != dim):
            wanted = f"floating point ({dim}, {dim}) or (graphs, {dim}, {dim}) on {pos.device}"
            raise ValueError(f"cell must be {wanted}, got {checks.described(cell)}")
    _check_offsets(pos, edge_offset, edge_index, batch, cell, whole)


@checks.of_values
def _check_offsets(
    pos: Tensor, edge_offset: Tensor, edge_index: Tensor, batch: Tensor | None, cell: Tensor | None, whole: bool
) -> None:
    (source, target), lattice = edge_index, None
    if cell is not None:
        lattice = cell.reshape(-1, pos.shape[1], pos.shape[1])
        graph = torch.zeros_like(target) if batch is None or len(lattice) == 1 else batch[target]
        if not bool((graph < len(lattice)).all()):
            raise ValueError(f"cell must be one for all graphs or one a graph, got {len(lattice)} cells")
        lattice = lattice[graph]
    wrong = ~lie_between(pos, edge_offset, target, source, whole, lattice)
    if bool(wrong.any()):
        i, j, came = target[wrong][0], source[wrong][0], edge_offset[wrong][0].tolist()
        up_to = "whole periods: pass the cell of a periodic graph" if cell is None else "whole lattice vectors of cell"
        raise ValueError(
            f"edge_offset must be differences of pos, up to {up_to}; got {came} where pos differ by "
            f"{(pos[j] - pos[i]).tolist()}. Where a transform has changed pos or edges, leave edge_offset out"
        )


def warn_of_hidden_batch(edge_index: Int[Tensor, "2 edges"], nodes: int) -> None:
    """Warn if nodes come in several blocks that no edge leaves. They may be a batch of graphs whose batch index was not
    passed, or one graph of several parts."""
    if not edge_index.shape[1]:
        return
    low, high = edge_index.aminmax(dim=0)
    furthest = high.new_zeros(nodes).scatter_reduce(0, low, high, "amax").cummax(0).values
    joined = furthest > torch.arange(nodes, device=low.device)  # node n and n + 1 lie in one block
    blocks = int((joined & ~torch.cat([joined.new_zeros(1), joined[:-1]])).sum())
    if blocks > 1:
        warnings.warn(
            f"batch was not given for nodes in {blocks} blocks that no edge leaves, which are taken for one graph. For "
            "several graphs give batch or ptr: GPSConv does not pass batch on, call it with ptr=data.ptr, which "
            f"reaches this layer. For one graph of several parts give batch=torch.zeros({nodes}, dtype=torch.long)",
            stacklevel=2,
        )
