"""Search for near pairs of points in time linear in the points, at bounded density; lattices of periodic graphs."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import checks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Num

METRICS: dict[str, Callable[[Num[Tensor, "pairs dim"]], Num[Tensor, " pairs"]]] = {  # lengths of offsets
    "manhattan": lambda x: x.abs().sum(1),
    "euclidean": lambda x: x.double().square().sum(1).sqrt(),
}
_PART = 1 << 20  # pairs whose distances are computed at a time
_FLAT = 1e-6  # smallest volume of a unit cell, relative to a box with edges of the same lengths
_CELL_AXES = 3  # coordinates by which points are sorted into cells; with n of them, 3^n cells are searched for a point


def limit_of(pos: Tensor, cutoff: float) -> float:
    """The bound of distances of near pairs: ``cutoff`` minus the rounding of positions."""
    if not pos.is_floating_point():
        return float(cutoff)
    exact = 16 * torch.finfo(pos.dtype).eps * pos.abs().nan_to_num(0, 0, 0).max()
    return float(cutoff - exact.clamp(max=cutoff / 4))


@functools.cache
def has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def tree_pairs(
    pos: Num[Tensor, "points dim"], cutoff: float, limit: float, batch: Int[Tensor, " points"] | None, metric: str,
    most: int, nodes: int,
) -> Int[Tensor, "2 pairs"] | None:  # fmt: skip
    """Pairs of the first ``nodes`` points with points of their graph nearer than ``limit``, found by scipy's k-d tree.
    Return ``None`` if there are more than ``most`` pairs."""
    from scipy.spatial import KDTree

    points, norm = pos.double(), {"manhattan": 1, "euclidean": 2}[metric]
    if batch is not None:  # one more coordinate keeps graphs apart
        points = torch.cat([points, 2.0 * cutoff * batch[:, None]], 1)
    tree, limit = KDTree(points.numpy()), math.nextafter(limit, 0.0)
    whole = len(pos) == nodes
    first = tree if whole else KDTree(points[:nodes].numpy())
    if nodes * (len(pos) - 1) > most and int(first.count_neighbors(tree, limit, norm)) - nodes > most:
        return None
    if whole:
        pairs = torch.from_numpy(tree.query_pairs(limit, norm, output_type="ndarray")).T.long()
        return torch.cat([pairs, pairs.flip(0)], 1)
    found = first.sparse_distance_matrix(tree, limit, norm, output_type="ndarray")
    pairs = torch.stack([torch.from_numpy(found[name].astype("int64")) for name in ("i", "j")])
    return pairs[:, pairs[0] != pairs[1]]


def images(
    pos: Num[Tensor, "nodes dim"], cutoff: float, batch: Int[Tensor, " nodes"] | None,
    lattice: Float[Tensor, "graphs dim dim"],
) -> tuple[Float[Tensor, "points dim"], Int[Tensor, " points"], Float[Tensor, "points dim"]]:  # fmt: skip
    """Wrap nodes into their unit cell, and add their images that may be nearer than ``cutoff`` to a node.

    Args:
        pos: positions of the nodes.
        cutoff: largest distance of near pairs.
        batch: graph of each node; ``None`` for one graph.
        lattice: lattice vectors as rows, zero along directions that do not repeat.

    Returns:
        Float64 points, the nodes first; the node of each point; and how many lattice vectors each point was moved by.
    """
    dim, nodes = pos.shape[1], torch.arange(len(pos), device=pos.device)
    graph = torch.zeros_like(nodes) if batch is None else batch
    inverse = torch.linalg.pinv(lattice)  # zero along lattice vectors that are zero
    margin = cutoff * torch.linalg.vector_norm(inverse, dim=1)  # in lattice vectors, (B, dim)
    place = (pos.double()[:, None] @ inverse[graph])[:, 0] + 0.5 * (margin == 0)[graph]
    wrap, place = -place.floor(), place - place.floor()
    ends = margin.ceil().amax(0).long().tolist()
    axes = [torch.arange(-end, end + 1, device=pos.device) for end in ends]
    steps = torch.cartesian_prod(*axes).view(-1, dim).double()
    steps = steps[(steps != 0).any(1)]
    at = place[:, None] + steps
    room = margin[graph][:, None] + 1e-9
    node, step = ((at >= -room) & (at <= 1 + room)).all(2).nonzero().T
    node, moved = torch.cat([nodes, node]), torch.cat([wrap, wrap[node] + steps[step]])
    return pos.double()[node] + (moved[:, None] @ lattice[graph[node]])[:, 0], node, moved


def cell_pairs(
    pos: Num[Tensor, "points dim"], cutoff: float, limit: float, batch: Int[Tensor, " points"] | None, metric: str,
    most: int, nodes: int,
) -> Int[Tensor, "2 pairs"] | None:  # fmt: skip
    """The same as :func:`tree_pairs`, by operations of torch.

    Points are sorted into cells of side ``cutoff``, and only points of neighboring cells are compared. If there may be
    too many pairs, they are counted first.
    """
    device, mirror, length = pos.device, nodes == len(pos), METRICS[metric]
    graph = torch.zeros(len(pos), dtype=torch.int64, device=device) if batch is None else batch
    points = (pos[:, :_CELL_AXES].double() / cutoff).floor().long()
    cell = torch.cat([graph[:, None], points], 1)
    cell = cell - cell.amin(0)
    sides = cell.amax(0) + 3  # a margin, so that no neighbouring cell wraps around
    strides = torch.cat([sides.flip(0).cumprod(0).flip(0)[1:], sides.new_ones(1)])
    cell = ((cell + 1) * strides).sum(1)
    ordered, order = torch.sort(cell)
    steps = list(itertools.product((-1, 0, 1), repeat=points.shape[1]))
    steps = steps[: len(steps) // 2 + 1] if mirror else steps  # the last one is zero; the others are mirrored below
    wanted = cell[:nodes] + (torch.tensor(steps, device=device) * strides[1:]).sum(1, keepdim=True)  # (steps, N)
    first = torch.searchsorted(ordered, wanted)
    counts = torch.searchsorted(ordered, wanted, right=True) - first

    def near() -> Iterator[Tensor]:
        for step, (firsts, ends) in enumerate(zip(first, counts.cumsum(1), strict=True)):
            total = int(ends[-1])
            for begin in range(0, total, _PART):
                place = torch.arange(begin, min(begin + _PART, total), device=device)
                i = torch.searchsorted(ends, place, right=True)
                j = order[place - (ends - counts[step])[i] + firsts[i]]
                pair = torch.stack([i, j])[:, (length(pos[j] - pos[i]) < limit) & (i != j)]
                yield pair if not mirror or step == len(steps) - 1 else torch.cat([pair, pair.flip(0)], 1)

    if int(counts.sum()) * (1 + mirror) > most:
        found = 0
        for pair in near():
            found += pair.shape[1]
            if found > most:
                return None
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
    return torch.cat([nothing, *near()], 1)


def read_lattice(
    cell: Tensor, pbc: Tensor | None, graphs: int, like: Tensor, dim: int = 3
) -> tuple[Float[Tensor, "graphs dim dim"], Bool[Tensor, "graphs dim"]]:
    """Check the lattice vectors of graphs.

    ``cell`` is one for all graphs, one for each, or (dim graphs, dim) as PyG batches them. Return the lattice vectors
    as rows in float64, zero along directions that do not repeat, and the directions that repeat.
    """
    shapes = ((dim, dim), (1, dim, dim), (graphs, dim, dim), (dim * graphs, dim))
    if not isinstance(cell, Tensor) or not checks.is_one_of(cell.shape, shapes):
        wanted = f"({dim}, {dim}) or one a graph, ({graphs}, {dim}, {dim})"
        raise ValueError(f"cell must be {wanted}, got {checks.shape_of(cell)}")
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
    _check_lattice(cell, periodic, vectors.detach())
    return torch.where(periodic[..., None], vectors, 0.0), periodic


@checks.of_values
def _check_lattice(
    cell: Tensor, periodic: Bool[Tensor, "graphs dim"], vectors: Float[Tensor, "graphs dim dim"]
) -> None:
    if not bool(vectors.isfinite().all()):
        raise ValueError(f"cell must be finite, got {vectors.tolist()}")
    length = vectors.norm(dim=2)
    without = ((length == 0) & periodic).any(1)
    if bool(without.any()):
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {vectors[without][0].tolist()}")
    units = torch.where(periodic, 1 / length.clamp(min=1e-300), 0.0)[..., None] * vectors
    flat = (units @ units.mT + torch.diag_embed((~periodic).double())).det() <= _FLAT**2
    if bool(flat.any()):
        wanted = "a volume, got lattice vectors that depend on each other"
        raise ValueError(f"cell must have {wanted}: {vectors[flat][0].tolist()}")
