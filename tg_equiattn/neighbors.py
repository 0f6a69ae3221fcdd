"""Pairs of nodes with their offsets: the edges of a graph, those of a pixel grid, or near pairs found by position."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import checks
from .cells import METRICS, cell_pairs, has_scipy, images, limit_of, tree_pairs
from .modes import ordinary_tensors

__all__ = ["NeighborList", "mean_edge_length", "neighbor_list"]

_FLAT = 1e-6  # the smallest volume of a cell, as a share of that of a box with edges as long
MAX_PAIRS = 1000  # a node, on average: more near pairs than that are not found from positions unasked
_T = TypeVar("_T")
GIVEN = "offsets (edge_offset) must be"  # how an error of offsets begins that came without positions


class CSR:
    """A sparse relation of rows and columns, sorted by row: ``tensors`` are where each row's pairs begin, ``crow``
    (rows + 1,), ``col`` and ``row`` (E,); the same of the transpose; and the ``order`` of the pairs in it, and back."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.crow, self.col, self.row, self.order = *tensors[:3], tensors[6]

    @classmethod
    def of(cls, row: Tensor, col: Tensor, rows: int, cols: int, order: Tensor | None = None) -> CSR:
        """Of pairs sorted by row; ``order``, if known, sorts them by column."""
        crow = torch.searchsorted(row, torch.arange(rows + 1, device=row.device))
        order = torch.argsort(col, stable=True) if order is None else order
        back_row, back_col = col[order], row[order]
        back_crow = torch.searchsorted(back_row, torch.arange(cols + 1, device=row.device))
        back_order = torch.empty_like(order).scatter(0, order, torch.arange(row.shape[0], device=row.device))
        return cls(crow, col, row, back_crow, back_col, back_row, order, back_order)

    def transposed(self) -> CSR:
        """The relation of columns and rows."""
        return CSR(*self.tensors[3:6], *self.tensors[:3], self.tensors[7], self.tensors[6])

    @property
    def rows(self) -> int:
        return self.crow.shape[0] - 1


def _once(make: Callable[..., _T]) -> Callable[..., _T]:
    """A method whose results pairs keep; made anew within torch.compile."""

    @functools.wraps(make)
    def once(pairs: NeighborList, *arguments: int) -> _T:
        if torch.compiler.is_compiling():
            return make(pairs, *arguments)
        key = make.__name__, *arguments
        if key not in pairs._cache:
            with ordinary_tensors(pairs.offsets, *pairs.csr.tensors):
                pairs._cache[key] = make(pairs, *arguments)
        return pairs._cache[key]

    return once


class NeighborList:
    r"""Pairs of a graph's nodes, (target i, source j), with offsets :math:`x_j - x_i`.

    For attention a node is always its own neighbour, at offset 0: that pair is added there, and pairs of a node with
    itself given here are passed over, so that graphs with and without self-loops give equal results; but for their
    features, which that pair then has. A pair given twice counts twice in a window, and is refused for distances.

    Building it sorts the pairs, unless they come sorted by target. Layers that share a graph should share one.

    Args:
        edge_index: int64 ``(2, E)``, sources and targets.
        nodes: number of nodes.
        offsets: ``(E, dim)``; ``None`` where there are none.
        exists: bool ``(E,)``, false for pairs to pass over; shapes then do not depend on values.
        features: ``(E, F)`` of the pairs, bonds say.
        weights: ``(E,)`` of the pairs, not negative, which a window's weights are multiplied by; ``None`` means 1.
        loops: whether pairs of a node with itself are pairs as others.

    Attributes:
        target, source, offsets, exists, features, weights: as given, sorted by target, ``exists`` ``None`` for all.
        csr: the :class:`CSR` of targets and sources.
        self_features: ``(N, F)`` of nodes with themselves, sums where there are several; ``None`` where none is given.
        between_positions: whether offsets are known to be differences of positions.

    Raises:
        ValueError: for shapes or dtypes that do not fit, and (on the CPU, outside torch.compile) for indices out of
            range.
    """

    def __init__(
        self, edge_index: Tensor, nodes: int, offsets: Tensor | None = None, *, exists: Tensor | None = None,
        features: Tensor | None = None, weights: Tensor | None = None, loops: bool = False,
    ) -> None:  # fmt: skip
        check_edges(edge_index, nodes)
        (source, target), edges, free = edge_index, edge_index.shape[1], checks.is_concrete(edge_index)
        offsets = torch.zeros(edges, 0, device=edge_index.device) if offsets is None else offsets
        for name, given, axes in (("offsets", offsets, 2), ("features", features, 2), ("weights", weights, 1)):
            if given is not None and (given.ndim != axes or given.shape[0] != edges):
                wanted = f"({edges}, {'dim' if name == 'offsets' else 'F'})" if axes == 2 else f"({edges},)"
                raise ValueError(f"{name} must have shape {wanted}, got {tuple(given.shape)}")
        if offsets.is_complex() or offsets.dtype == torch.bool:
            raise ValueError(f"offsets (edge_offset) must be real numbers, got {offsets.dtype}")
        offsets = offsets if offsets.is_floating_point() else offsets.long()
        if checks.is_concrete(offsets) and not bool(offsets.isfinite().all()):
            raise ValueError("offsets (edge_offset, or differences of pos) must be finite, got NaN or infinity")
        if weights is not None and checks.is_concrete(weights) and not bool((weights >= 0).all()):
            raise ValueError("weights must not be negative, nor NaN")
        distinct = torch.ones_like(target, dtype=torch.bool) if loops else target != source
        self.self_features = None
        if features is not None and not loops and not (free and bool(distinct.all())):
            alone = ~distinct if exists is None else exists & ~distinct
            of_loops = torch.where(alone[:, None], features, 0.0)
            self.self_features = features.new_zeros(nodes, features.shape[1]).index_add(0, target, of_loops)
        exists, order = distinct if exists is None else exists & distinct, None
        if free and not bool(exists.all()):
            order = exists.nonzero()[:, 0]
            order = order[torch.argsort(target[order], stable=True)]
        elif not free or bool((target.diff() < 0).any()):
            order = torch.argsort(target, stable=True)
        if order is not None:
            target, source, offsets, exists = target[order], source[order], offsets[order], exists[order]
            features, weights = (None if t is None else t[order] for t in (features, weights))
        self.nodes, self.offsets, self.features, self.weights = nodes, offsets, features, weights
        self.exists, self.between_positions = None if free else exists, False
        self.csr = CSR.of(target.contiguous(), source.contiguous(), nodes, nodes)
        self._cache: dict[Hashable, Any] = {}

    @classmethod
    def from_edges(
        cls, edge_index: Tensor, nodes: int, *, batch: Tensor | None = None, mask: Tensor | None = None,
        dim: int | None = None, pos: Tensor | None = None, offsets: Tensor | None = None, whole: bool = False,
        edge_dim: int | None = None, features: Tensor | None = None, weights: Tensor | None = None, loops: bool = False,
    ) -> NeighborList:  # fmt: skip
        """Of edges as users give them, checked: within graphs (``batch``) of nodes that exist (``mask``).

        Args:
            dim: of offsets, where they are needed: those given, or differences of ``pos``.
            whole: whether offsets have to be whole numbers, up to rounding.
            edge_dim: of features, where they are needed: ``(E, edge_dim)``, or ``(E,)`` for one.

        Raises:
            ValueError: naming the argument (``edge_offset`` for offsets, ``edge_attr`` for features), what came and
                what is allowed; values are read on the CPU, outside torch.compile.
        """
        check_edges(edge_index, nodes)
        if batch is not None and edge_index.device != batch.device:
            raise ValueError(f"edge_index must be on {batch.device} as the input is, got {edge_index.device}")
        features = _of_edges("edge_attr", features, edge_index, edge_dim)
        offsets, between = _of_edges("edge_offset", offsets, edge_index, dim), False
        if dim is not None and offsets is None:
            if pos is None:
                raise ValueError("pos or edge_offset must be given where offsets are needed, got None")
            pos, between = checks.positions(pos, (nodes, dim), edge_index, ""), True
            offsets = offsets_between(pos, edge_index[1], edge_index[0], whole)
        elif offsets is not None and whole:
            if not (isinstance(pos, Tensor) and pos.is_floating_point() and checks.is_concrete(pos) and len(pos)):
                pos = None
            offsets = whole_offsets(offsets, pos, "edge_offset must hold")
        out = cls(edge_index, nodes, offsets, features=features, weights=weights, loops=loops)
        out.between_positions = between
        out.check_graphs("edge_index", batch, mask)
        return out

    @property
    def target(self) -> Tensor:
        return self.csr.row

    @property
    def source(self) -> Tensor:
        return self.csr.col

    @property
    def dim(self) -> int:
        return self.offsets.shape[1]

    def check_nodes(self, nodes: int, dim: int | None = None) -> None:
        """Raise ValueError unless these are pairs of so many nodes, with offsets of this dimension if one is given."""
        if self.nodes != nodes or (dim is not None and self.dim != dim):
            where = "" if dim is None else f" in {dim} dimensions"
            raise ValueError(f"neighbors must be of {nodes} nodes{where}, got {self.nodes} in {self.dim}")

    def check_graphs(self, name: str, batch: Tensor | None, mask: Tensor | None = None) -> None:
        """Raise ValueError where a pair is of different graphs, or of nodes that do not exist, if values are free."""
        target, source = self.target, self.source
        if not checks.is_concrete(target):
            return
        if batch is not None and checks.is_concrete(batch) and not torch.equal(batch[target], batch[source]):
            raise ValueError(f"{name} must not join nodes of different graphs of batch, got such a pair")
        if mask is not None and not bool((mask[target] & mask[source]).all()):
            raise ValueError(f"{name} must join nodes that exist, got one beyond its graph's length")

    def restricted(self, mask: Tensor) -> NeighborList:
        """Only the pairs between nodes that exist, bool ``(N,)``: the same pairs in order, the others passed over."""
        exists = mask[self.target] & mask[self.source]
        out = NeighborList.__new__(NeighborList)  # copy.copy is nothing that compilers before torch 2.13 know
        out.nodes, out.offsets, out.features, out.weights = self.nodes, self.offsets, self.features, self.weights
        out.csr, out.self_features, out.between_positions = self.csr, self.self_features, self.between_positions
        out.exists = exists if self.exists is None else exists & self.exists
        out._cache = {}
        return out

    @property
    @_once
    def repeats(self) -> bool:
        """Whether a pair may come more than once."""
        if not checks.is_concrete(self.target):
            return True
        pairs = self.target * self.nodes + self.source
        pairs = (pairs if self.exists is None else pairs[self.exists]).sort().values
        return bool((pairs.diff() == 0).any())

    @_once
    def incidence(self, heads: int) -> tuple[CSR, Tensor]:
        """The relation of nodes' heads, ``(N heads)``, to the pairs they are the target of; and where each of its
        entries' weights lie among those of all pairs, ``(heads, E)`` flattened."""
        row, crow, pairs = self.target, self.csr.crow, self.offsets.shape[0]
        node = row.repeat_interleave(heads, output_size=heads * pairs)
        first, degree = crow[:-1][node], crow.diff()[node]
        within = torch.arange(heads * pairs, device=row.device) - heads * first  # entries go by node, head, pair
        head, pair = within // degree, first + within % degree
        each = torch.arange(pairs, device=row.device)
        first, degree = crow[:-1][row], crow.diff()[row]
        along = torch.arange(heads, device=row.device)
        order = (heads * first + each - first)[:, None] + along * degree[:, None]  # by pair, then head
        pattern = CSR.of(node * heads + head, pair, heads * self.nodes, pairs, order.flatten())
        return pattern, head * pairs + pair

    @_once
    def bins(self, distances: int) -> CSR:
        """Sources by (target, Manhattan distance) bin, i * distances + d; a last bin takes every other pair."""
        if checks.is_concrete(self.target) and self.repeats:
            raise ValueError(
                "edge_index must not join a pair twice where position='clipped': its nodes have one distance; see "
                "torch_geometric.utils.coalesce"
            )
        distance = whole_offsets(self.offsets, what=GIVEN).abs().sum(-1).long()
        last = self.nodes * distances
        near = (distance >= 0) & (distance < distances)  # sums of huge integers wrap around
        near = near if self.exists is None else near & self.exists
        key = torch.where(near, self.target * distances + distance, last)
        order = torch.argsort(key, stable=True)
        source = self.source[order]
        return CSR.of(key[order], source, last + 1, self.nodes, torch.argsort(source, stable=True))


def check_edges(edge_index: object, nodes: int) -> None:
    """Raise ValueError unless these are pairs of nodes, int64 (2, E), where values are free in range."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"edge_index must be a tensor, got {checks.described(edge_index)}")
    if edge_index.dtype != torch.int64 or edge_index.shape[:-1] != (2,):
        raise ValueError(f"edge_index must be int64 (2, E), got {checks.described(edge_index)}")
    if checks.is_concrete(edge_index) and edge_index.numel():
        low, high = (int(x) for x in edge_index.aminmax())
        if low < 0 or high >= nodes:
            raise ValueError(f"edge_index must join nodes in [0, {nodes}), got {low} to {high}")


def offsets_between(pos: Tensor, target: Tensor, source: Tensor, whole: bool) -> Tensor:
    """Offsets :math:`x_j - x_i` of pairs, ``(E, dim)``, as :func:`whole_offsets` where whole ones are wanted."""
    offsets = pos[source] - pos[target]
    if not whole or not offsets.is_floating_point():
        return offsets
    free = checks.is_concrete(pos) and pos.numel()
    if free and torch.finfo(pos.dtype).eps * float(pos.detach().abs().max()) >= 2:
        why = f"where {pos.dtype} does not tell whole numbers apart"
        raise ValueError(f"pos must be float64 so far from the origin, {why}")
    return whole_offsets(offsets, pos)


def whole_offsets(offsets: Tensor, pos: Tensor | None = None, what: str = "differences of pos must be") -> Tensor:
    """Offsets (E, dim) rounded to whole numbers; ValueError, which begins with ``what``, for those farther from them
    than rounding at the size of positions explains: a grid shifted by 3.7 stays one."""
    if not offsets.is_floating_point():
        return offsets
    whole = offsets.round()
    if not checks.is_concrete(offsets) or torch.equal(offsets, whole):
        return whole
    size = (offsets if pos is None else pos).abs().max().double().clamp(min=1)
    exact = (16 * max(torch.finfo(t).eps for t in (offsets.dtype, torch.float32)) * size).clamp(max=0.25)
    apart = torch.where(offsets == whole, 0.0, offsets - whole).abs()  # infinity is refused by NeighborList
    near = (apart <= exact).all(1)
    if not bool(near.all()):
        came = offsets[~near][0].tolist()
        raise ValueError(
            f"{what} whole numbers where offsets index a table or distances are counted (offset='table', "
            f"position='clipped'), got an offset of {came}: scale pos to the unit of its grid, or take offset='mlp' "
            "for points off a grid"
        )
    return whole


def _of_edges(name: str, given: Tensor | None, edge_index: Tensor, width: int | None) -> Tensor | None:
    """Offsets or features (E, width) of a checked shape, where they are wanted."""
    if given is None or width is None:
        return None
    shape = edge_index.shape[-1], width
    given = given[:, None] if isinstance(given, Tensor) and given.ndim == 1 == width else given
    if not isinstance(given, Tensor) or tuple(given.shape) != shape or given.is_complex():
        raise ValueError(f"{name} must be real numbers of shape {shape}, got {checks.described(given)}")
    if given.device != edge_index.device:
        raise ValueError(f"{name} must be on {edge_index.device} as edge_index is, got {given.device}")
    return given


@checks.python_numbers
def neighbor_list(
    pos: Tensor, cutoff: float, *, batch: Tensor | None = None, cell: Tensor | None = None, pbc: Tensor | None = None,
    max_pairs: int = MAX_PAIRS, metric: str = "euclidean",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Pairs of nodes of the same graph closer than ``cutoff``, in time linear in nodes at bounded density.

    On the CPU by scipy's k-d tree, where it is installed; elsewhere nodes are sorted into cells of side ``cutoff``, and
    only neighbouring cells are compared. Shapes depend on values, so this runs outside torch.compile only, and waits
    for the device on CUDA.

    Args:
        pos: ``(N, dim)`` positions. In float32 they are exact to about 1e-7 of their size: give those far from the
            origin, such as map coordinates of 5e6 m, in float64.
        cutoff: pairs at this distance or farther are not near, nor those nearer to it than positions are exact: moving
            all positions does not change which pairs of a lattice are near.
        batch: int64 ``(N,)`` graph index; ``None`` means one graph.
        cell: lattice vectors as rows, ``(dim, dim)`` or ``(B, dim, dim)``, of graphs that repeat: pairs with images of
            nodes are found then too, their own among them.
        pbc: bool ``(dim,)`` or ``(B, dim)``, along which lattice vectors graphs repeat; ``None`` for those that are not
            zero.
        max_pairs: the most pairs a node, on average, that are returned. They are counted first, in bounded memory.
        metric: ``"euclidean"``, or ``"manhattan"``, sums of the differences along the axes.

    Returns:
        ``edge_index`` int64 ``(2, E)``, sources j and targets i, sorted by target, no node with itself (but for its
        images); and offsets ``(E, dim)``, :math:`x_j - x_i`, of images where these are nearer, with gradients.

    Raises:
        ValueError: for more than ``max_pairs`` pairs a node.

    Example:
        >>> import torch
        >>> neighbor_list(torch.tensor([[0.0], [1.0], [5.0]]), 2)[0]
        tensor([[1, 0],
                [0, 1]])
    """
    if checks.is_batched(pos):
        raise ValueError("pos must not be what torch.vmap goes through where near pairs are found from it: give edges")
    checks.choice("metric", metric, METRICS)
    checks.positive_number(cutoff=cutoff)
    nodes, lattice = len(pos), None
    if cell is not None:
        graphs = int(batch.max()) + 1 if batch is not None and nodes else 1
        graphs = max(graphs, len(cell)) if isinstance(cell, Tensor) and cell.ndim == 3 else graphs
        lattice, _ = read_lattice(cell, pbc, graphs, pos, pos.shape[1])
    if not nodes:
        return torch.zeros(2, 0, dtype=torch.int64, device=pos.device), pos.new_zeros(0, pos.shape[1])
    points, owner, steps = pos.detach(), torch.arange(nodes, device=pos.device), None
    if lattice is not None:  # images after the nodes
        points, owner, steps = images(points, cutoff, batch, lattice.detach())
    graph, limit = None if batch is None else batch[owner], limit_of(pos.detach(), cutoff)
    find = tree_pairs if has_scipy() and points.device.type == "cpu" and bool(points.isfinite().all()) else cell_pairs
    pairs = find(points, cutoff, limit, graph, metric, max_pairs * nodes, nodes)
    if pairs is None:
        raise ValueError(
            f"pos has more than {max_pairs} pairs a node at distances below {cutoff} among {nodes} nodes, so that "
            "attention to near pairs would not be linear: give edge_index (or neighbors), take a smaller cutoff, or "
            "scale pos"
        )
    pairs = pairs[:, torch.argsort(pairs[0] * len(points) + pairs[1])]
    (target, image), source = pairs, owner[pairs[1]]
    offsets = pos[source] - pos[target]
    if lattice is not None and steps is not None:
        each = lattice[0] if batch is None else lattice[batch[target]]
        offsets = offsets + ((steps[image] - steps[target])[:, None] @ each)[:, 0].to(offsets.dtype)
    return torch.stack([source, target]), offsets


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
    check_edges(edge_index, len(pos))
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    lengths = torch.linalg.vector_norm(pos.detach()[source].double() - pos.detach()[target].double(), dim=-1)
    mean = float(lengths.mean()) if len(lengths) else 0.0
    if not 0 < mean < float("inf"):
        raise ValueError(f"edge_index must join nodes at different pos, got edges of mean length {mean}")
    return mean


def read_lattice(cell: Tensor, pbc: Tensor | None, graphs: int, like: Tensor, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Lattice vectors as rows, (graphs, dim, dim) in float64, zero where graphs do not repeat, and along which they do,
    bool (graphs, dim), checked: of one cell for all graphs, one a graph, or as PyG batches them, (dim graphs, dim)."""
    shapes = ((dim, dim), (1, dim, dim), (graphs, dim, dim), (dim * graphs, dim))
    if not isinstance(cell, Tensor) or not checks.is_one_of(cell.shape, shapes):
        came = str(tuple(cell.shape)) if isinstance(cell, Tensor) else type(cell).__name__
        raise ValueError(f"cell must be ({dim}, {dim}) or one a graph, ({graphs}, {dim}, {dim}), got {came}")
    if cell.device != like.device or not cell.is_floating_point():
        raise ValueError(f"cell must be floating point on {like.device} as x is, got {cell.dtype} on {cell.device}")
    vectors = cell.double().reshape(-1, dim, dim).expand(graphs, dim, dim)
    periodic = (vectors != 0).any(2)
    if pbc is not None:
        fits = isinstance(pbc, Tensor) and pbc.dtype == torch.bool and pbc.device == like.device
        if not fits or not checks.is_one_of(pbc.shape, ((dim,), (1, dim), (graphs, dim), (dim * graphs,))):
            wanted = f"bool ({dim},) or ({graphs}, {dim}) on {like.device} as x is"
            raise ValueError(f"pbc must be {wanted}, got {checks.described(pbc)}")
        periodic = pbc.reshape(-1, dim).expand(graphs, dim)
    lattice = torch.where(periodic[..., None], vectors, 0.0)
    if not checks.is_concrete(cell) or not checks.is_concrete(periodic):
        return lattice, periodic
    vectors = vectors.detach()
    if not bool(vectors.isfinite().all()):
        raise ValueError(f"cell must be finite, got {vectors.tolist()}")
    length = vectors.norm(dim=2)
    missing = ((length == 0) & periodic).any(1)
    if bool(missing.any()):
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {vectors[missing][0].tolist()}")
    units = torch.where(periodic, 1 / length.clamp(min=1e-300), 0.0)[..., None] * vectors
    flat = (units @ units.mT + torch.diag_embed((~periodic).double())).det() <= _FLAT**2
    if bool(flat.any()):
        wanted = "a volume, got lattice vectors that depend on each other"
        raise ValueError(f"cell must have {wanted}: {vectors[flat][0].tolist()}")
    return lattice, periodic
