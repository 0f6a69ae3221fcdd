"""Choice of the method for each graph and kernel, by the numbers of nodes and of reciprocal vectors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...modes import runs_eagerly
from ...node_batch import NodeBatch
from .cells import TAPER, Cells, count_of_vectors
from .kernels import Coulomb, Interaction, Kernel, Range
from .nufft import nufft_available

Images = tuple[int, int, int]
MANY = 4000  # open graphs with fewer nodes are summed directly
_WIDE = 1000  # reciprocal vectors per node; with more, a cell is far wider than the graph in it
_WARNED = 30_000  # reciprocal vectors from which on wide cells get a warning
# costs of a reciprocal vector, for each node and by itself, of a pair of images, and of sums over images by themselves,
# relative to that of a channel of a node; from measured times on one core of a CPU
_PHASE, _VECTOR, _PAIR, _CALL = 4, 40, 20, 2e4


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


def choices_of(
    method: str, sizes: Mapping[int, int], pos: Tensor, channels: int, interaction: Interaction, node_batch: NodeBatch,
    cells: Cells | None,
) -> dict[int, Choice]:  # fmt: skip
    """Choose the method of graphs with these ``sizes`` and with ``channels`` of each node and kernel. The rule of
    ``"auto"`` follows from measured times on one core of a CPU."""
    nufft = nufft_available(pos.device.type) and runs_eagerly()
    if method == "nufft" and not nufft:
        raise ValueError(
            "method='nufft' needs finufft (the extra nufft) on a CPU, cufinufft (the extra nufft-cuda) on CUDA, and "
            "no torch.func around it"
        )
    local, auto, choices = node_batch.ranks is None, method == "auto", {}
    each = Cells.none(node_batch.count, pos.device) if cells is None else cells
    full = torch.where(each.periodic[..., None], each.vectors, each.normals()).detach()
    volumes, planes = full.det().abs().tolist(), (1 / torch.linalg.inv(full).norm(dim=1)).tolist()
    for graph, size in sizes.items():
        repeats, sides = each.periodic[graph], []
        if not (crystal := bool(repeats.all())):
            start, graphs = int(node_batch.starts[graph]), torch.tensor([graph], device=pos.device)
            own = pos.detach()[None, start : start + int(node_batch.sizes[graph])]
            sides = each.select(graphs).extents(own, None, node_batch.ranks)[0][~repeats].tolist()
        by_images = local and auto and crystal and interaction.max_hkl is None
        extents = _Extents(volumes[graph], sides, planes[graph])
        terms, vectors = _terms(extents, interaction, (size, channels) if by_images else None)
        most, is_open = max(1.0, *vectors), len(sides) == 3
        if not is_open and sum(vectors) > max(_WARNED, _WIDE * size):
            warnings.warn(
                f"cell of graph {graph} is far wider than its {size} nodes and needs {sum(vectors):,.0f} reciprocal "
                "vectors: say with pbc=False along which lattice vectors it does not repeat, or take a larger width",
                stacklevel=2,
            )
        if auto and is_open and local and (not nufft or size < MANY or size**2 < 1250 * most):
            choices[graph] = Choice("direct")
            continue
        automatic = "nufft" if nufft and size > 2000 and most > 8000 else "ewald"
        choices[graph] = Choice(automatic if auto else method, terms, int(most).bit_length())
    return choices


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

    With a ``size`` of a crystal, its numbers of nodes and channels, parts of kernels that decay fast may be summed over
    images. Widths follow from cells and not from positions.
    """
    scaled, is_open, terms, counts = interaction.scaled_cutoff, len(extents.sides) == 3, [], []

    def options(kernel: Kernel, bounds: tuple[float, float], own: Range) -> Iterator[tuple[Term, list[Range]]]:
        """Terms, and the ranges of their parts in reciprocal space."""
        if not (is_open and isinstance(kernel, Coulomb)):
            yield Term(), [own]
        if size is not None and not own.long_range:
            yield Term(None, _images(own.margin, extents)), []
        if isinstance(kernel, Coulomb) and (is_open or size is not None):
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


def _box(sides: list[float], own: Range) -> float:
    """The volume, or for slabs the thickness, of the box that :func:`.cells.lattice_of` makes."""
    if not own.long_range:
        return math.prod(side + own.margin for side in sides)
    radius = math.hypot(*sides) + own.margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + own.margin for side in sides)
