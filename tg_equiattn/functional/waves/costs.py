"""Which method is least work, for each graph by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ragged import Ragged
from .kernels import EwaldKernels, Part, parts_of, split_at
from .lattices import TAPER, Cells, count_of_waves

_ALWAYS_PAIRS = 512  # nodes of an open cloud up to which nothing else is worth counting

# Nanoseconds on one core of a CPU: of a kernel's value, of a product in a matrix product, of a phase, of a point's
# share in one grid cell of its transform, of a cell in a fast Fourier transform.
_KERNEL, _PRODUCT, _PHASE, _SPREAD, _GRID = 8.0, 0.04, 4.0, 1.8, 10.0


def cheapest(
    method: str, graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels,
    contracted: int, channels: int, mesh: bool,
) -> tuple[str, tuple[float, ...], int]:  # fmt: skip
    """The method for one graph of this size on all ranks, which repeats where there are cells (of all); the
    widths at which potentials of an open one are split for waves; the logarithm of its number of waves, by which like
    graphs are told. Contracted are A axes of queries and keys, channels of values and outputs of a head V + E."""
    open_ = cells is None
    if method == "pairs" or (open_ and method == "auto" and ragged.ranks is None and size <= _ALWAYS_PAIRS):
        return "pairs", (), 0
    splits, waves = _waves(*_extents(graph, pos, ragged, cells), kernels)
    bits = max(1, int(max(waves))).bit_length()
    if method != "auto":
        return method, splits, bits
    heads, count = kernels.widths.shape
    harmonics = (kernels.lmax + 1) ** 2
    width = heads * contracted * channels
    prices = {"waves": sum(size * n * (_PHASE + 2 * _PRODUCT * width) for n in waves)}
    if open_ and ragged.ranks is None:
        a_kernel = _KERNEL * (kernels.lmax + 1) + contracted * _PRODUCT
        prices["pairs"] = size**2 * heads * (count * a_kernel + harmonics * channels * _PRODUCT)
    if mesh:
        cells_of_a_point = (1 - math.log10(kernels.error)) ** 3
        prices["mesh"] = sum(width / 2 * (size * cells_of_a_point * _SPREAD + 30 * n * _GRID) for n in waves)
    return min(prices, key=lambda name: prices[name]), splits, bits


def _waves(volume: float, sides: list[float], kernels: EwaldKernels) -> tuple[tuple[float, ...], list[float]]:
    """The widths to split potentials of an open cloud at that leave fewest waves, and how many each part has."""
    phase = kernels.phase

    def count(parts: list[Part]) -> list[float]:
        return [count_of_waves(volume * _box(sides, part, phase), TAPER * phase / part.least) for part in parts]

    splits: list[float] = []
    if len(sides) == 3:
        for c, (low, high) in list(enumerate(kernels.bounds))[kernels.gaussians :]:
            tried = [high * 2 ** (n / 2) for n in range(20)]
            splits.append(min(tried, key=lambda width: sum(count(split_at(c, low, width)))))
    return tuple(splits), count(parts_of(kernels, splits))


def _extents(graph: int, pos: Tensor, ragged: Ragged, cells: Cells | None) -> tuple[float, list[float]]:
    """The volume of a cell and no sides, the area and the thickness of a slab, or one and the sides of a cloud."""
    which = torch.tensor([graph], device=pos.device)
    cell = Cells.none(1, pos.device) if cells is None else cells.of(which)
    start, size = int(ragged.starts[graph]), int(ragged.sizes[graph])
    sides = cell.extents(pos.detach()[None, start : start + size], None, ragged.ranks)[0]
    volume = torch.where(cell.periodic[..., None], cell.vectors, cell.normals()).detach().det().abs()
    return float(volume), sides[~cell.periodic[0]].tolist()


def _box(sides: list[float], part: Part, phase: float) -> float:
    """The volume, or for slabs the thickness, of the box around a graph of these sides, as lattices have it."""
    margin = phase * part.largest
    if not part.ends:
        return math.prod(side + margin for side in sides)
    radius = math.hypot(*sides) + margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + margin for side in sides)
