"""Pairs of nodes with their offsets: the edges of a graph, those of a pixel grid, or near pairs found by position."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import checks
from ..shapes import Int, Num
from ..torch_state import Cache, is_mapped, is_readable, is_transformed
from .edges import (
    CSR,
    check_edges,
    check_fields,
    check_graph_of_edges,
    offsets_along,
)

_T = TypeVar("_T")


def _repeats(pairs: NeighborList) -> bool | None:
    if not is_readable(pairs.target):
        return None
    index = pairs.target * pairs.nodes + pairs.source
    index = index if pairs.mask is None else index[pairs.mask]
    return not bool((index[1:] > index[:-1]).all()) and len(index.unique()) < len(index)


def _csr(pairs: NeighborList) -> CSR:
    return CSR.from_sorted(pairs.target, pairs.source, pairs.nodes, pairs.nodes)


class NeighborList:
    r"""Pairs of a graph's nodes, (target i, source j), with offsets :math:`x_j - x_i`.

    For attention a node is always its own neighbour, at offset 0. That pair is added by the layer. Pairs of a node with
    itself in ``edge_index`` are passed over, so that graphs with and without self-loops give equal results; only their
    features are used, for the pair that the layer adds. A pair given twice counts twice in a window, and is refused for
    distances.

    Building a list sorts the pairs, unless they come sorted by target. Layers that share a graph should share one.

    Args:
        edge_index: int64 ``(2, E)``, sources and targets.
        nodes: number of nodes.
        offsets: ``(E, dim)``, in the unit of positions. The default, ``None``, means pairs without offsets.
        mask: bool ``(E,)``, false for pairs to pass over. Use it where shapes must not depend on values. ``None`` means
            all pairs.
        features: ``(E, F)`` of the pairs, for example of bonds; whole numbers and bool become floating point numbers.
            ``None`` means no features.
        loops: whether a pair of a node with itself is a pair like any other. The default is ``False``.
        between_positions: whether offsets are known to be differences of positions. The default is ``False``.
        checked: whether ``edge_index``, and positions that ``offsets`` lie between, have been checked already. The
            default is ``False``.

    Attributes:
        target: target of each pair, sorted.
        source: source of each pair.
        self_features: ``(N, F)`` of nodes with themselves, sums if there are several; ``None`` if none is given.

    Raises:
        ValueError: for shapes or dtypes that do not fit, and (on the CPU, outside torch.compile) for indices out of
            range.
    """

    # sums over pairs in place of sparse products, where PyG's layer is explained
    sums: Callable[..., Any] | None = None

    def __init__(
        self, edge_index: Tensor, nodes: int, offsets: Tensor | None = None, *, mask: Tensor | None = None,
        features: Tensor | None = None, loops: bool = False, between_positions: bool = False, checked: bool = False,
    ) -> None:  # fmt: skip
        if not checked:
            check_edges(edge_index, nodes)
        if offsets is None:
            offsets = torch.zeros(edge_index.shape[1], 0, device=edge_index.device)
        check_fields(edge_index.shape[1], offsets, features, finite=checked and between_positions)
        offsets = offsets if offsets.is_floating_point() else offsets.long()
        if features is not None and not features.is_floating_point():
            features = features.double()
        (source, target), concrete, self_features = edge_index.unbind(), is_readable(edge_index), None
        if not loops:
            distinct = source != target
            if features is not None and not (concrete and bool(distinct.all())):
                self_features = _features_of_loops(target, nodes, features, distinct, mask)
            mask = distinct if mask is None else mask & distinct
        order, mask = _order(target, mask, concrete), None if concrete else mask
        self.edge_index, self.order = edge_index, order  # the pairs as given, and the number of each pair among them
        if order is not None:
            target, source, offsets = target[order], source[order], offsets[order]
            mask = None if mask is None else mask[order]
            features = None if features is None else features[order]
        self.target, self.source, self.nodes, self.offsets = target.contiguous(), source.contiguous(), nodes, offsets
        self.row, self.col, self.num_rows = self.target, self.source, nodes  # as a matrix has them
        self.mask, self.features, self.self_features = mask, features, self_features
        self.between_positions, self._cache = between_positions, Cache()
        self._unrestricted: NeighborList | None = None  # with the same CSR matrix

    @property
    def dim(self) -> int:
        return self.offsets.shape[1]

    @property
    def csr(self) -> CSR:
        """The :class:`CSR` matrix of targets (rows) and sources (columns). It is made at the first access."""
        return self.cached(_csr) if self._unrestricted is None else self._unrestricted.csr

    def check_nodes(self, nodes: int, dim: int, device: torch.device) -> None:
        """Raise ValueError unless these are pairs of ``nodes`` nodes on a device, with offsets of dimension ``dim``."""
        if self.nodes != nodes or self.dim != dim:
            raise ValueError(f"neighbors must be of {nodes} nodes in {dim} dimensions, got {self.nodes} in {self.dim}")
        if {self.target.device, self.offsets.device} != {device}:
            came = self.target.device, self.offsets.device
            raise ValueError(f"neighbors must be on {device} as the input is, got {came[0]}, with offsets on {came[1]}")

    def check_graphs(self, name: str, batch: Tensor | None) -> None:
        """Raise ValueError for a pair between graphs of ``batch``, if values are read."""
        check_graph_of_edges(self.target, self.source, batch, None, name)

    def restricted(self, mask: Tensor) -> NeighborList:
        """The same pairs, with pairs masked unless both nodes are true in ``mask``, bool ``(N,)``."""
        mask = mask[self.target] & mask[self.source]
        mask = mask if self.mask is None else mask & self.mask
        pairs = self._copied()
        pairs.mask, pairs._cache = mask, Cache()
        return pairs

    def along(self, pos: Tensor) -> NeighborList:
        """The same pairs, whose offsets have the derivatives of differences of positions."""
        pairs = self._copied()
        pairs.offsets = offsets_along(pos, self.offsets, self.target, self.source)
        if is_transformed():  # what is kept there does not outlive the transform
            pairs._cache = Cache()
        return pairs

    def _copied(self) -> NeighborList:
        pairs = copy.copy(self)
        pairs._unrestricted = self if self._unrestricted is None else self._unrestricted
        return pairs

    def cached(self, make: Callable[..., _T], *arguments: int) -> _T:
        """``make(self, *arguments)``, kept for the next call."""
        inputs, made = (self.offsets, self.target, self.source), functools.partial(make, self, *arguments)
        return self._cache.get_or_make((make, *arguments), made, *inputs)

    @property
    def repeats(self) -> bool | None:
        """True if a pair is given more than once; ``None`` if values are not read."""
        return self.cached(_repeats)

    def repeated(self, count: int) -> NeighborList:
        """The pairs of ``count`` graphs that are all like this one, one after the other."""
        first = self.nodes * torch.arange(count, device=self.target.device)
        edge_index = (torch.stack([self.source, self.target])[:, None] + first[:, None]).flatten(1)

        def copies(x: Tensor | None) -> Tensor | None:
            return x if x is None else x.repeat(count, *[1] * (x.ndim - 1))

        near = NeighborList(
            edge_index, count * self.nodes, copies(self.offsets), mask=copies(self.mask), loops=True, checked=True,
            features=copies(self.features), between_positions=self.between_positions,
        )  # fmt: skip
        near.self_features = copies(self.self_features)
        return near


def _features_of_loops(target: Tensor, nodes: int, features: Tensor, distinct: Tensor, mask: Tensor | None) -> Tensor:
    """Sums (N, F) of the features of pairs of a node with itself."""
    loop = ~distinct if mask is None else mask & ~distinct
    return features.new_zeros(nodes, features.shape[1]).index_add(0, target, torch.where(loop[:, None], features, 0.0))


def _order(target: Tensor, mask: Tensor | None, concrete: bool) -> Tensor | None:
    """The order of pairs by target; ``None`` if they have it. If values are read, it leaves out masked pairs."""
    if concrete and mask is not None and not bool(mask.all()):
        order = mask.nonzero()[:, 0]
        return order[torch.argsort(target[order], stable=True)]
    if concrete and not bool((target[1:] < target[:-1]).any()):
        return None
    return torch.argsort(target, stable=True)


def mean_edge_length(pos: Tensor, edge_index: Tensor) -> float:
    """The mean length of edges, from which to choose the ``cutoff`` of layers: twice it suits most graphs.

    Args:
        pos: ``(N, dim)`` positions, of some of the training data.
        edge_index: int64 ``(2, E)``. Edges of a node with itself do not count.

    Raises:
        ValueError: if no edge has a length.

    Example:
        >>> import torch
        >>> mean_edge_length(torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([[0, 1], [1, 2]]))
        2.0
    """
    check_edges(edge_index, len(pos), pos.device)
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    lengths = torch.linalg.vector_norm(pos.detach()[source].double() - pos.detach()[target].double(), dim=-1)
    mean = float(lengths.mean()) if len(lengths) else 0.0
    if not 0 < mean < float("inf"):
        raise ValueError(f"edge_index must join nodes at different pos, got edges of mean length {mean}")
    return mean


_MAX_PAIRS = 1000  # bound of the near pairs of a node, on average


@checks.arguments
def neighbor_list(pos: Tensor, cutoff: checks.Positive, *, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Pairs of nodes of the same graph closer than ``cutoff``, in time linear in nodes at bounded density.

    Pairs are found by scipy's k-d tree, on the CPU. Shapes depend on values, so this function does not run in
    torch.compile, and on CUDA it waits for the device. Nodes whose position is not finite have no pairs.

    Args:
        pos: ``(N, dim)`` positions. Float32 rounds them to about 1e-7 of their size: give positions far from the
            origin, such as map coordinates of 5e6 m, in float64.
        cutoff: pairs at a smaller distance are near, in the unit of ``pos``. Pairs whose distance equals the cutoff up
            to the rounding of positions are not near, so that a translation does not change the pairs of a lattice.
        batch: int64 ``(N,)`` graph index. The default, ``None``, means one graph.

    Returns:
        ``edge_index`` int64 ``(2, E)`` with sources j and targets i, sorted by target, without pairs of a node with
        itself; and offsets ``(E, dim)``, :math:`x_j - x_i`, through which gradients flow to ``pos``.

    Raises:
        ValueError: if there are more than 1,000 pairs a node on average, which are counted in bounded memory, or if an
            argument has a shape, dtype or value that is not allowed.

    Example:
        >>> import torch
        >>> neighbor_list(torch.tensor([[0.0], [1.0], [5.0]]), 2)[0]
        tensor([[1, 0],
                [0, 1]])
    """
    return pairs_within(pos, cutoff, batch)


def pairs_within(pos: Tensor, cutoff: float, batch: Tensor | None, norm: int = 2) -> tuple[Tensor, Tensor]:
    """:func:`neighbor_list`, also with Manhattan distances, ``norm=1``."""
    if is_mapped(pos):
        raise ValueError(
            "pos must not be what torch.vmap goes through where near pairs are found from it, got such a tensor: give "
            "edge_index or neighbors"
        )
    if pos.ndim != 2:
        raise ValueError(f"pos must have shape (N, dim), one row for each node, got {checks.shape_of(pos)}")
    nodes = len(pos)
    if batch is not None:
        checks.tensor("batch", batch, torch.int64, [(nodes,)], pos.device)
    if not nodes:
        return torch.zeros(2, 0, dtype=torch.int64, device=pos.device), pos.new_zeros(0, pos.shape[1])
    pairs = _tree_pairs(pos.detach(), cutoff, batch, norm)
    if pairs is None:
        raise ValueError(
            f"pos has more than {_MAX_PAIRS} pairs a node at distances below {cutoff} among {nodes} nodes, so that "
            "attention to near pairs would not be linear: give edge_index (or neighbors), take a smaller cutoff, or "
            "scale pos"
        )
    target, source = pairs[:, torch.argsort(pairs[0] * nodes + pairs[1])]
    return torch.stack([source, target]), pos[source] - pos[target]


def _limit_of(pos: Tensor, cutoff: float) -> float:
    """The bound of distances of near pairs: ``cutoff`` minus the rounding of positions."""
    if not pos.is_floating_point():
        return float(cutoff)
    exact = 16 * torch.finfo(pos.dtype).eps * pos.abs().nan_to_num(0, 0, 0).max()
    return float(cutoff - exact.clamp(max=cutoff / 4))


def _tree_pairs(
    pos: Num[Tensor, "nodes dim"], cutoff: float, batch: Int[Tensor, " nodes"] | None, norm: int
) -> Int[Tensor, "2 pairs"] | None:
    """Pairs of nodes of a graph nearer than the cutoff. Return ``None`` if there are too many."""
    try:
        from scipy.spatial import KDTree
    except ImportError as error:
        raise ImportError("near pairs are found from pos by scipy: pip install scipy, or give edge_index") from error
    points, nodes, most = pos.double(), len(pos), _MAX_PAIRS * len(pos)
    if batch is not None:  # one more coordinate keeps graphs apart
        points = torch.cat([points, 2.0 * cutoff * batch[:, None]], 1)
    points = points.cpu()
    finite = points.isfinite().all(1).nonzero()[:, 0]  # others have no near pairs
    tree, limit = KDTree(points[finite].numpy()), math.nextafter(_limit_of(pos, cutoff), 0.0)
    if nodes * (nodes - 1) > most and int(tree.count_neighbors(tree, limit, norm)) - len(finite) > most:
        return None
    pairs = finite[torch.from_numpy(tree.query_pairs(limit, norm, output_type="ndarray")).T.long()]
    return torch.cat([pairs, pairs.flip(0)], 1).to(pos.device)
