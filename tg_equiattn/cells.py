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


def limit_of(pos: Tensor, max_distance: float) -> Tensor:
    """The distance that near pairs are below: less than asked for by as much as positions are exact."""
    if not pos.is_floating_point():
        return torch.tensor(max_distance, dtype=torch.float64, device=pos.device)
    exact = 16 * torch.finfo(pos.dtype).eps * pos.abs().nan_to_num(0, 0, 0).max()
    return max_distance - exact.clamp(max=max_distance / 4)


@functools.cache
def has_scipy() -> bool:
    """Whether it can be imported."""
    try:
        importlib.import_module("scipy.spatial")
    except ImportError:
        return False
    return True


def tree_pairs(pos: Tensor, max_distance: float, batch: Tensor | None, metric: str, most: int) -> Tensor | None:
    """Pairs (2, E) of nodes of one graph, each both ways, by scipy's tree; ``None`` where there are more than
    ``most``."""
    from scipy.spatial import KDTree

    places, norm = pos.double(), NORMS[metric]
    if batch is not None:  # graphs apart from each other
        places = torch.cat([places, 2.0 * max_distance * batch[:, None]], 1)
    tree, limit = KDTree(places.numpy()), math.nextafter(float(limit_of(pos, max_distance)), 0.0)
    if len(pos) * (len(pos) - 1) > most and int(tree.count_neighbors(tree, limit, norm)) - len(pos) > most:
        return None
    pairs = torch.from_numpy(tree.query_pairs(limit, norm, output_type="ndarray")).T.long()
    return torch.cat([pairs, pairs.flip(0)], 1)


class CellPairs:
    """Pairs of nodes in neighbouring cells of side ``limit``, of which the near ones are told apart in parts."""

    def __init__(
        self, pos: Tensor, max_distance: float, batch: Tensor | None, length: Callable[[Tensor], Tensor]
    ) -> None:
        nodes = len(pos)
        self.length, self.pos, self.limit = length, pos, limit_of(pos, max_distance)
        graph = torch.zeros(nodes, dtype=torch.int64, device=pos.device) if batch is None else batch
        places = pos[:, :_CELL_AXES].double() / max_distance
        dim = places.shape[1]
        cell = torch.cat([graph[:, None], places.floor().long()], 1)
        cell = cell - cell.amin(0)
        sides = cell.amax(0) + 3  # a margin, so that no neighbouring cell wraps around
        strides = torch.cat([sides.flip(0).cumprod(0).flip(0)[1:], sides.new_ones(1)])
        cell = ((cell + 1) * strides).sum(1)
        ordered, self.order = torch.sort(cell)
        half = itertools.islice(itertools.product((-1, 0, 1), repeat=dim), 3**dim // 2 + 1)
        steps = torch.tensor(list(half), device=pos.device)  # up to no step; the others mirror them
        wanted = cell + (steps * strides[1:]).sum(1, keepdim=True)  # (steps, N)
        self.first = torch.searchsorted(ordered, wanted)
        self.counts = torch.searchsorted(ordered, wanted, right=True) - self.first
        self.count = int(2 * self.counts.sum() - self.counts[-1].sum())

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
                if step < len(self.counts) - 1:
                    yield j, i
