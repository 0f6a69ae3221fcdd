"""Pairs of near nodes with their offsets: from the edges of a graph, from a pixel grid, or found by position."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from . import checks
from .cells import METRICS, CellPairs, has_scipy, tree_pairs
from .kept import ordinary_tensors
from .offsets import GIVEN, whole_offsets

MAX_PAIRS = 1000  # a node, on average: more near pairs than that are not found from positions unasked


class Pattern:
    """A sparse relation of rows and columns, sorted by row, with its transpose: what products over pairs need.

    Args:
        row: ``(E,)`` sorted.
        col: ``(E,)``.
        rows, cols: numbers of rows and columns.
        order: the order of the pairs in the transpose, where it is known.

    Attributes:
        crow: ``(rows + 1,)`` where each row's pairs begin.
        order: ``(E,)`` the pairs sorted by column.
        tensors: ``[crow, col, row]``, the same of the transpose, ``order``, and that of the transpose.
    """

    tensors: list[Tensor]

    def __init__(self, row: Tensor, col: Tensor, rows: int, cols: int, order: Tensor | None = None) -> None:
        crow = torch.searchsorted(row, torch.arange(rows + 1, device=row.device))
        order = torch.argsort(col, stable=True) if order is None else order
        back_row, back_col = col[order], row[order]
        back_crow = torch.searchsorted(back_row, torch.arange(cols + 1, device=row.device))
        back_order = torch.empty_like(order).scatter(0, order, torch.arange(row.shape[0], device=row.device))
        self.tensors = [crow, col, row, back_crow, back_col, back_row, order, back_order]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Pattern:
        """The pattern of these :attr:`tensors`."""
        pattern = cls.__new__(cls)
        pattern.tensors = tensors
        return pattern

    def transposed(self) -> Pattern:
        """The relation of columns and rows."""
        here, back, (order, back_order) = self.tensors[:3], self.tensors[3:6], self.tensors[6:]
        return Pattern.of([*back, *here, back_order, order])

    @property
    def crow(self) -> Tensor:
        return self.tensors[0]

    @property
    def col(self) -> Tensor:
        return self.tensors[1]

    @property
    def row(self) -> Tensor:
        return self.tensors[2]

    @property
    def order(self) -> Tensor:
        return self.tensors[6]

    @property
    def rows(self) -> int:
        return self.crow.shape[0] - 1


class Neighbors:
    r"""The near pairs of a graph, (target i, source j), with offsets :math:`x_j - x_i`.

    A node is always its own neighbour, at offset 0: attention adds that pair itself, and pairs of a node with itself
    given here are passed over, so that graphs with and without self-loops give equal results; but for their features,
    which that pair then has. A pair given twice counts twice in a window, and is refused for distances.

    Building it sorts the pairs, unless they come sorted by target. Layers that share a graph should share one.

    Args:
        target, source: int64 ``(E,)`` node indices.
        offsets: ``(E, dim)``.
        nodes: number of nodes.
        exists: bool ``(E,)``, false for pairs to pass over; shapes then do not depend on values.
        features: ``(E, F)`` of the pairs, bonds say.
        weights: ``(E,)`` of the pairs, not negative, which a window's weights are multiplied by; ``None`` means 1.

    Attributes:
        pattern: the :class:`Pattern` of targets and sources, sorted by target.
        offsets: ``(E, dim)``, in its order.
        exists: bool ``(E,)`` in its order, or ``None`` where all pairs do.
        features: ``(E, F)`` in its order, or ``None``.
        self_features: ``(N, F)`` of nodes with themselves, sums where there are several; ``None`` where none is given.
        weights: ``(E,)`` in its order, or ``None``.
        between_positions: whether offsets are known to be differences of positions.

    Raises:
        ValueError: for shapes or dtypes that do not fit, and (on the CPU, outside torch.compile) for indices out of
            range.
    """

    def __init__(
        self,
        target: Tensor,
        source: Tensor,
        offsets: Tensor,
        nodes: int,
        exists: Tensor | None = None,
        features: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.between_positions = False
        for name, index in (("target", target), ("source", source)):
            if index.dtype != torch.int64 or index.ndim != 1 or index.shape[0] != target.shape[0]:
                raise ValueError(f"{name} must be int64 (E,), got {index.dtype} of shape {tuple(index.shape)}")
        if offsets.ndim != 2 or offsets.shape[0] != target.shape[0]:
            raise ValueError(f"offsets must have shape ({target.shape[0]}, dim), got {tuple(offsets.shape)}")
        if offsets.is_complex() or offsets.dtype == torch.bool:
            raise ValueError(f"offsets (edge_offset) must be real numbers, got {offsets.dtype}")
        offsets = offsets if offsets.is_floating_point() else offsets.long()
        free = checks.values_are_free(target)
        if checks.values_are_free(offsets) and not bool(offsets.isfinite().all()):
            raise ValueError("offsets (edge_offset, or differences of pos) must be finite, got NaN or infinity")
        if free and len(target):
            low = min(int(target.min()), int(source.min()))
            high = max(int(target.max()), int(source.max()))
            if low < 0 or high >= nodes:
                raise ValueError(f"edges must join nodes in [0, {nodes}), got {low} to {high}")
        if features is not None and (features.ndim != 2 or features.shape[0] != target.shape[0]):
            raise ValueError(f"features must have shape ({target.shape[0]}, F), got {tuple(features.shape)}")
        if weights is not None and weights.shape != target.shape:
            raise ValueError(f"weights must have shape ({target.shape[0]},), got {tuple(weights.shape)}")
        if weights is not None and checks.values_are_free(weights) and not bool((weights >= 0).all()):
            raise ValueError("weights must not be negative, nor NaN")
        distinct = target != source
        self.self_features = None
        if features is not None and not (free and bool(distinct.all())):
            alone = ~distinct if exists is None else exists & ~distinct
            of_loops = torch.where(alone[:, None], features, 0.0)
            self.self_features = features.new_zeros(nodes, features.shape[1]).index_add(0, target, of_loops)
        exists = distinct if exists is None else exists & distinct
        if free and not bool(exists.all()):
            target, source, offsets = target[exists], source[exists], offsets[exists]
            features, weights = (None if t is None else t[exists] for t in (features, weights))
            exists = torch.ones_like(target, dtype=torch.bool)
        if not free or bool((target.diff() < 0).any()):
            order = torch.argsort(target, stable=True)
            target, source, offsets, exists = target[order], source[order], offsets[order], exists[order]
            features, weights = (None if t is None else t[order] for t in (features, weights))
        self.nodes, self.offsets, self.features, self.weights = nodes, offsets, features, weights
        self.exists = None if free else exists
        self.pattern = Pattern(target.contiguous(), source.contiguous(), nodes, nodes)
        self._repeats: bool | None = None
        self._bins: dict[int, Pattern] = {}
        self._incidence: dict[int, tuple[Pattern, Tensor]] = {}

    @property
    def dim(self) -> int:
        return self.offsets.shape[1]

    @property
    def repeats(self) -> bool:
        """Whether a pair may come more than once."""
        if not checks.values_are_free(self.pattern.row):
            return True
        if self._repeats is None:
            pairs = (self.pattern.row * self.nodes + self.pattern.col).sort().values
            self._repeats = bool((pairs.diff() == 0).any())
        return self._repeats

    def incidence(self, heads: int) -> tuple[Pattern, Tensor]:
        """The relation of nodes' heads, ``(N heads)``, to the pairs they are the target of; and where each of its
        entries' weights lie among those of all pairs, ``(heads, E)`` flattened."""
        if torch.compiler.is_compiling():
            return self._make_incidence(heads)
        if heads not in self._incidence:
            with ordinary_tensors(self.offsets, *self.pattern.tensors):
                self._incidence[heads] = self._make_incidence(heads)
        return self._incidence[heads]

    def _make_incidence(self, heads: int) -> tuple[Pattern, Tensor]:
        row, crow, pairs = self.pattern.row, self.pattern.crow, self.offsets.shape[0]
        node = row.repeat_interleave(heads, output_size=heads * pairs)
        first, degree = crow[:-1][node], crow.diff()[node]
        within = torch.arange(heads * pairs, device=row.device) - heads * first  # entries go by node, head, pair
        head, pair = within // degree, first + within % degree
        each = torch.arange(pairs, device=row.device)
        first, degree = crow[:-1][row], crow.diff()[row]
        along = torch.arange(heads, device=row.device)
        order = (heads * first + each - first)[:, None] + along * degree[:, None]  # by pair, then head
        pattern = Pattern(node * heads + head, pair, heads * self.nodes, pairs, order.flatten())
        return pattern, head * pairs + pair

    def bins(self, max_distance: int) -> Pattern:
        """Sources by (target, Manhattan distance) bin, i * max_distance + d; a last bin takes every other pair."""
        if torch.compiler.is_compiling():
            return self._make_bins(max_distance)
        if max_distance not in self._bins:
            with ordinary_tensors(self.offsets, *self.pattern.tensors):
                self._bins[max_distance] = self._make_bins(max_distance)
        return self._bins[max_distance]

    def check_nodes(self, nodes: int, dim: int | None = None) -> None:
        """Raise ValueError unless these are pairs of so many nodes, with offsets of this dimension if one is given."""
        if self.nodes != nodes or (dim is not None and self.dim != dim):
            where = "" if dim is None else f" in {dim} dimensions"
            raise ValueError(f"neighbors must be of {nodes} nodes{where}, got {self.nodes} in {self.dim}")

    def restricted(self, mask: Tensor) -> Neighbors:
        """Only the pairs between nodes that exist, bool ``(N,)``: the same pairs in order, the others passed over."""
        exists = mask[self.pattern.row] & mask[self.pattern.col]
        out = copy.copy(self)
        out.exists = exists if self.exists is None else exists & self.exists
        out._bins = {}
        return out

    def of_nodes(self, index: Tensor) -> tuple[Neighbors, Tensor]:
        """The pairs among some of the nodes, int64 ``(n,)``, rising, which are then counted from 0; and which they are,
        int64. Pairs that do not exist are left out."""
        place = torch.full((self.nodes,), -1, device=index.device)
        place = place.index_copy(0, index, torch.arange(len(index), device=index.device))
        target, source = place[self.pattern.row], place[self.pattern.col]
        here = (target >= 0) & (source >= 0)
        edges = (here if self.exists is None else here & self.exists).nonzero()[:, 0]
        features, weights = (None if t is None else t[edges] for t in (self.features, self.weights))
        out = Neighbors(
            target[edges], source[edges], self.offsets[edges], len(index), features=features, weights=weights
        )
        out.self_features = None if self.self_features is None else self.self_features[index]
        return out, edges

    def _make_bins(self, max_distance: int) -> Pattern:
        row, col = self.pattern.row, self.pattern.col
        if checks.values_are_free(row) and len(row):
            pairs = row * self.nodes + col
            pairs = (pairs if self.exists is None else pairs[self.exists]).sort().values
            if bool((pairs.diff() == 0).any()):
                raise ValueError(
                    "edge_index must not join a pair twice where position='clipped': its nodes have one distance; see "
                    "torch_geometric.utils.coalesce"
                )
        distance = whole_offsets(self.offsets, what=GIVEN).abs().sum(-1).long()
        last = self.nodes * max_distance
        near = (distance >= 0) & (distance < max_distance)  # sums of huge integers wrap around
        near = near if self.exists is None else near & self.exists
        key = torch.where(near, row * max_distance + distance, last)
        order = torch.argsort(key, stable=True)
        transposed = torch.argsort(col[order], stable=True)
        return Pattern(key[order], col[order], last + 1, self.nodes, transposed)


def near_pairs(
    pos: Tensor,
    max_distance: float,
    *,
    batch: Tensor | None = None,
    max_pairs: int = MAX_PAIRS,
    metric: str = "euclidean",
) -> tuple[Tensor, Tensor]:
    r"""Pairs of nodes of the same graph closer than ``max_distance``, in time linear in nodes at bounded density.

    On the CPU by scipy's k-d tree, where it is installed; elsewhere nodes are sorted into cells of side
    ``max_distance``, and only neighbouring cells are compared. Shapes depend on values, so this runs outside
    torch.compile only, and waits for the device on CUDA.

    Args:
        pos: ``(N, dim)`` positions. In float32 they are exact to about 1e-7 of their size: give those far from the
            origin, such as map coordinates of 5e6 m, in float64.
        max_distance: pairs at this distance or farther are not near, nor those nearer to it than positions are exact:
            moving all positions does not change which pairs of a lattice are near.
        batch: int64 ``(N,)`` graph index; ``None`` means one graph.
        max_pairs: the most pairs a node, on average, that are returned. They are counted first, in bounded memory.
        metric: ``"euclidean"``, or ``"manhattan"``, sums of the differences along the axes.

    Returns:
        int64 targets i and sources j, sorted by target; no node with itself.

    Raises:
        ValueError: for more than ``max_pairs`` pairs a node.

    Example:
        >>> import torch
        >>> near_pairs(torch.tensor([[0.0], [1.0], [5.0]]), 2)
        (tensor([0, 1]), tensor([1, 0]))
    """
    if checks.is_batched(pos):
        raise ValueError("pos must not be what torch.vmap goes through where near pairs are found from it: give edges")
    nodes = len(pos)
    if not nodes:
        empty = torch.zeros(0, dtype=torch.int64, device=pos.device)
        return empty, empty
    checks.choice("metric", metric, METRICS)
    refusal = (
        f"pos has more than {max_pairs} pairs a node at distances below {max_distance} among {nodes} nodes, so that "
        "attention to near pairs would not be linear: give edge_index (or neighbors), take a smaller max_distance, or "
        "scale pos"
    )
    if has_scipy() and checks.values_are_free(pos) and bool(pos.isfinite().all()):
        pairs = tree_pairs(pos.detach(), max_distance, batch, metric, max_pairs * nodes)
        if pairs is None:
            raise ValueError(refusal)
        return _sorted(pairs, nodes)
    candidates = CellPairs(pos.detach(), max_distance, batch, METRICS[metric])
    if candidates.count > max_pairs * nodes:
        found = 0
        for target, _ in candidates.near():
            found += len(target)
            if found > max_pairs * nodes:
                raise ValueError(refusal)
    return _sorted(torch.cat([torch.stack(pair) for pair in candidates.near()], 1), nodes)


def _sorted(pairs: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Targets and sources, sorted by target."""
    pairs = pairs[:, torch.argsort(pairs[0] * nodes + pairs[1])]
    return pairs[0], pairs[1]
