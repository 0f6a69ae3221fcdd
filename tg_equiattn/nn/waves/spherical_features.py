"""Features of each degree and parity, their layout in rows, and their products with solid harmonics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...encodings.harmonics import solid_harmonics
from ...modes import ordinary_tensors
from ...tables import Tables

Coupling = Callable[[int, int, int], Tensor]


class Irrep(NamedTuple):
    """Channels of one degree l and parity. A row holds its 2 l + 1 components one after the other, each with all
    channels."""

    degree: int
    parity: int
    channels: int

    @property
    def size(self) -> int:
        """Components of a channel."""
        return 2 * self.degree + 1

    @property
    def rows(self) -> int:
        """Numbers of all components and channels."""
        return self.size * self.channels

    @property
    def invariant(self) -> bool:
        """True for scalars that keep their sign in a reflection."""
        return (self.degree, self.parity) == (0, 1)

    def shared(self, heads: int) -> Irrep:
        """The channels of a head."""
        return self._replace(channels=-(-self.channels // heads))


@ordinary_tensors()
def gaunt_coupling(first: int, second: int, out: int) -> Tensor:
    """The only invariant product (2 l + 1, 2 l' + 1, 2 l'' + 1) of three degrees, with norm 1, for degrees with an even
    sum up to 5: the mean of three harmonics over the sphere, which is that over the corners of an icosahedron."""
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0.0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    points = torch.cat([torch.tensor(corners, dtype=torch.float64).roll(n, 1) for n in range(3)])
    harmonics = solid_harmonics(points / math.hypot(1, golden), max(first, second, out))
    mean = torch.einsum("ma,mb,mc->abc", *(harmonics[:, n**2 : (n + 1) ** 2] for n in (first, second, out)))
    return mean / mean.norm()


def _couplings(
    inside: tuple[Irrep, ...], outside: tuple[Irrep, ...], paths: Sequence[tuple[int, int, int]], coupling: Coupling
) -> tuple[Tensor, ...]:
    """For each path, a float64 matrix from components of harmonics to pairs of components of input and output."""
    tables = []
    for a, degree, b in paths:
        exact = coupling(inside[a].degree, degree, outside[b].degree).to(torch.float64) * math.sqrt(outside[b].size)
        tables.append(exact.permute(1, 0, 2).reshape(2 * degree + 1, -1))
    return tuple(tables)


class HarmonicProduct(nn.Module):
    r"""A bilinear, equivariant map: products of a head's features with harmonics up to lmax, mixed by weights, with
    couplings C of three degrees that have norm 1.

    .. math:: \mathrm{out}^{c'}_{m'} = \sum_{\text{paths}} \sum_{c, m, n} w_{c c'}\,
        \sqrt{2 l'' + 1}\, C_{m n m'}\, x^c_m\, Y_n
    """

    def __init__(
        self, inside: Sequence[Irrep], outside: Sequence[Irrep], lmax: int, heads: int, coupling: Coupling
    ) -> None:
        super().__init__()
        self.inside, self.outside = tuple(inside), tuple(outside)
        self.paths = [
            (a, degree, b)
            for a, first in enumerate(inside)
            for degree in range(lmax + 1)
            for b, out in enumerate(outside)
            if abs(first.degree - degree) <= out.degree <= first.degree + degree
            and first.parity * (-1) ** degree == out.parity
        ]
        self.couplings = Tables(functools.partial(_couplings, self.inside, self.outside, tuple(self.paths), coupling))
        self.weights = nn.ParameterList(
            torch.empty(heads, inside[a].channels, outside[b].channels) for a, _, b in self.paths
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, with the variance that keeps the variance of features."""
        for (_, _, b), weight in zip(self.paths, self.weights, strict=True):
            into = sum(self.inside[a].channels for a, _, other in self.paths if other == b)
            nn.init.normal_(weight, std=into**-0.5)

    def forward(self, features: Tensor, harmonics: Tensor, degree: int) -> Tensor:
        """Features (..., H, V) and harmonics of one degree (..., 1, 2 l + 1), broadcast, to (..., H, E)."""
        parts = features.split([irrep.rows for irrep in self.inside], -1)
        shape = torch.broadcast_shapes(features.shape[:-1], harmonics.shape[:-1])
        found: dict[int, Tensor] = {}
        couplings = self.couplings(features.device, features.dtype)
        for n, (a, path_degree, b) in enumerate(self.paths):
            if path_degree != degree:
                continue
            size, wide = self.inside[a].size, self.outside[b].size
            x = parts[a].unflatten(-1, (size, -1))
            matrix = (harmonics[..., None] * couplings[n]).sum(-2).unflatten(-1, (size, wide)).mT
            first = size < wide  # mix channels where there are fewer components
            x = _apply(matrix, _mix(x, self.weights[n]) if first else x)
            x = x if first else _mix(x, self.weights[n])
            found[b] = found[b] + x if b in found else x
        out = [
            found[b].flatten(-2).expand(*shape, -1) if b in found else features.new_zeros(*shape, irrep.rows)
            for b, irrep in enumerate(self.outside)
        ]
        return torch.cat(out, -1)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    """Matrices (..., 1, b, a) times components (..., H, a, channels)."""
    if x.shape[-2] == 1:
        return matrix * x
    if matrix.shape[-2] == 1:
        return (matrix.mT * x).sum(-2, keepdim=True)
    return matrix @ x


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    """Channels (..., H, a, channels) by a matrix (H, channels, out) a head."""
    return x @ weight[0] if weight.shape[0] == 1 else torch.einsum("...hac,hcd->...had", x, weight)
