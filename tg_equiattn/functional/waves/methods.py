"""Choice of the method for each graph, by its number of nodes, its openness and its density."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...modes import runs_eagerly
from ...node_batch import NodeBatch
from .cells import Cells
from .coulomb import Coulomb
from .direct import Images
from .kernel import Interaction, Kernel, Range
from .lattices import TAPER, count_of_vectors
from .nufft import nufft_available

if TYPE_CHECKING:
    from jaxtyping import Float

METHODS = ("auto", "direct", "ewald", "nufft")
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_MANY = 4000  # open graphs with fewer nodes are summed directly
_WARNED = 30_000  # reciprocal vectors from which on wide cells get a warning
# costs of a reciprocal vector, for each node and by itself, of a pair of images, and of sums over images by themselves,
# relative to that of a channel of a node; from measured times on one core of a CPU
_PHASE, _VECTOR, _PAIR, _CALL = 4, 40, 20, 2e4


def check_error(error: float) -> None:
    """Raise ValueError for an ``error`` that reciprocal sums cannot promise."""
    if not isinstance(error, float) or not 1e-14 <= error <= 0.1:
        raise ValueError(f"error must be in [1e-14, 0.1], got {error!r}")


def automatic(size: int, vectors: float, pairs: bool, nufft: bool) -> str:
    """The method of ``"auto"`` for a graph, from measured times on one core of a CPU.

    Args:
        size: number of nodes.
        vectors: number of reciprocal vectors of the kernel that needs most.
        pairs: true if direct sums are possible.
        nufft: true if non-uniform fast Fourier transforms are available.
    """
    if pairs and (size < _MANY or not nufft or size**2 < 1250 * vectors):
        return "direct"
    return "nufft" if nufft and size > 2000 and vectors > 8000 else "ewald"


class Term(NamedTuple):
    """The form of the sum over a kernel.

    Attributes:
        width: the width at which a Coulomb kernel is split; ``None`` means that it is not.
        images: images over which the kernel, or its short-range part, is summed in real space; ``None`` means that sums
            over reciprocal vectors have all of it.
    """

    width: float | None = None
    images: Images | None = None


class Choice(NamedTuple):
    """The choice for a graph. Graphs with equal choices are computed together.

    Attributes:
        method: the method.
        terms: how each kernel is summed.
        vectors: number of binary digits of the number of reciprocal vectors.
        nodes: number of binary digits of the number of nodes.
    """

    method: str
    terms: tuple[Term, ...] = ()
    vectors: int = 0
    nodes: int = 0


def choose(
    method: str, pos: Float[Tensor, "nodes 3"], channels: int, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None,
) -> dict[Choice, list[int]]:  # fmt: skip
    """Choose the method of each graph, with so many ``channels`` of each node and kernel. Return the graphs of each
    choice; empty graphs are left out."""
    repeats = [False] * node_batch.count if cells is None else cells.periodic.any(1).tolist()
    if method == "direct" and any(repeats):
        raise ValueError("method must be 'auto', 'ewald' or 'nufft' for graphs that repeat, got 'direct'")
    nufft = nufft_available(pos.device.type) and runs_eagerly()
    if method == "nufft" and not nufft:
        raise ValueError(
            "method='nufft' needs finufft (the extra nufft) on a CPU, cufinufft (the extra nufft-cuda) on CUDA, and "
            "no torch.func around it"
        )
    local = node_batch.ranks is None  # otherwise all ranks choose alike, from the sizes on all of them
    sizes = node_batch.read_sizes() if local else node_batch.totals.tolist()
    chosen: dict[Choice, list[int]] = {}
    for graph, size in enumerate(sizes):
        pairs = local and not repeats[graph]
        if not size:
            continue
        if method == "direct" or (method == "auto" and pairs and size < _MANY):
            choice = Choice("direct")
        else:
            extents = _extents(graph, pos, node_batch, cells if repeats[graph] else None)
            mixed = local and method == "auto" and interaction.max_hkl is None
            terms, vectors = _terms(extents, interaction, (size, channels) if mixed else None)
            most = max(1.0, *vectors)
            if repeats[graph]:
                _warn_of_wide_cells(graph, size, vectors)
            name = automatic(size, most, pairs, nufft) if method == "auto" else method
            choice = Choice("direct") if name == "direct" else Choice(name, terms, int(most).bit_length())
        chosen.setdefault(choice._replace(nodes=size.bit_length()), []).append(graph)
    return chosen


def _warn_of_wide_cells(graph: int, size: int, vectors: Sequence[float]) -> None:
    if sum(vectors) > max(_WARNED, _WIDE * size):
        warnings.warn(
            f"cell of graph {graph} is far wider than its {size} nodes and needs {sum(vectors):,.0f} reciprocal "
            "vectors: say with pbc=False along which lattice vectors it does not repeat, or take a larger width",
            stacklevel=2,
        )


class _Extents(NamedTuple):
    """The volume of a cell along directions that repeat, and the extents along the others: the volume and no sides for
    a crystal, the area and the thickness for a slab, 1 and three sides for an open graph. ``planes`` are the distances
    between lattice planes."""

    volume: float
    sides: list[float]
    planes: list[float]


def _terms(
    extents: _Extents, interaction: Interaction, size: tuple[int, int] | None
) -> tuple[tuple[Term, ...], list[float]]:
    """Choose the terms that cost least. Return them and the number of reciprocal vectors of each part of a kernel.

    With a ``size``, the numbers of nodes and of channels, parts of kernels that decay fast may be summed over images of
    a crystal. Widths follow from cells and not from positions.
    """
    scaled, is_open, terms, counts = interaction.scaled_cutoff, len(extents.sides) == 3, [], []
    repeated = size is not None and not extents.sides

    def options(kernel: Kernel, bounds: tuple[float, float], own: Range) -> Iterator[tuple[Term, list[Range]]]:
        """Terms, and the ranges of their parts in reciprocal space."""
        if not (is_open and isinstance(kernel, Coulomb)):
            yield Term(), [own]
        if repeated and not own.long_range:
            yield Term(None, _images(own.margin, extents)), []
        if isinstance(kernel, Coulomb) and (is_open or repeated):
            for width in (bounds[1] * 2 ** (n / 2) for n in range(20)):
                short, long = kernel.split_ranges(bounds[0], width, scaled)
                yield (Term(width), [short, long]) if is_open else (Term(width, _images(short.margin, extents)), [long])

    for kernel in interaction.kernels:
        for bounds, own in zip(kernel.bounds, kernel.ranges(scaled), strict=True):
            tried = []
            for term, ranges in options(kernel, bounds, own):
                each = [count_of_vectors(extents.volume * _box(extents.sides, x), TAPER * x.cutoff) for x in ranges]
                tried.append((_cost(sum(each), term.images, *size or (1, 1)), term, each))
            _, term, each = min(tried, key=lambda found: found[0])
            terms.append(term)
            counts += each
    return tuple(terms), counts


def _cost(vectors: float, images: Images | None, nodes: int, channels: int) -> float:
    near = 0.0 if images is None else _CALL + _PAIR * nodes**2 * math.prod(2 * n + 1 for n in images)
    return near + vectors * (nodes * (_PHASE + channels) + _VECTOR)


def _images(margin: float, extents: _Extents) -> Images:
    """Images around the nearest one within a margin, in a cell with these distances between lattice planes."""
    a, b, c = (max(0, math.ceil(margin / distance - 0.5)) for distance in extents.planes)
    return a, b, c


def _extents(graph: int, pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch, cells: Cells | None) -> _Extents:
    device, start, size = pos.device, int(node_batch.starts[graph]), int(node_batch.sizes[graph])
    cell = Cells.none(1, device) if cells is None else cells.select(torch.tensor([graph], device=device))
    sides = cell.extents(pos.detach()[None, start : start + size], None, node_batch.ranks)[0]
    full = torch.where(cell.periodic[..., None], cell.vectors, cell.normals()).detach()[0]
    planes = 1 / torch.linalg.inv(full).norm(dim=0)
    return _Extents(float(full.det().abs()), sides[~cell.periodic[0]].tolist(), planes.tolist())


def _box(sides: list[float], own: Range) -> float:
    """The volume, or for slabs the thickness, of the box that :func:`.lattices.lattice_of` makes."""
    if not own.long_range:
        return math.prod(side + own.margin for side in sides)
    radius = math.hypot(*sides) + own.margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + own.margin for side in sides)
