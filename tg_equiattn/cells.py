"""Points in cells: which of them may be near each other, found in time linear in points at bounded density."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

METRICS: dict[str, Callable[[Tensor], Tensor]] = {  # lengths (E,) of offsets (E, dim)
    "manhattan": lambda x: x.abs().sum(1),
    "euclidean": lambda x: x.double().square().sum(1).sqrt(),
}
_PART = 1 << 20  # pairs that are looked at together
NORMS = {"manhattan": 1, "euclidean": 2}
_CELL_AXES = 3  # of cells that pairs are searched in: there are 3 to the power of it around each


def limit_of(pos: Tensor, cutoff: float) -> float:
    """The distance that near pairs are below: less than asked for by as much as positions are exact."""
    if not pos.is_floating_point():
        return float(cutoff)
    exact = 16 * torch.finfo(pos.dtype).eps * pos.abs().nan_to_num(0, 0, 0).max()
    return float(cutoff - exact.clamp(max=cutoff / 4))


@functools.cache
def has_scipy() -> bool:
    """Whether it can be imported."""
    try:
        importlib.import_module("scipy.spatial")
    except ImportError:
        return False
    return True


def tree_pairs(
    pos: Tensor, cutoff: float, limit: float, batch: Tensor | None, metric: str, most: int, nodes: int
) -> Tensor | None:
    """Pairs (2, E) of the first nodes with all points of their graph, by scipy's tree; ``None`` where there are more
    than ``most``."""
    from scipy.spatial import KDTree

    places, norm = pos.double(), NORMS[metric]
    if batch is not None:  # graphs apart from each other
        places = torch.cat([places, 2.0 * cutoff * batch[:, None]], 1)
    tree, limit = KDTree(places.numpy()), math.nextafter(limit, 0.0)
    few = nodes * (len(pos) - 1) <= most
    if len(pos) == nodes:
        if not few and int(tree.count_neighbors(tree, limit, norm)) - nodes > most:
            return None
        pairs = torch.from_numpy(tree.query_pairs(limit, norm, output_type="ndarray")).T.long()
        return torch.cat([pairs, pairs.flip(0)], 1)
    first = KDTree(places[:nodes].numpy())
    if not few and int(first.count_neighbors(tree, limit, norm)) - nodes > most:
        return None
    found = first.sparse_distance_matrix(tree, limit, norm, output_type="ndarray")
    pairs = torch.stack([torch.from_numpy(found[name].astype("int64")) for name in ("i", "j")])
    return pairs[:, pairs[0] != pairs[1]]


def images(pos: Tensor, cutoff: float, batch: Tensor | None, lattice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes within their cell, and after them their images that may be nearer than ``cutoff`` to one.

    Args:
        lattice: float64 ``(B, dim, dim)``, of vectors along which graphs repeat, zeros where they do not.

    Returns:
        Points ``(P, dim)``, float64, the nodes first; of which node each is ``(P,)``; and by how many lattice vectors
        it was moved ``(P, dim)``.
    """
    dim, nodes = pos.shape[1], torch.arange(len(pos), device=pos.device)
    graph = torch.zeros_like(nodes) if batch is None else batch
    inverse = torch.linalg.pinv(lattice)  # of no width along vectors that are zero
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


class CellPairs:
    """Pairs of the first nodes and all points in neighbouring cells of side ``cutoff``, of which the near ones are told
    apart in parts."""

    def __init__(
        self, pos: Tensor, cutoff: float, limit: float, batch: Tensor | None, length: Callable[[Tensor], Tensor],
        nodes: int,
    ) -> None:  # fmt: skip
        self.length, self.pos, self.limit, self.mirror = length, pos, limit, nodes == len(pos)
        graph = torch.zeros(len(pos), dtype=torch.int64, device=pos.device) if batch is None else batch
        places = pos[:, :_CELL_AXES].double() / cutoff
        dim = places.shape[1]
        cell = torch.cat([graph[:, None], places.floor().long()], 1)
        cell = cell - cell.amin(0)
        sides = cell.amax(0) + 3  # a margin, so that no neighbouring cell wraps around
        strides = torch.cat([sides.flip(0).cumprod(0).flip(0)[1:], sides.new_ones(1)])
        cell = ((cell + 1) * strides).sum(1)
        ordered, self.order = torch.sort(cell)
        steps = list(itertools.product((-1, 0, 1), repeat=dim))
        if self.mirror:
            steps = steps[: len(steps) // 2 + 1]  # up to no step; the others mirror them
        along = (torch.tensor(steps, device=pos.device) * strides[1:]).sum(1, keepdim=True)
        wanted = cell[:nodes] + along  # (steps, N)
        self.first = torch.searchsorted(ordered, wanted)
        self.counts = torch.searchsorted(ordered, wanted, right=True) - self.first
        self.count = int(self.counts.sum())
        if self.mirror:
            self.count = 2 * self.count - int(self.counts[-1].sum())

    def near(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Targets and sources of near pairs."""
        device = self.pos.device
        for step, (first, counts) in enumerate(zip(self.first, self.counts, strict=True)):
            ends = counts.cumsum(0)
            for begin in range(0, int(ends[-1]), _PART):
                place = torch.arange(begin, min(begin + _PART, int(ends[-1])), device=device)
                i = torch.searchsorted(ends, place, right=True)
                j = self.order[place - (ends - counts)[i] + first[i]]
                near = (self.length(self.pos[j] - self.pos[i]) < self.limit) & (i != j)
                i, j = i[near], j[near]
                yield i, j
                if self.mirror and step < len(self.counts) - 1:
                    yield j, i
