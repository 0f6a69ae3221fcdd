"""Which way is least work, for each graph by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ragged import Ragged
from .kernels import EwaldKernels
from .lattices import TAPER, Cells, count_of_waves

_ALWAYS_PAIRS = 512  # nodes of an open cloud up to which nothing else is worth counting

# Nanoseconds on one core of a CPU: of a kernel's value, of a product in a matrix product, of a phase, of a point's
# share in one grid cell of its transform, of a cell in a fast Fourier transform.
_KERNEL, _PRODUCT, _PHASE, _SPREAD, _GRID = 12.0, 0.05, 4.0, 0.6, 4.0


def cheapest(
    method: str, graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels,
    contracted: int, channels: int, mesh: bool,
) -> tuple[str, int]:  # fmt: skip
    """The way for one graph, and the logarithm of its number of waves, by which like graphs are told.

    Args:
        cells: those of all graphs if this one repeats.
        contracted: A, of queries and keys.
        channels: V + E, of values and outputs of a head.
        mesh: whether there is that way.
    """
    open_ = cells is None
    if method == "pairs" or (open_ and method == "auto" and ragged.ranks is None and size <= _ALWAYS_PAIRS):
        return "pairs", 0
    volumes = _volumes(graph, size, pos, ragged, cells, kernels)
    waves = [
        count_of_waves(volume, TAPER * kernels.phase / low)
        for volume, (low, _) in zip(volumes, kernels.bounds, strict=True)
    ]
    bits = max(1, int(max(waves))).bit_length()
    if method != "auto":
        return method, bits
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
    return min(prices, key=lambda way: prices[way]), bits


def _volumes(
    graph: int, size: int, pos: Tensor, ragged: Ragged, cells: Cells | None, kernels: EwaldKernels
) -> list[float]:
    """Of the cell, or of the boxes of all kernels."""
    if cells is not None and bool(cells.periodic[graph].all()):
        return [float(cells.vectors[graph].detach().det().abs())] * len(kernels.bounds)
    start = int(ragged.starts[graph])
    own = pos.detach()[start : start + size]
    if ragged.ranks is not None:  # whose boxes are found together, and are not known here
        return [1.0] * len(kernels.bounds)
    if cells is None:
        sides = (own.amax(0) - own.amin(0)).tolist()
        area = 1.0
    else:
        first, second = cells.vectors[graph].detach()[cells.periodic[graph]]
        normal = torch.linalg.cross(first, second)
        area = float(normal.norm())
        along = own @ (normal / area)
        sides = [float(along.max() - along.min())]
    diagonal = math.hypot(*sides)
    out = []
    for c, (_, high) in enumerate(kernels.bounds):
        margin = kernels.phase * high
        if c < kernels.gaussians:
            box = [side + margin for side in sides]
        else:
            radius = diagonal + margin
            box = [side + radius + margin for side in sides]
        out.append(area * math.prod(box))
    return out
