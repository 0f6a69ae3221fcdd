"""Which channels a token has of each grade of Cl(3,0), and how its rows hold them.

The rows of a token are ordered by grade, then component, then channel: with c_g channels of grade g,

    c_0 scalars | x, y, z of c_1 polar vectors | x, y, z of c_2 axial vectors | c_3 pseudoscalars

Tokens come last, (rows, T), so that channels are mixed by matrix products and the rest runs along memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...functional.hyena.clifford import GRADE_SIZES, PATHS


class Grades(NamedTuple):
    """Numbers of channels of the grades 0 (0e), 1 (1o), 2 (1e), 3 (0o), and how a token's rows hold them."""

    scalars: int = 0
    vectors: int = 0
    bivectors: int = 0
    pseudoscalars: int = 0

    @property
    def dim(self) -> int:
        """Rows of a token."""
        return sum(size * channels for size, channels in zip(GRADE_SIZES, self, strict=True))

    def times(self, factor: int) -> Grades:
        return Grades(*(factor * channels for channels in self))

    def plus(self, other: Grades) -> Grades:
        return Grades(*(a + b for a, b in zip(self, other, strict=True)))

    def only(self, kept: tuple[bool, ...]) -> Grades:
        """Without the other grades."""
        return Grades(*(channels if keep else 0 for channels, keep in zip(self, kept, strict=True)))

    def channels(self) -> list[int]:
        """The channel of each row, where the components of one are three."""
        out: list[int] = []
        for size, channels in zip(GRADE_SIZES, self, strict=True):
            first = 1 + max(out, default=-1)
            out += list(range(first, first + channels)) * size
        return out

    def split(self, x: Tensor) -> list[Tensor]:
        """Rows (dim, ...) to the four grades (components, channels, ...)."""
        sizes = [size * channels for size, channels in zip(GRADE_SIZES, self, strict=True)]
        parts = x.split(sizes)
        return [part.unflatten(0, (n, -1)) if len(part) else part.new_zeros(n, 0, *x.shape[1:])
                for n, part in zip(GRADE_SIZES, parts, strict=True)]  # fmt: skip

    def reachable(self, products: int) -> tuple[bool, bool, bool, bool]:
        """Which grades so many geometric products can make of these; a bias makes scalars of nothing."""
        found = {0} | {grade for grade, channels in enumerate(self) if channels}
        for _ in range(products):
            found |= {j for i, k, j in PATHS if i in found and k in found}
        return tuple(grade in found for grade in range(4))  # type: ignore[return-value]


def join_channels(*parts: tuple[Grades, Tensor]) -> tuple[Grades, Tensor]:
    """Put the channels of several tokens side by side, grade by grade."""
    parts = tuple(part for part in parts if part[0].dim)
    if len(parts) == 1:
        return parts[0]
    total, split = Grades(), [grades.split(x) for grades, x in parts]
    for grades, _ in parts:
        total = total.plus(grades)
    rows = [torch.cat(grade, 1).flatten(0, 1) for n, grade in enumerate(zip(*split, strict=True)) if total[n]]
    return total, torch.cat(rows)


POSITION = Grades(vectors=1)


def grades_of_channels(
    scalar_channels: int,
    vector_channels: int,
    out: tuple[int | None, int | None],
    hidden: tuple[int | None, int | None],
) -> tuple[Grades, Grades, Grades]:
    """Grades of input, output and between, from numbers of scalars and vectors as users give them; None means those of
    the input. ValueError for negative numbers, or none at all."""
    inside = _scalars_and_vectors(("scalar_channels", "vector_channels"), scalar_channels, vector_channels, Grades())
    outside = _scalars_and_vectors(("out_scalars", "out_vectors"), *out, inside)
    return inside, outside, _scalars_and_vectors(("hidden_scalars", "hidden_vectors"), *hidden, inside)


def _scalars_and_vectors(names: tuple[str, str], scalars: int | None, vectors: int | None, default: Grades) -> Grades:
    chosen = default.scalars if scalars is None else scalars, default.vectors if vectors is None else vectors
    for name, value in zip(names, chosen, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer from 0 on, got {value!r}")
    if not any(chosen):
        raise ValueError(f"{names[0]} and {names[1]} must not both be 0")
    return Grades(*chosen)
