"""Which way is least work, for each graph by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ragged import Ragged
from .kernels import EwaldKernels, Part, parts_of
from .lattices import TAPER, Cells, count_of_waves

_ALWAYS_PAIRS = 512  # nodes of an open cloud up to which nothing else is worth counting

# Nanoseconds on one core of a CPU: of a kernel's value, of a product in a matrix product, of a phase, of a point's
# share in one grid cell of its transform, of a cell in a fast Fourier transform.
_KERNEL, _PRODUCT, _PHASE, _SPREAD, _GRID = 8.0, 0.04, 4.0, 1.8, 10.0


def cheapest(
    method: str, graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels,
    contracted: int, channels: int, mesh: bool,
) -> tuple[str, int, float | None]:  # fmt: skip
    """The way for one graph, the logarithm of its number of waves, by which like graphs are told, and the width at
    which potentials of an open one are split for waves.

    Args:
        cells: those of all graphs if this one repeats.
        contracted: A, of queries and keys.
        channels: V + E, of values and outputs of a head.
        mesh: whether there is that way.
    """
    open_ = cells is None
    if method == "pairs" or (open_ and method == "auto" and ragged.ranks is None and size <= _ALWAYS_PAIRS):
        return "pairs", 0, None
    split, waves = _waves(graph, size, pos, ragged, cells, kernels)
    bits = max(1, int(max(waves))).bit_length()
    if method != "auto":
        return method, bits, split
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
    return min(prices, key=lambda way: prices[way]), bits, split


def _waves(
    graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels
) -> tuple[float | None, list[float]]:
    """The width to split at that leaves fewest waves of an open cloud, and how many each part has."""
    periodic = cells is not None and bool(cells.periodic[graph].all())
    sides: list[float] = []
    area = 1.0
    if cells is not None:
        vectors = cells.vectors[graph].detach()
        area = float(vectors.det().abs())
        normal = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
        if not periodic:
            first, second = vectors[cells.periodic[graph]]
            normal = torch.linalg.cross(first, second)[:, None]
            area, normal = float(normal.norm()), normal / normal.norm()
    else:
        normal = torch.eye(3, dtype=pos.dtype, device=pos.device)
    if not periodic:
        start = int(ragged.starts[graph])
        along = pos.detach()[start : start + size] @ normal
        if ragged.ranks is not None:
            largest = ragged.ranks.largest(torch.cat([_highest(along), _highest(-along)]))
            sides = (largest[: normal.shape[1]] + largest[normal.shape[1] :]).tolist()
        else:
            sides = (along.amax(0) - along.amin(0)).tolist()
    widest = max(high for _, high in kernels.bounds)
    potentials = kernels.gaussians < len(kernels.bounds)
    tried = [widest * 2 ** (n / 2) for n in range(16)] if cells is None and potentials else [None]
    best: tuple[float | None, list[float]] = None, [math.inf]
    for split in tried:
        waves = [
            count_of_waves(area * _box(sides, part, kernels.phase), TAPER * kernels.phase / part.least)
            for part in parts_of(kernels, split)
        ]
        if sum(waves) < sum(best[1]):
            best = split, waves
    return best


def _highest(along: Tensor) -> Tensor:
    """Of the nodes on this rank, which may have none."""
    return torch.cat([along, along.new_full((1, along.shape[1]), -torch.inf)]).amax(0)


def _box(sides: list[float], part: Part, phase: float) -> float:
    """The volume, or for slabs the thickness, of the box around a graph of these sides."""
    margin = phase * part.largest
    if not part.ends:
        return math.prod(side + margin for side in sides)
    radius = math.hypot(*sides) + margin
    if len(sides) == 1:
        return 2 * radius
    return math.prod(side + radius + margin for side in sides)
