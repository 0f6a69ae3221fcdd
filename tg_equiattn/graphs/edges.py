"""Edges of graphs: checks, offsets of their nodes, and the sparse matrix that they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..shapes import Bool, Float, Int, Num
from ..torch_state import is_readable


class CSR(NamedTuple):
    """A sparse matrix in compressed form, and its transpose.

    Attributes:
        row_starts: where the entries of each row begin.
        col: column of each entry, sorted by row.
        row: row of each entry.
        col_starts: ``row_starts`` of the transpose.
        transposed_col: ``col`` of the transpose: the rows, sorted by column.
        transposed_row: ``row`` of the transpose.
        order: position in ``col`` of each entry of the transpose; ``None`` if the transpose is not sorted, for products
            that gather rows.
        transposed_order: position in the transpose of each entry, or ``None``.
    """

    row_starts: Int[Tensor, " rows+1"]
    col: Int[Tensor, " entries"]
    row: Int[Tensor, " entries"]
    col_starts: Int[Tensor, " cols+1"]
    transposed_col: Int[Tensor, " entries"]
    transposed_row: Int[Tensor, " entries"]
    order: Int[Tensor, " entries"] | None
    transposed_order: Int[Tensor, " entries"] | None

    @classmethod
    def from_sorted(
        cls, row: Int[Tensor, " entries"], col: Int[Tensor, " entries"], rows: int, cols: int,
        order: Int[Tensor, " entries"] | None = None,
    ) -> CSR:  # fmt: skip
        """Make a matrix from entries sorted by row; ``order``, if known, sorts them by column."""
        row_starts = torch.searchsorted(row, torch.arange(rows + 1, device=row.device))
        order = torch.argsort(col, stable=True) if order is None else order
        transposed_row, transposed_col = col[order], row[order]
        col_starts = torch.searchsorted(transposed_row, torch.arange(cols + 1, device=row.device))
        entries = torch.arange(row.shape[0], device=row.device)
        transposed_order = torch.empty_like(order).scatter(0, order, entries)
        return cls(row_starts, col, row, col_starts, transposed_col, transposed_row, order, transposed_order)

    def transposed(self) -> CSR:
        return CSR(*self[3:6], *self[:3], self.transposed_order, self.order)

    def in_transposed_order(self, x: Num[Tensor, "heads entries"]) -> Num[Tensor, "heads entries"]:
        """Numbers of the entries in the order of the transpose."""
        return x if self.order is None else x.index_select(1, self.order)

    @property
    def num_rows(self) -> int:
        return self.row_starts.shape[0] - 1


def check_edges(edge_index: object, nodes: int, device: torch.device | None = None) -> None:
    """Raise ValueError unless ``edge_index`` is int64 (2, E) with indices of ``nodes`` nodes, on a ``device`` if given;
    values are checked only where they are read."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64 or edge_index.shape[:-1] != (2,):
        raise ValueError(f"edge_index must be int64 (2, E), got {checks.described(edge_index)}")
    if device is not None and edge_index.device != device:
        raise ValueError(f"edge_index must be on {device} as the input is, got {edge_index.device}")
    checks.in_range("edge_index", edge_index, nodes - 1, ", the nodes")


def check_fields(edges: int, offsets: Tensor, features: Tensor | None, finite: bool = False) -> None:
    """Raise ValueError unless offsets are (E, dim) and features (E, F), and offsets are finite. Values are checked only
    where they are read, and not if known to be ``finite``."""
    for name, tensor, size in (("offsets", offsets, "dim"), ("features", features, "F")):
        if tensor is not None and (tensor.ndim != 2 or tensor.shape[0] != edges):
            raise ValueError(f"{name} must have shape ({edges}, {size}), got {tuple(tensor.shape)}")
    if offsets.is_complex() or offsets.dtype == torch.bool:
        raise ValueError(f"offsets (edge_offset) must be real numbers, got {offsets.dtype}")
    if not finite and offsets.shape[1]:
        checks.finite("offsets (edge_offset, or differences of pos)", offsets)


def check_graph_of_edges(
    target: Int[Tensor, " edges"], source: Int[Tensor, " edges"], batch: Int[Tensor, " nodes"] | None,
    mask: Bool[Tensor, " nodes"] | None, name: str,
) -> None:  # fmt: skip
    """Raise ValueError for an edge between graphs of ``batch`` or of a node outside ``mask``, if values are read."""
    if batch is not None:
        if target.device != batch.device:
            raise ValueError(f"{name} must be on {batch.device} as the input is, got {target.device}")
        ends = target, source
        if not checks.passes(lambda: torch.equal(*(batch.index_select(0, x) for x in ends)), *ends, batch):
            raise ValueError(f"{name} must not join nodes of different graphs of batch, got such a pair")
    if mask is not None and not checks.passes(lambda: (mask[target] & mask[source]).all(), target, source, mask):
        raise ValueError(f"{name} must join nodes that exist, got one beyond its graph's length")


def of_edges(
    name: str, values: Num[Tensor, "edges ..."] | None, edge_index: Int[Tensor, "2 edges"], width: int | None
) -> Num[Tensor, "edges width"] | None:
    """Check offsets or features of edges as users give them, and return them as (E, width). Return ``None`` if none are
    given, or if none are needed (``width`` is None)."""
    if values is None or width is None:
        return None
    shape = edge_index.shape[-1], width
    values = values[:, None] if isinstance(values, Tensor) and values.ndim == 1 == width else values
    if not isinstance(values, Tensor) or tuple(values.shape) != shape or values.is_complex():
        raise ValueError(f"{name} must be real numbers of shape {shape}, got {checks.described(values)}")
    if values.device != edge_index.device:
        raise ValueError(f"{name} must be on {edge_index.device} as edge_index is, got {values.device}")
    return values


def check_between(
    rule: str, pos: Num[Tensor, "nodes dim"], offsets: Num[Tensor, "edges dim"], target: Int[Tensor, " edges"],
    source: Int[Tensor, " edges"], whole: bool = False, images: Float[Tensor, "edges dim"] | None = None,
    mask: Bool[Tensor, " edges"] | None = None,
) -> None:  # fmt: skip
    """Raise ValueError, which begins with a ``rule``, unless offsets are differences of positions, plus lattice vectors
    ``images`` if given, up to rounding, or up to less than half a unit if offsets have to be ``whole``. Values are
    checked only where they are read, and only for edges of the ``mask``."""
    if not is_readable(pos, offsets, target, source, images, mask):
        return
    pos, offsets = pos.detach(), offsets.detach()
    apart = pos[source].double() - pos[target].double() - offsets.double()
    apart = (apart if images is None else apart + images.detach().double()).abs().amax(-1)
    rounding = 16 * max((torch.finfo(t.dtype).eps for t in (pos, offsets) if t.is_floating_point()), default=0.0)
    size = (float(t.abs().max()) if t.numel() else 0.0 for t in (offsets, pos))
    fits = (apart.round() if whole else apart) <= 1e-4 * next(size) + rounding * next(size)
    wrong = ~fits if mask is None else ~fits & mask
    if bool(wrong.any()):
        came, differ = (x[wrong][0].tolist() for x in (offsets, pos[source] - pos[target]))
        raise ValueError(f"{rule}; got {came} where pos differ by {differ}")


def images_of(
    shifts: Float[Tensor, "edges dim"], lattice: Float[Tensor, "graphs dim dim"], graph: Int[Tensor, " edges"]
) -> Float[Tensor, "edges dim"]:
    """The whole lattice vectors nearest to ``shifts``, as functions of the ``lattice`` of their graph (vectors as rows,
    zero along directions that do not repeat)."""
    rows = lattice.detach().double()
    square = rows @ rows.mT + torch.diag_embed((rows == 0).all(-1).double())
    inverse = rows.mT @ torch.linalg.inv_ex(square).inverse  # CUDA does not wait, as it would for the pseudoinverse
    steps = (shifts.detach().double()[:, None] @ inverse[graph]).round()
    return (steps @ lattice.double()[graph])[:, 0]


def offsets_along(
    pos: Num[Tensor, "nodes dim"], offsets: Num[Tensor, "edges dim"], target: Int[Tensor, " edges"],
    source: Int[Tensor, " edges"], images: Float[Tensor, "edges dim"] | None = None,
) -> Num[Tensor, "edges dim"]:  # fmt: skip
    """The same offsets, with the derivatives of differences of positions plus ``images``. Offsets that have gradients
    already keep them."""
    if offsets.requires_grad:
        return offsets
    apart = pos[source] - pos[target]
    if images is not None:
        apart = (apart + images).to(torch.promote_types(pos.dtype, offsets.dtype))
    return apart + (offsets - apart).detach()


def check_pairs(
    edge_index: Int[Tensor, "2 edges"], vectors: Float[Tensor, "edges dim"], weight: Float[Tensor, " edges"], nodes: int
) -> None:
    """Raise ValueError unless edges are in both directions, with opposite vectors: weights of edges from i to j are
    those of edges from j to i, for every pair of nodes, and weights times vectors sum to zero.

    Args:
        edge_index: the two nodes of each edge.
        vectors: vectors in units of the cutoff.
        weight: weight of each edge, at most 1. The small ones at the cutoff, which rounding may cut off in one
            direction, do not count.
        nodes: number of nodes.
    """
    if not is_readable(edge_index, vectors, weight):
        return
    first, second = edge_index
    low, high = edge_index.aminmax(dim=0)
    pairs, pair = (low * nodes + high).unique(return_inverse=True)
    values = torch.cat([((second - first).sign() * weight)[:, None], weight[:, None] * vectors], 1)
    sums = values.new_zeros(len(pairs), values.shape[1]).index_add(0, pair, values)
    wrong = ~(sums.abs().amax(1) <= 1e-4)
    if bool(wrong.any()):
        i, j = divmod(int(pairs[wrong][0]), nodes)
        count = [int(((first == a) & (second == b)).sum()) for a, b in ((i, j), (j, i))]
        raise ValueError(
            "edge_index must have each edge in both directions, with opposite edge_vectors, since charge goes along "
            f"both; got {count[0]} edges from node {i} to {j} and {count[1]} back: for a list of pairs i < j pass "
            "torch.cat([edge_index, edge_index.flip(0)], 1) and torch.cat([edge_vectors, -edge_vectors])"
        )


def offsets_between(
    pos: Num[Tensor, "nodes dim"], edge_index: Int[Tensor, "2 edges"], whole: bool
) -> Num[Tensor, "edges dim"]:
    """Offsets :math:`x_j - x_i` of edges, through :func:`whole_offsets` if they have to be ``whole``."""
    source, target = pos[edge_index].unbind()
    offsets = source - target
    if not whole or not offsets.is_floating_point():
        return offsets
    largest = 2 / torch.finfo(pos.dtype).eps
    if not checks.passes(lambda: not pos.numel() or pos.detach().abs().max() < largest, pos):
        why = f"where {pos.dtype} does not tell whole numbers apart"
        raise ValueError(f"pos must be float64 so far from the origin, {why}")
    return whole_offsets(offsets, pos)


def whole_offsets(
    offsets: Num[Tensor, "edges dim"], pos: Float[Tensor, "nodes dim"] | None = None, name: str = "differences of pos"
) -> Num[Tensor, "edges dim"]:
    """Offsets rounded to whole numbers.

    Args:
        offsets: offsets of edges.
        pos: positions whose differences they are. The size of positions determines how much offsets are rounded.
        name: name of the offsets in errors.

    Raises:
        ValueError: if an offset is further from whole numbers than rounding explains. A grid shifted by 3.7 has whole
            offsets.
    """
    if not offsets.is_floating_point():
        return offsets
    check_whole(offsets, pos, name)
    return offsets.round()


def check_whole(offsets: Tensor, pos: Tensor | None, name: str) -> None:
    """The check of :func:`whole_offsets`."""
    if not is_readable(offsets, pos):
        return
    whole = offsets.round()
    if torch.equal(offsets, whole):
        return
    size = (offsets if pos is None else pos).abs().max().double().clamp(min=1)
    exact = (16 * max(torch.finfo(t).eps for t in (offsets.dtype, torch.float32)) * size).clamp(max=0.25)
    apart = torch.where(offsets == whole, 0.0, offsets - whole).abs()  # check_fields refuses infinity
    near = (apart <= exact).all(1)
    if not bool(near.all()):
        wrong = offsets[~near][0].tolist()
        raise ValueError(
            f"{name} must be whole numbers where offsets index a table or distances are counted (offset='table', "
            f"position='clipped'), got an offset of {wrong}: scale pos to the unit of its grid; for points off a grid "
            "pass position='window', offset='distance' (or 'mlp') and a cutoff, for example 2 * mean_edge_length(pos, "
            "edge_index)"
        )
