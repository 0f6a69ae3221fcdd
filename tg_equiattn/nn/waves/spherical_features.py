"""Features of each degree and parity, their layout in rows, and their products with solid harmonics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ...encodings.harmonics import solid_harmonics
from ...functional.waves.kernels import Product
from ...tables import Tables

if TYPE_CHECKING:
    from jaxtyping import Float

Coupling = Callable[[int, int, int], Tensor]


class Irrep(NamedTuple):
    """Channels of one degree l and parity. A row of features holds the 2 l + 1 components one after the other, and each
    component holds all channels."""

    degree: int
    parity: int
    channels: int

    def __str__(self) -> str:
        return f"{self.channels}x{self.degree}{'e' if self.parity == 1 else 'o'}"

    @property
    def size(self) -> int:
        """Components of a channel."""
        return 2 * self.degree + 1

    @property
    def invariant(self) -> bool:
        """True for scalars that keep their sign in a reflection."""
        return (self.degree, self.parity) == (0, 1)

    def shared(self, heads: int) -> Irrep:
        """The channels of a head."""
        return self._replace(channels=-(-self.channels // heads))


def split_rows(
    x: Float[Tensor, "*nodes dim"], irreps: Sequence[Irrep]
) -> list[Float[Tensor, "*nodes components channels"]]:
    """Split rows into the components and channels of each irrep."""
    blocks = zip(x.split([irrep.size * irrep.channels for irrep in irreps], -1), irreps, strict=True)
    return [block.unflatten(-1, (irrep.size, irrep.channels)) for block, irrep in blocks]


def gaunt_coupling(first: int, second: int, out: int) -> Float[Tensor, "2*first+1 2*second+1 2*out+1"]:
    """The invariant product of three degrees, with norm 1, which is unique. The sum of the degrees must be even and at
    most 5.

    It is the mean over the sphere of products of three harmonics. For these degrees the mean over the corners of an
    icosahedron is the same.
    """
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0.0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    points = torch.cat([torch.tensor(corners, dtype=torch.float64).roll(n, 1) for n in range(3)])
    harmonics = solid_harmonics(points / math.hypot(1, golden), max(first, second, out))
    mean = torch.einsum("ma,mb,mc->abc", *(harmonics[:, n**2 : (n + 1) ** 2] for n in (first, second, out)))
    return mean / mean.norm()


def _couplings(
    rows_in: tuple[Irrep, ...], rows_out: tuple[Irrep, ...], paths: Sequence[tuple[int, int, int]], coupling: Coupling
) -> tuple[Float[Tensor, "harmonics pairs"], ...]:
    """A float64 matrix for each path, from components of harmonics to pairs of components of input and output."""
    tables = []
    for a, degree, b in paths:
        exact = coupling(rows_in[a].degree, degree, rows_out[b].degree).to(torch.float64) * math.sqrt(rows_out[b].size)
        tables.append(exact.permute(1, 0, 2).reshape(2 * degree + 1, -1).contiguous())
    return tuple(tables)


class HarmonicProduct(nn.Module):
    r"""A bilinear, equivariant map of features and solid harmonics: products of both, with learned weights.

    .. math:: \mathrm{out}^{c'}_{m'} = \sum_{\text{paths}} \sum_{c, m, n} w_{c c'}\,
        \sqrt{2 l'' + 1}\, C_{m n m'}\, x^c_m\, Y_n

    A path couples the degree of a feature x, the degree of harmonics Y up to ``lmax`` and the degree :math:`l''` of an
    output, with a coupling C of norm 1. Each head has its own weights w, which mix channels c and c'.
    """

    def __init__(
        self, rows_in: Sequence[Irrep], rows_out: Sequence[Irrep], lmax: int, heads: int, coupling: Coupling
    ) -> None:
        super().__init__()
        self.rows_in, self.rows_out = tuple(rows_in), tuple(rows_out)
        self.paths = tuple(
            (a, degree, b)
            for a, first in enumerate(rows_in)
            for degree in range(lmax + 1)
            for b, out in enumerate(rows_out)
            if abs(first.degree - degree) <= out.degree <= first.degree + degree
            and first.parity * (-1) ** degree == out.parity
        )
        self.couplings = Tables(functools.partial(_couplings, self.rows_in, self.rows_out, self.paths, coupling))
        self.weights = nn.ParameterList(
            torch.empty(heads, rows_in[a].channels, rows_out[b].channels) for a, _, b in self.paths
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, with the variance that keeps the variance of features."""
        for (_, _, b), weight in zip(self.paths, self.weights, strict=True):
            into = sum(self.rows_in[a].channels for a, _, other in self.paths if other == b)
            nn.init.normal_(weight, std=into**-0.5)

    def forward(self, like: Tensor) -> Product:
        """The product, with tables of the dtype and device of a tensor."""
        tables = self.couplings(like.device, like.dtype)
        return Product(_products, (self.rows_in, self.rows_out, self.paths, tables, tuple(self.weights)))


def _products(
    features: Float[Tensor, "*#nodes heads channels"], harmonics: Float[Tensor, "*#nodes 1 components"] | None,
    degree: int, rows_in: Sequence[Irrep], rows_out: Sequence[Irrep], every: Sequence[tuple[int, int, int]],
    couplings: Sequence[Tensor], weights: Sequence[Tensor],
) -> Float[Tensor, "*nodes heads out"]:  # fmt: skip
    """Products of features with harmonics of one degree, or, without harmonics, of features (..., heads, 2 l + 1,
    channels) that have been multiplied by each of them."""
    each = split_rows(features, rows_in)
    if harmonics is None:
        shape, each = features.shape[:-2], [x.flatten(-3, -2) for x in each]
    else:
        shape = torch.broadcast_shapes(features.shape[:-1], harmonics.shape[:-1])
    out = []
    for b, irrep in enumerate(rows_out):
        paths = [(n, path[0]) for n, path in enumerate(every) if path[1:] == (degree, b)]
        terms = [_product(each[a], harmonics, couplings[n], irrep.size, weights[n]) for n, a in paths]
        found = sum(terms[1:], terms[0]).flatten(-2) if terms else features.new_zeros(irrep.size * irrep.channels)
        out.append(found.expand(*shape, -1))
    return torch.cat(out, -1)


def _product(
    x: Float[Tensor, "*#nodes heads components_in channels"], harmonics: Float[Tensor, "*#nodes 1 components"] | None,
    coupling: Float[Tensor, "components pairs"], wide: int, weight: Float[Tensor, "heads channels channels_out"],
) -> Float[Tensor, "*nodes heads wide channels_out"]:  # fmt: skip
    """Features times harmonics, with channels mixed by a weight, to ``wide`` components."""
    size = x.shape[-2]
    if harmonics is None:
        matrix = coupling.view(size, wide).mT
    else:
        matrix = (harmonics[..., None] * coupling).sum(-2).unflatten(-1, (size, wide)).mT
    if size < wide:  # mix the channels of fewer components
        return _apply(matrix, _mix(x, weight))
    return _mix(_apply(matrix, x), weight)


def _apply(
    matrix: Float[Tensor, "*#nodes 1 wide components"], x: Float[Tensor, "*#nodes heads components channels"]
) -> Float[Tensor, "*nodes heads wide channels"]:
    """Matrices times the components of features."""
    if x.shape[-2] == 1:
        return matrix * x
    if matrix.shape[-2] == 1:
        return (matrix.mT * x).sum(-2, keepdim=True)
    return matrix @ x


def _mix(
    x: Float[Tensor, "*#nodes heads components channels"], weight: Float[Tensor, "heads channels out"]
) -> Float[Tensor, "*nodes heads components out"]:
    """Channels mixed by a matrix for each head."""
    if weight.shape[0] == 1:
        return x @ weight[0]
    by_head = x.movedim(-3, 0)
    return torch.bmm(by_head.flatten(1, -2), weight).unflatten(1, by_head.shape[1:-1]).movedim(0, -3)
