"""Near pairs of nodes, found by position in time linear in the nodes, at bounded density."""

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
from .modes import is_batched

if TYPE_CHECKING:
    from jaxtyping import Int, Num

METRICS: dict[str, Callable[[Num[Tensor, "pairs dim"]], Num[Tensor, " pairs"]]] = {  # lengths of offsets
    "manhattan": lambda x: x.abs().sum(1),
    "euclidean": lambda x: x.double().square().sum(1).sqrt(),
}
_MAX_PAIRS = 1000  # default bound of the near pairs of a node, on average
_PART = 1 << 20  # pairs whose distances are computed at a time
_CELL_AXES = 3  # coordinates by which nodes are sorted into cells; with n of them, 3^n cells are searched for a node


@checks.python_numbers
def neighbor_list(
    pos: Tensor, cutoff: float, *, batch: Tensor | None = None, max_pairs: int = _MAX_PAIRS, metric: str = "euclidean"
) -> tuple[Tensor, Tensor]:
    r"""Pairs of nodes of the same graph closer than ``cutoff``, in time linear in nodes at bounded density.

    On the CPU, scipy's k-d tree finds them if scipy is installed. Otherwise nodes are sorted into cells of side
    ``cutoff``, and only nodes of neighboring cells are compared. Shapes depend on values, so this function does not
    run in torch.compile, and on CUDA it waits for the device.

    Args:
        pos: ``(N, dim)`` positions. Float32 rounds them to about 1e-7 of their size: give positions far from the
            origin, such as map coordinates of 5e6 m, in float64.
        cutoff: pairs at a smaller distance are near, in the unit of ``pos``. Pairs whose distance equals the cutoff up
            to the rounding of positions are not near, so that a translation does not change the pairs of a lattice.
        batch: int64 ``(N,)`` graph index. The default, ``None``, means one graph.
        max_pairs: largest allowed number of pairs for each node, on average. The default is 1,000. If there may be
            more, pairs are counted first, in bounded memory.
        metric: ``"euclidean"`` (the default), or ``"manhattan"``, the sum of the differences along the axes.

    Returns:
        ``edge_index`` int64 ``(2, E)`` with sources j and targets i, sorted by target, without pairs of a node with
        itself; and offsets ``(E, dim)``, :math:`x_j - x_i`, through which gradients flow to ``pos``.

    Raises:
        ValueError: if there are more than ``max_pairs`` pairs a node on average, or if an argument has a shape, dtype
            or value that is not allowed.

    Example:
        >>> import torch
        >>> neighbor_list(torch.tensor([[0.0], [1.0], [5.0]]), 2)[0]
        tensor([[1, 0],
                [0, 1]])
    """
    if is_batched(pos):
        raise ValueError(
            "pos must not be what torch.vmap goes through where near pairs are found from it, got such a tensor: give "
            "edge_index or neighbors"
        )
    if pos.ndim != 2:
        raise ValueError(f"pos must have shape (N, dim), one row for each node, got {checks.shape_of(pos)}")
    checks.choice("metric", metric, METRICS)
    checks.positive_number(cutoff=cutoff)
    checks.positive(max_pairs=max_pairs)
    nodes = len(pos)
    if batch is not None:
        checks.tensor("batch", batch, torch.int64, [(nodes,)], pos.device)
    if not nodes:
        return torch.zeros(2, 0, dtype=torch.int64, device=pos.device), pos.new_zeros(0, pos.shape[1])
    points, limit = pos.detach(), _limit_of(pos.detach(), cutoff)
    find = _tree_pairs if has_scipy() and pos.device.type == "cpu" and bool(points.isfinite().all()) else _cell_pairs
    pairs = find(points, cutoff, limit, batch, metric, max_pairs * nodes)
    if pairs is None:
        raise ValueError(
            f"pos has more than {max_pairs} pairs a node at distances below {cutoff} among {nodes} nodes, so that "
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


@functools.cache
def has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def _tree_pairs(
    pos: Num[Tensor, "nodes dim"], cutoff: float, limit: float, batch: Int[Tensor, " nodes"] | None, metric: str,
    most: int,
) -> Int[Tensor, "2 pairs"] | None:  # fmt: skip
    """Pairs of nodes of a graph nearer than ``limit``, found by scipy's k-d tree. Return ``None`` if there are more
    than ``most`` pairs."""
    from scipy.spatial import KDTree

    points, norm, nodes = pos.double(), {"manhattan": 1, "euclidean": 2}[metric], len(pos)
    if batch is not None:  # one more coordinate keeps graphs apart
        points = torch.cat([points, 2.0 * cutoff * batch[:, None]], 1)
    tree, limit = KDTree(points.numpy()), math.nextafter(limit, 0.0)
    if nodes * (nodes - 1) > most and int(tree.count_neighbors(tree, limit, norm)) - nodes > most:
        return None
    pairs = torch.from_numpy(tree.query_pairs(limit, norm, output_type="ndarray")).T.long()
    return torch.cat([pairs, pairs.flip(0)], 1)


def _cell_pairs(
    pos: Num[Tensor, "nodes dim"], cutoff: float, limit: float, batch: Int[Tensor, " nodes"] | None, metric: str,
    most: int,
) -> Int[Tensor, "2 pairs"] | None:  # fmt: skip
    """The same as :func:`_tree_pairs`, by operations of torch.

    Nodes are sorted into cells of side ``cutoff``, and only nodes of neighboring cells are compared. If there may be
    too many pairs, they are counted first.
    """
    device, length = pos.device, METRICS[metric]
    graph = torch.zeros(len(pos), dtype=torch.int64, device=device) if batch is None else batch
    points = (pos[:, :_CELL_AXES].double() / cutoff).floor().long()
    cell = torch.cat([graph[:, None], points], 1)
    cell = cell - cell.amin(0)
    sides = cell.amax(0) + 3  # a margin, so that no neighbouring cell wraps around
    strides = torch.cat([sides.flip(0).cumprod(0).flip(0)[1:], sides.new_ones(1)])
    cell = ((cell + 1) * strides).sum(1)
    ordered, order = torch.sort(cell)
    steps = list(itertools.product((-1, 0, 1), repeat=points.shape[1]))
    steps = steps[: len(steps) // 2 + 1]  # the last one is zero; the others are mirrored below
    wanted = cell + (torch.tensor(steps, device=device) * strides[1:]).sum(1, keepdim=True)  # (steps, N)
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
                yield pair if step == len(steps) - 1 else torch.cat([pair, pair.flip(0)], 1)

    if 2 * int(counts.sum()) > most:
        found = 0
        for pair in near():
            found += pair.shape[1]
            if found > most:
                return None
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
    return torch.cat([nothing, *near()], 1)
