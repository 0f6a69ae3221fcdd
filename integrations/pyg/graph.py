"""From what PyG users pass, edges of any kind and a batch index, to the core's near pairs, with checks."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from tg_equiattn import checks
from tg_equiattn.neighbours import Neighbours
from tg_equiattn.offsets import offsets_between, whole_offsets

_LOOKED_AT = 1000  # edges whose offsets are held against positions
_AGREE = 0.25  # share of offsets that are differences of positions, from which on the others are periodic


def plain_edges(edge_index, edge_attr: Tensor | None, nodes: int) -> tuple[Tensor, Tensor | None]:
    """``edge_index`` (2, E) of sources and targets, and ``edge_attr``, of a Tensor, EdgeIndex or transposed adjacency.

    An adjacency (SparseTensor, or torch's COO, CSR and CSC) is transposed as everywhere in PyG, rows being targets;
    its values are the offsets unless ``edge_attr`` is given in the order of its rows.
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
    if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        what = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"edge_index must be (2, E), a SparseTensor or an EdgeIndex, got {what}")
    if edge_index.dtype != torch.int64:
        raise ValueError(f"edge_index must be int64, got {edge_index.dtype}")
    if checks.values_are_free(edge_index) and edge_index.numel():
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= nodes:
            raise ValueError(f"edge_index must join nodes in [0, {nodes}), got {low} to {high}")
    return edge_index, edge_attr


def check_sources(edge_index: object, edge_attr: object, grid: object) -> None:
    """Raise ValueError where arguments would be passed over."""
    if edge_attr is not None and edge_index is None:
        raise ValueError("edge_attr must be None where edge_index is None: it holds the offsets of edges")
    if grid is not None and edge_index is not None:
        raise ValueError("edge_index must be None where grid is given, which stands for edges")


def batch_of(batch: Tensor | None, ptr: Tensor | None, nodes: int) -> tuple[Tensor | None, int | None]:
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
    if checks.values_are_free(ptr) and (int(ptr[0]) != 0 or int(ptr[-1]) != nodes or bool((ptr.diff() < 0).any())):
        raise ValueError(f"ptr must rise from 0 to {nodes}, got {ptr.tolist()[:8]}")
    index = torch.searchsorted(ptr, torch.arange(nodes, device=ptr.device), right=True) - 1
    return index, ptr.shape[0] - 1


def check_hidden_batch(edge_index: Tensor, pos: Tensor | None, nodes: int) -> None:
    """Warn where nodes come in blocks that no edge leaves, as a batch of graphs has them and as one graph of several
    clusters may; raise ValueError where nodes of different blocks lie at the same place besides."""
    if edge_index.shape[1] == 0:
        return
    low, high = edge_index.amin(0), edge_index.amax(0)
    covered = low.new_zeros(nodes + 1)
    covered.index_add_(0, low, torch.ones_like(low)).index_add_(0, high, -torch.ones_like(high))
    joined = covered.cumsum(0)[:-1] > 0  # node n and n + 1 lie in one block
    starts = joined & ~torch.cat([joined.new_zeros(1), joined[:-1]])
    blocks = int(starts.sum())
    if blocks <= 1:
        return
    message = (
        f"batch was not given for nodes in {blocks} blocks that no edge leaves, which are taken for one graph. For "
        "several graphs give batch or ptr: GPSConv does not pass batch on, call it with ptr=data.ptr, which reaches "
        f"this layer. For one graph of several parts give batch=torch.zeros({nodes}, dtype=torch.long), or construct "
        "the layer with check_batch=False"
    )
    within = joined | torch.cat([joined.new_zeros(1), joined[:-1]])
    placed = isinstance(pos, Tensor) and pos.shape[:1] == (nodes,) and not checks.is_batched(pos)
    if pos is not None and placed and _meet(pos[within], (starts.cumsum(0) - 1)[within]):
        raise ValueError(f"batch must be given for several graphs: nodes of different blocks have one pos; {message}")
    warnings.warn(message, stacklevel=2)


def _meet(pos: Tensor, block: Tensor) -> bool:
    """Whether two nodes of different blocks are at the same place."""
    _, place = pos.detach().unique(dim=0, return_inverse=True)
    order = torch.argsort(place * pos.shape[0] + block)
    place, block = place[order], block[order]
    return bool(((place.diff() == 0) & (block.diff() != 0)).any())


def refuse_batch_as_edge_attr(edge_attr: Tensor | None, edges: int, nodes: int) -> None:
    """Raise ValueError where the graph index of nodes came in place of ``edge_attr``."""
    if not isinstance(edge_attr, Tensor) or edge_attr.dtype != torch.int64 or tuple(edge_attr.shape) != (nodes,):
        return
    free = checks.values_are_free(edge_attr) and nodes
    sorted_from_zero = free and int(edge_attr[0]) == 0 and not bool((edge_attr.diff() < 0).any())
    if edges != nodes or sorted_from_zero:
        raise ValueError(
            f"edge_attr must hold a row for each of {edges} edges, got int64 of shape ({nodes},), which looks like the "
            "graph index of nodes: give it by name, as batch=batch"
        )


def near_pairs_of(
    edge_index: Tensor,
    edge_attr: Tensor | None,
    pos: Tensor | None,
    batch: Tensor | None,
    *,
    nodes: int,
    pos_dim: int,
    whole: bool,
    edge_dim: int | None,
    weights: Tensor | None,
) -> Neighbours:
    """The core's near pairs of a graph's edges; offsets from ``edge_attr`` or ``pos``, or features from the one and
    offsets from the other."""
    source, target = edge_index
    if batch is not None and checks.values_are_free(edge_index) and not torch.equal(batch[source], batch[target]):
        raise ValueError("edge_index must not join nodes of different graphs of batch")
    edge_attr = _edge_attr(edge_attr, edge_index, pos_dim, edge_dim)
    if edge_attr is not None and edge_dim is None:
        _refuse_features(edge_attr, pos, batch, target, source)
        measured = isinstance(pos, Tensor) and pos.is_floating_point() and checks.values_are_free(pos) and pos.numel()
        offsets = whole_offsets(edge_attr, pos if measured else None, "edge_attr must hold") if whole else edge_attr
        return Neighbours(target, source, offsets, nodes, weights=weights)
    if pos is None:
        what = "pos or edge_attr" if edge_dim is None else "pos"
        raise ValueError(f"{what} must be given where offsets are needed, got None")
    pos = checks.positions(pos, (nodes, pos_dim), edge_index, "")
    return Neighbours(
        target, source, offsets_between(pos, target, source, whole), nodes, features=edge_attr, weights=weights
    )


def _edge_attr(edge_attr: object, edge_index: Tensor, pos_dim: int, edge_dim: int | None) -> Tensor | None:
    """Offsets (E, pos_dim), or features (E, edge_dim), of a checked shape."""
    if edge_attr is None and edge_dim is None:
        return None
    edges, width = edge_index.shape[1], pos_dim if edge_dim is None else edge_dim
    what = "the offsets x_j - x_i" if edge_dim is None else "features"
    if not isinstance(edge_attr, Tensor):
        raise ValueError(f"edge_attr must be a tensor, got {type(edge_attr).__name__}: it must hold {what}")
    edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 and width == 1 else edge_attr
    if tuple(edge_attr.shape) != (edges, width):
        hint = "" if edge_dim is not None else "; for features of edges give edge_dim"
        raise ValueError(f"edge_attr must hold {what}, ({edges}, {width}), got {tuple(edge_attr.shape)}{hint}")
    if edge_attr.device != edge_index.device:
        raise ValueError(f"edge_attr must be on {edge_index.device} as edge_index is, got {edge_attr.device}")
    return edge_attr


def _refuse_features(
    edge_attr: Tensor, pos: Tensor | None, batch: Tensor | None, target: Tensor, source: Tensor
) -> None:
    """Raise ValueError where ``edge_attr`` cannot hold offsets of these positions, not of periodic ones either: hardly
    any is one of the positions, nor do those of a graph differ along each axis by one length, in either direction."""
    if not isinstance(pos, Tensor) or pos.ndim != 2 or pos.shape[1] != edge_attr.shape[1] or edge_attr.is_complex():
        return
    if not checks.values_are_free(edge_attr) or not checks.values_are_free(pos) or not edge_attr.numel():
        return
    few = slice(None, _LOOKED_AT)
    offsets, target, source = edge_attr[few].double(), target[few], source[few]
    apart = (pos[source].double() - pos[target].double() - offsets).abs()
    if not bool(apart.isfinite().all()):  # refused by name where offsets are used
        return
    exact = 1e-4 * (1 + offsets.abs().max() + 1e-3 * pos.abs().max())
    graph = torch.zeros_like(target) if batch is None else batch[target]
    largest = apart.new_zeros(int(graph.max()) + 1, apart.shape[1])
    period = largest.scatter_reduce(0, graph[:, None].expand_as(apart), apart, "amax")[graph]
    wrapped = (apart <= exact) | ((apart - period).abs() <= exact)
    if float((apart <= exact).all(1).double().mean()) < _AGREE and not bool(wrapped.all()):
        raise ValueError(
            f"edge_attr must hold the offsets x_j - x_i of pos, ({edge_attr.shape[1]} wide), got others; for features "
            f"of edges give edge_dim={edge_attr.shape[1]}, and for offsets in another unit leave pos out"
        )
