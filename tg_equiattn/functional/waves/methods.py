"""The method that takes least time for a graph, from counts of operations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...node_batch import NodeBatch
from .cells import Cells
from .coulomb import Coulomb
from .interaction import Interaction
from .kernel import Range, scaled_cutoff
from .lattices import TAPER, count_of_vectors

METHODS = ("auto", "direct", "ewald", "nufft")
_WIDE = 1000  # reciprocal vectors per node that no crystal has: its cell is far wider than the graph
_WARNED = 1e6  # nanoseconds from which on a wide cell is a warning
_ALWAYS_DIRECT = 512  # nodes of an open graph up to which nothing else is counted

# Nanoseconds on one core of a CPU: for a value of a kernel, for a product in a matrix product, for a phase, for
# spreading a node to one cell of the grid of its transform, for a cell of the grid in a fast Fourier transform.
_KERNEL, _PRODUCT, _PHASE, _SPREAD, _GRID = 8.0, 0.04, 4.0, 1.8, 10.0


class Choice(NamedTuple):
    """The method for a graph, the widths at which Coulomb kernels are split in reciprocal sums over an open graph, and
    the logarithm of the number of reciprocal vectors: graphs with equal choices are computed together."""

    method: str
    splits: tuple[float, ...] = ()
    vectors: int = 0


def choose(
    method: str, graph: int, size: int, pos: Tensor, node_batch: NodeBatch, cells: Cells | None,
    interaction: Interaction, work: tuple[int, int, int], nufft: bool,
) -> Choice:  # fmt: skip
    """The choice for one graph with ``size`` nodes on all ranks, which repeats if there are ``cells`` (of all graphs).

    ``work`` counts heads, contracted axes of queries and keys, and channels: of values and outputs of a head.
    """
    open_, (heads, contracted, channels) = cells is None, work
    if method == "direct" or (open_ and method == "auto" and node_batch.ranks is None and size <= _ALWAYS_DIRECT):
        return Choice("direct")
    splits, vectors = _vectors(*_extents(graph, pos, node_batch, cells), interaction)
    choice = Choice(method, splits, max(1, int(max(vectors))).bit_length())
    width = heads * contracted * channels
    times = {"ewald": sum(size * n * (_PHASE + 2 * _PRODUCT * width) for n in vectors)}
    if not open_ and max(vectors) > _WIDE * size and times["ewald"] > _WARNED:
        warnings.warn(
            f"cell of graph {graph} is far wider than its {size} nodes: {sum(vectors):,.0f} reciprocal vectors, about "
            f"{times['ewald'] / 1e9:.2g} s on a core; say with pbc=False along which lattice vectors it does not "
            "repeat, or take a larger width",
            stacklevel=2,
        )
    if method != "auto":
        return choice
    if open_ and node_batch.ranks is None:
        kernel = _KERNEL * (interaction.lmax + 1) + contracted * _PRODUCT
        harmonics = (interaction.lmax + 1) ** 2
        times["direct"] = size**2 * heads * (interaction.num_kernels * kernel + harmonics * channels * _PRODUCT)
    if nufft:
        spread = (1 - math.log10(interaction.error)) ** 3  # grid cells of a node
        times["nufft"] = sum(width / 2 * (size * spread * _SPREAD + 30 * n * _GRID) for n in vectors)
    return choice._replace(method=min(times, key=lambda name: times[name]))


def _vectors(volume: float, sides: list[float], interaction: Interaction) -> tuple[tuple[float, ...], list[float]]:
    """The widths at which splitting the Coulomb kernels of an open graph leaves fewest reciprocal vectors, and the
    number of reciprocal vectors of each kernel."""
    scaled = scaled_cutoff(interaction.error, interaction.lmax)

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


def _extents(graph: int, pos: Tensor, node_batch: NodeBatch, cells: Cells | None) -> tuple[float, list[float]]:
    """The volume of a crystal's cell and no sides, the area and the thickness of a slab, or 1 and the sides of an open
    graph."""
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
