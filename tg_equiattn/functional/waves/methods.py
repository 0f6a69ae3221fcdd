"""Choice of the method for each graph, by its number of nodes, its openness and its density."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...modes import runs_eagerly
from ...node_batch import NodeBatch
from .cells import Cells
from .coulomb import Coulomb
from .kernel import Interaction, Range
from .lattices import TAPER, count_of_vectors
from .nufft import nufft_available

if TYPE_CHECKING:
    from jaxtyping import Float

METHODS = ("auto", "direct", "ewald", "nufft")
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_MANY = 4000  # open graphs with fewer nodes are summed directly
_WARNED = 30_000  # reciprocal vectors from which on wide cells get a warning


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


class Choice(NamedTuple):
    """The choice for a graph. Graphs with equal choices are computed together.

    Attributes:
        method: the method.
        splits: the widths at which Coulomb kernels are split in reciprocal sums over an open graph.
        vectors: number of binary digits of the number of reciprocal vectors.
        nodes: number of binary digits of the number of nodes.
    """

    method: str
    splits: tuple[float, ...] = ()
    vectors: int = 0
    nodes: int = 0


def choose(
    method: str, pos: Float[Tensor, "nodes 3"], interaction: Interaction, node_batch: NodeBatch, cells: Cells | None
) -> dict[Choice, list[int]]:
    """Choose the method of each graph. Return the graphs of each choice; empty graphs are left out."""
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
            splits, vectors = _number_of_vectors(
                *_extents(graph, pos, node_batch, cells if repeats[graph] else None), interaction
            )
            if repeats[graph]:
                _warn_of_wide_cells(graph, size, vectors)
            name = automatic(size, max(vectors), pairs, nufft) if method == "auto" else method
            digits = max(1, int(max(vectors))).bit_length()
            choice = Choice("direct") if name == "direct" else Choice(name, splits, digits)
        chosen.setdefault(choice._replace(nodes=size.bit_length()), []).append(graph)
    return chosen


def _warn_of_wide_cells(graph: int, size: int, vectors: Sequence[float]) -> None:
    if max(vectors) > _WIDE * size and sum(vectors) > _WARNED:
        warnings.warn(
            f"cell of graph {graph} is far wider than its {size} nodes and needs {sum(vectors):,.0f} reciprocal "
            "vectors: say with pbc=False along which lattice vectors it does not repeat, or take a larger width",
            stacklevel=2,
        )


def _number_of_vectors(
    volume: float, sides: list[float], interaction: Interaction
) -> tuple[tuple[float, ...], list[float]]:
    """Choose the widths at which to split the Coulomb kernels of an open graph, so that there are fewest reciprocal
    vectors. Return them and the number of reciprocal vectors of each kernel. ``volume`` and ``sides`` are those of
    :func:`_extents`."""
    scaled = interaction.scaled_cutoff

    def count(ranges: Sequence[Range]) -> list[float]:
        return [count_of_vectors(volume * _box(sides, own), TAPER * own.cutoff) for own in ranges]

    splits: list[float] = []
    counts: list[float] = []
    for kernel in interaction.kernels:
        if len(sides) < 3 or not isinstance(kernel, Coulomb):
            counts += count(kernel.ranges(scaled))
            continue
        for low, high in kernel.bounds:
            widths = [high * 2 ** (n / 2) for n in range(20)]
            tried = [(count(kernel.split_ranges(low, width, scaled)), width) for width in widths]
            fewest, width = min(tried, key=lambda found: sum(found[0]))
            splits.append(width)
            counts += fewest
    return tuple(splits), counts


def _extents(
    graph: int, pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch, cells: Cells | None
) -> tuple[float, list[float]]:
    """The volume of a cell along directions that repeat, and the extents along the others: the volume and no extents
    for a crystal, the area and the thickness for a slab, 1 and three sides for an open graph."""
    device, start, size = pos.device, int(node_batch.starts[graph]), int(node_batch.sizes[graph])
    cell = Cells.none(1, device) if cells is None else cells.select(torch.tensor([graph], device=device))
    sides = cell.extents(pos.detach()[None, start : start + size], None, node_batch.ranks)[0]
    volume = torch.where(cell.periodic[..., None], cell.vectors, cell.normals()).detach().det().abs()
    return float(volume), sides[~cell.periodic[0]].tolist()


def _box(sides: list[float], own: Range) -> float:
    """The volume, or for slabs the thickness, of the box that :func:`.lattices.lattice_of` makes."""
    if not own.long_range:
        return math.prod(side + own.margin for side in sides)
    radius = math.hypot(*sides) + own.margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + own.margin for side in sides)
