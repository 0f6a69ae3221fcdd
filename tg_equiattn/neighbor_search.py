"""Near pairs of nodes, found by position."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .cells import METRICS, cell_pairs, has_scipy, images, limit_of, read_lattice, tree_pairs
from .modes import is_batched

MAX_PAIRS = 1000  # default bound of the near pairs of a node, on average


@checks.python_numbers
def neighbor_list(
    pos: Tensor, cutoff: float, *, batch: Tensor | None = None, cell: Tensor | None = None, pbc: Tensor | None = None,
    max_pairs: int = MAX_PAIRS, metric: str = "euclidean",
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        cell: lattice vectors as rows, ``(dim, dim)`` or ``(B, dim, dim)``. Pairs of a node with periodic images are
            then found as well, its own images among them. The default, ``None``, means that graphs do not repeat.
        pbc: bool ``(dim,)`` or ``(B, dim)``, the lattice vectors along which graphs repeat. The default, ``None``,
            means all that are not zero.
        max_pairs: largest allowed number of pairs for each node, on average. The default is 1,000. If there may be
            more, pairs are counted first, in bounded memory.
        metric: ``"euclidean"`` (the default), or ``"manhattan"``, the sum of the differences along the axes.

    Returns:
        ``edge_index`` int64 ``(2, E)`` with sources j and targets i, sorted by target, without pairs of a node with
        itself; and offsets ``(E, dim)``, :math:`x_j - x_i`, through which gradients flow to ``pos`` and ``cell``.

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
    nodes, lattice = len(pos), None
    if batch is not None:
        checks.tensor("batch", batch, torch.int64, [(nodes,)], pos.device)
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
