"""Channels of a token by grade of Cl(3,0): scalars 0e | polar vectors 1o | axial vectors 1e | pseudoscalars 0o.

Tokens are stored as *features* (T, dim), with the grades side by side, or as *parts*, four tensors (components,
channels, T)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...functional.vector.clifford import GRADE_SIZES, grades_of_products

if TYPE_CHECKING:
    from jaxtyping import Float

Parts = list[Tensor]
GRADE_NAMES = ("0e", "1o", "1e", "0o")


class Grades(NamedTuple):
    """Numbers of channels of the grades 0 (0e), 1 (1o), 2 (1e) and 3 (0o)."""

    scalars: int = 0
    vectors: int = 0
    bivectors: int = 0
    pseudoscalars: int = 0

    @property
    def dim(self) -> int:
        """Number of features of a token."""
        return sum(size * channels for size, channels in zip(GRADE_SIZES, self, strict=True))

    def times(self, factor: int) -> Grades:
        return Grades(*(factor * channels for channels in self))

    def plus(self, other: Grades) -> Grades:
        return Grades(*(a + b for a, b in zip(self, other, strict=True)))

    def only(self, wanted: tuple[bool, ...]) -> Grades:
        """The channels of the ``wanted`` grades, and 0 for the others."""
        return Grades(*(channels if want else 0 for channels, want in zip(self, wanted, strict=True)))

    def channels(self) -> list[int]:
        """The channel of each feature. The three components of a vector have one channel."""
        sizes = [size for size, channels in zip(GRADE_SIZES, self, strict=True) for _ in range(channels)]
        return [channel for channel, size in enumerate(sizes) for _ in range(size)]

    def split(self, x: Float[Tensor, "tokens dim"]) -> list[Float[Tensor, "tokens channels components"]]:
        """Split features into the four grades."""
        sizes = [size * channels for size, channels in zip(GRADE_SIZES, self, strict=True)]
        columns = zip(x.split(sizes, 1), self, GRADE_SIZES, strict=True)
        return [part.unflatten(1, (channels, size)) for part, channels, size in columns]

    def parts(self, x: Float[Tensor, "tokens dim"]) -> Parts:
        """Convert features to parts. Tokens of parts are contiguous in memory."""
        sizes = [size * channels for size, channels in zip(GRADE_SIZES, self, strict=True)]
        rows = zip(x.T.contiguous().split(sizes), self, GRADE_SIZES, strict=True)
        return [part.unflatten(0, (channels, size)).transpose(0, 1) for part, channels, size in rows]

    def reachable(self, products: int) -> tuple[bool, bool, bool, bool]:
        """True for grades that can differ from zero after this number of geometric products and a bias of scalars, if
        the channels are independent. A mirror through one or two polar vectors changes no scalar and none of these
        vectors, so they give no pseudoscalar; one gives no axial vector."""
        found = {0} | {grade for grade, channels in enumerate(self) if channels}
        for _ in range(products):
            found |= set(grades_of_products(found))
        if not self.bivectors and not self.pseudoscalars:
            found -= {2, 3} if self.vectors < 2 else {3} if self.vectors < 3 else set()
        return tuple(grade in found for grade in range(4))  # type: ignore[return-value]


def joined(*tokens: Parts) -> Parts:
    """Concatenate the channels of several parts, grade by grade."""
    return [torch.cat(grade, 1) for grade in zip(*tokens, strict=True)]


def features(parts: Parts) -> Float[Tensor, "tokens dim"]:
    """Convert parts to features."""
    return torch.cat([part.transpose(0, 1).flatten(0, 1) for part in parts if part.shape[1]]).T.contiguous()


def with_position(parts: Parts, pos: Float[Tensor, "tokens 3"]) -> Parts:
    """Add positions to parts as one more polar vector."""
    return [parts[0], torch.cat([parts[1], pos.T[:, None]], 1), *parts[2:]]


POSITION = Grades(vectors=1)
