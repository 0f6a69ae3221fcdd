"""Choice of the method that takes least time for a graph, from counts of operations."""

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
from .gaussian import OscillatingGaussian
from .kernel import Interaction, Kernel, Range, Sources
from .lattices import TAPER, count_of_vectors
from .nufft import nufft_available

if TYPE_CHECKING:
    from jaxtyping import Float

METHODS = ("auto", "direct", "ewald", "nufft")
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_WARNED = 1e8  # nanoseconds; wide cells that take longer get a warning
_ALWAYS_DIRECT = 512  # open graphs with at most so many nodes are summed directly

# Nanoseconds on one core of a CPU: for a degree of a value of a kernel, for a product in a matrix product, for a phase,
# for a reciprocal vector, for one channel of its product with harmonics of a degree, for spreading a node to one cell
# of the grid of its transform, for a cell of the grid in a fast Fourier transform.
_DEGREE, _PRODUCT, _PHASE, _VECTOR, _MIX, _SPREAD, _GRID = 5.0, 0.04, 4.0, 400.0, 20.0, 1.8, 10.0
# Additional nanoseconds for a value of a kernel with Boys functions or oscillations.
_VALUE: dict[type[Kernel], float] = {Coulomb: 30.0, OscillatingGaussian: 35.0}


def check_error(error: float) -> None:
    """Raise ValueError for an ``error`` that reciprocal sums cannot promise."""
    if not isinstance(error, float) or not 1e-14 <= error <= 0.1:
        raise ValueError(f"error must be in [1e-14, 0.1], got {error!r}")


class Prices(NamedTuple):
    """Times of the steps of a device, relative to one core of a CPU.

    Attributes:
        direct: time of direct sums.
        nodes: time of sums over nodes and reciprocal vectors.
        vectors: time of work for each reciprocal vector that does not depend on the number of nodes.
        nufft: time of non-uniform fast Fourier transforms.
    """

    direct: float = 1.0
    nodes: float = 1.0
    vectors: float = 1.0
    nufft: float = 1.0


PRICES = {"cpu": Prices(), "cuda": Prices(0.0091, 0.0024, 0.0047, 0.01)}  # CUDA: an H100; nufft is a guess


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
    method: str, pos: Float[Tensor, "nodes 3"], query: Float[Tensor, "nodes heads kernels contracted"],
    sources: Sources, interaction: Interaction, node_batch: NodeBatch, cells: Cells | None,
) -> dict[Choice, list[int]]:  # fmt: skip
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
    prices, width = PRICES.get(pos.device.type, PRICES["cuda"]), sources[-1].shape[-1]
    chosen: dict[Choice, list[int]] = {}
    for graph, size in enumerate(sizes):
        pairs = local and not repeats[graph]
        if not size:
            continue
        if method == "direct" or (method == "auto" and pairs and size <= _ALWAYS_DIRECT):
            choice = Choice("direct")
        else:
            extents = _extents(graph, pos, node_batch, cells if repeats[graph] else None)
            splits, vectors = number_of_vectors(*extents, interaction)
            features, values = query.new_zeros(0, query.shape[1], width), query.shape[2] if len(sources) == 1 else 1
            channels = width + interaction.product(features, query.new_zeros(1, 1), 0).shape[2]
            steps = time_of_steps(size, vectors, interaction, query.shape, channels, values)
            direct, of_nodes, of_vectors, transforms = (price * step for price, step in zip(prices, steps, strict=True))
            times = {"ewald": of_vectors + of_nodes, "direct": direct, "nufft": of_vectors + transforms}
            if repeats[graph]:
                _warn_of_wide_cells(graph, size, vectors, times["ewald"])
            allowed = {"ewald": True, "direct": pairs, "nufft": nufft}
            fastest = min((name for name in times if allowed[name]), key=times.__getitem__)
            choice = Choice(fastest if method == "auto" else method, splits, max(1, int(max(vectors))).bit_length())
        chosen.setdefault(choice._replace(nodes=size.bit_length()), []).append(graph)
    return chosen


def time_of_steps(
    size: int, vectors: Sequence[float], interaction: Interaction, shape: Sequence[int], channels: int, values: int
) -> tuple[float, float, float, float]:
    """Nanoseconds on a core of a CPU for the steps that :class:`Prices` names, for one graph.

    Args:
        size: number of nodes.
        vectors: number of reciprocal vectors of each kernel.
        interaction: settings of the sums.
        shape: shape of queries.
        channels: channels of a value plus channels of an output, for one head.
        values: number of values of a node: 1, or the number of kernels if each has a source of its own.
    """
    _, heads, kernels, contracted = shape
    width, degrees = heads * contracted * channels, interaction.lmax + 1
    spread = (1 - math.log10(interaction.error)) ** 3  # grid cells of a node
    kernel = kernels * (_DEGREE * degrees + contracted * _PRODUCT)
    kernel += sum(each.count * _VALUE.get(type(each), 0.0) for each in interaction.kernels)
    direct = size**2 * heads * (kernel + degrees**2 * channels * values * _PRODUCT)
    of_nodes = size * sum(vectors) * (_PHASE + 2 * _PRODUCT * width)
    of_vectors = sum(vectors) * (_VECTOR + _MIX * degrees * width)
    transforms = sum(width / 2 * (size * spread * _SPREAD + 30 * n * _GRID) for n in vectors)
    return direct, of_nodes, of_vectors, transforms


def _warn_of_wide_cells(graph: int, size: int, vectors: Sequence[float], time: float) -> None:
    if max(vectors) > _WIDE * size and time > _WARNED:
        warnings.warn(
            f"cell of graph {graph} is far wider than its {size} nodes: {sum(vectors):,.0f} reciprocal vectors, about "
            f"{time / 1e9:.2g} s on a core; say with pbc=False along which lattice vectors it does not repeat, or take "
            "a larger width",
            stacklevel=2,
        )


def number_of_vectors(
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
