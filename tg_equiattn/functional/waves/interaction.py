"""The terms of a sum over nodes: kernels, products of values with harmonics, and the promised error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import Kernel, Range

Product = Callable[[Tensor, Tensor, int], Tensor]


class EwaldNodes(NamedTuple):
    """Positions (..., 3) in double precision, queries and keys (..., heads, C, A) and values (..., heads, V): of flat
    nodes (T, ...), or of packed graphs (B, N, ...) with zeros for padding."""

    pos: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class Interaction(NamedTuple):
    """The terms that attention sums over nodes: kernels, the product of values with harmonics of a degree, the promised
    ``error`` of reciprocal sums and the largest Miller indices of the kernel with the largest cutoff, if given."""

    kernels: tuple[Kernel, ...]
    product: Product
    error: float
    max_hkl: Sequence[int] | None

    @property
    def lmax(self) -> int:
        return self.kernels[0].lmax

    @property
    def num_kernels(self) -> int:
        """Kernels of all kinds for each head."""
        return sum(kernel.count for kernel in self.kernels)

    def singles(self) -> list[Kernel]:
        """Each kernel as an object of its own."""
        return [kernel.single(c) for kernel in self.kernels for c in range(kernel.count)]

    def bounds_of(self, ranges: Sequence[Range], scaled: float) -> list[tuple[int, int, int]] | None:
        """Largest Miller indices of each kernel: ``max_hkl`` in proportion to the cutoffs."""
        if self.max_hkl is None:
            return None
        largest = max(own.cutoff for kernel in self.kernels for own in kernel.ranges(scaled))
        h, k, l = self.max_hkl  # noqa: E741
        ratios = [own.cutoff / largest - 1e-9 for own in ranges]  # less a rounding error
        return [(math.ceil(h * r), math.ceil(k * r), math.ceil(l * r)) for r in ratios]


def every_product(lmax: int) -> Product:
    """Values times every harmonic up to a degree: (..., V) to (..., V (lmax + 1)²)."""

    def product(features: Tensor, harmonics: Tensor, degree: int) -> Tensor:
        products = features[..., None] * harmonics[..., None, :]
        return torch.nn.functional.pad(products, (degree**2, (lmax + 1) ** 2 - (degree + 1) ** 2)).flatten(-2)

    return product
