"""Points in cells: which of them may be near each other, found in time linear in points at bounded density."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

METRICS: dict[str, Callable[[Tensor], Tensor]] = {  # lengths (E,) of offsets (E, dim)
    "manhattan": lambda x: x.abs().sum(1),
    "euclidean": lambda x: x.double().square().sum(1).sqrt(),
}
_PART = 1 << 20  # pairs that are looked at together
_CELL_AXES = 3  # of cells that pairs are searched in: there are 3 to the power of it around each


class CellPairs:
    """Pairs of nodes in neighbouring cells of side ``limit``, of which the near ones are told apart in parts."""

    def __init__(
        self, pos: Tensor, max_distance: float, batch: Tensor | None, length: Callable[[Tensor], Tensor]
    ) -> None:
        nodes = len(pos)
        self.length = length
        self.pos, self.limit = pos, torch.tensor(max_distance, dtype=torch.float64, device=pos.device)
        if pos.is_floating_point():
            exact = 16 * torch.finfo(pos.dtype).eps * pos.abs().nan_to_num(0, 0, 0).max()
            self.limit = max_distance - exact.clamp(max=max_distance / 4)
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
