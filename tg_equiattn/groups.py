"""Finite subgroups of O(2) and O(3) as matrices and a Cayley table, and their products with scales."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks

__all__ = [
    "FiniteGroup", "cyclic", "dihedral", "dyadic", "from_generators", "icosahedral", "mirror", "octahedral", "trivial"
]  # fmt: skip

_TOLERANCE = 1e-6


class _Elements:
    """What a finite group and its products with scales have in common."""

    matrices: Tensor

    @property
    def dim(self) -> int:
        """The dimension ``d`` of the space acted on."""
        return self.matrices.shape[-1]

    @property
    def order(self) -> int:
        """The number of elements."""
        return len(self.matrices)

    def __len__(self) -> int:
        return self.order

    @property
    def digest(self) -> str:
        """A digest of the elements, by which checkpoints of layers tell groups apart."""
        exact = (1e6 * self.matrices).round().to(torch.int64).flatten().tolist()
        return hashlib.sha256(repr(exact).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and torch.equal(self.matrices, other.matrices)

    def __hash__(self) -> int:
        return hash((self.order, self.dim))


class FiniteGroup(_Elements):
    r"""A finite group :math:`H \subset O(d)`, given by the orthogonal matrices of all its elements.

    Elements are indices ``0 ... |H|-1``. Floats are compared once, at construction, to fill the Cayley table; after
    that only integer tables decide anything. Matrix entries within 1e-6 of an integer are made exactly that integer, so
    lattice elements (multiples of 90 degrees, axis flips) are exact, from float32 cosines too.

    Args:
        matrices: the elements, ``(|H|, d, d)`` with ``d`` 2 or 3, in any order, identity included.
        name: shown in ``repr``.

    Attributes:
        matrices: ``(|H|, d, d)`` float64.
        cayley: ``(|H|, |H|)`` int64, ``cayley[a, b]`` the index of :math:`a \cdot b`.
        inverse: ``(|H|,)`` int64.
        identity: index of the identity.
        lattice: ``(|H|,)`` bool, whether the element maps the integer grid onto itself.

    Raises:
        ValueError: if the matrices are not orthogonal, repeat, or are not closed under products and inverses.

    Example:
        >>> from tg_equiattn.groups import cyclic
        >>> c4 = cyclic(4)
        >>> int(c4.cayley[1, 3]) == c4.identity, len(c4)
        (True, 4)
    """

    def __init__(self, matrices: Tensor | Sequence, name: str = "FiniteGroup") -> None:
        matrices = torch.as_tensor(matrices, dtype=torch.float64, device="cpu").clone()
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.shape[1] not in (2, 3):
            raise ValueError(f"matrices must have shape (|H|, 2, 2) or (|H|, 3, 3), got {tuple(matrices.shape)}")
        if len(matrices) == 0:
            raise ValueError("matrices must hold at least the identity, got none")
        self.matrices, self.name = _snap(matrices), name
        if int(_matches(self.matrices, self.matrices).sum()) != len(matrices):
            raise ValueError("matrices must be distinct, got the same element twice")
        hits = _matches(self.matrices[:, None] @ self.matrices, self.matrices)
        if not bool((hits.sum(-1) == 1).all()):
            a, b = (hits.sum(-1) != 1).nonzero()[0].tolist()
            raise ValueError(f"matrices must be closed under products, got none equal to element {a} times element {b}")
        self.cayley = table = hits.int().argmax(-1)
        self.lattice = (self.matrices == self.matrices.round()).flatten(1).all(1)
        every = torch.arange(len(table), device="cpu")
        neutral = (table == every).all(1) & (table == every[:, None]).all(0)
        self.identity = int(neutral.int().argmax())
        inverse = table == self.identity
        self.inverse = inverse.int().argmax(1)
        associative = torch.equal(table[table[:, :, None], every], table[every[:, None, None], table[None]])
        if not associative or not bool(neutral.any()) or not bool((inverse.sum(1) == 1).all()):
            raise ValueError("matrices must be a group, got products without identity, inverses or associativity")

    @property
    def isometries(self) -> FiniteGroup:
        """The elements that keep lengths: all of them."""
        return self

    def moved(self, element: int) -> Tensor:
        """``(|H|,)`` indices of :math:`g^{-1} k`: regular features f moved by g are f(g^-1 k) at k."""
        return self.cayley[self.inverse[element]]

    def __repr__(self) -> str:
        return f"{self.name}(order={self.order}, dim={self.dim})"


class DilationGroup(_Elements):
    r"""Dilations by 1, 2, 4, ... :math:`2^{J-1}`, each with all elements of a finite group.

    .. math:: H = \{2^j m : 0 \le j < J,\; m \in M\}, \qquad M \subset O(d) \text{ finite}

    J scales of the group of all dilations, which is not compact: the first and the last one see fewer scales than the
    others, as pixels at a border see fewer pixels. Elements are indices :math:`j |M| + m`. Made by :func:`dyadic`.

    Source: GSA-Nets App. E; Worrall & Welling (2019) for scales that are powers of two.
    """

    def __init__(self, scales: int, isometries: FiniteGroup) -> None:
        checks.positive(scales=scales)
        if not isinstance(isometries, FiniteGroup):
            raise ValueError(f"isometries must be a tg_equiattn.groups.FiniteGroup, got {isometries!r}")
        self.scales, self.isometries = scales, isometries
        self.matrices = torch.cat([2.0**j * isometries.matrices for j in range(scales)])
        first = torch.arange(len(self.matrices), device="cpu") < isometries.order
        self.lattice = first & isometries.lattice.repeat(scales)
        self.identity = isometries.identity

    def moved(self, element: int) -> Tensor:
        if not 0 <= element < self.isometries.order:
            raise ValueError(f"element must be an isometry, one of the first {self.isometries.order}, got {element}")
        scales = self.isometries.order * torch.arange(self.scales, device="cpu")
        return (scales[:, None] + self.isometries.moved(element)).flatten()

    def __repr__(self) -> str:
        return f"dyadic({self.scales}, {self.isometries!r})"


@checks.python_numbers
def dyadic(scales: int, isometries: FiniteGroup | None = None) -> DilationGroup:
    """The dilations by 1, 2, 4, ... of ``scales`` scales, times a finite group (``None``: the plane's trivial one).

    Example:
        >>> dyadic(3, cyclic(4))
        dyadic(3, C4(order=4, dim=2))
    """
    return DilationGroup(scales, trivial() if isometries is None else isometries)


def check_group(group: FiniteGroup | DilationGroup, scales: bool = False) -> None:
    """Raise ValueError unless ``group`` is a FiniteGroup or, where ``scales`` may be, a DilationGroup."""
    if isinstance(group, DilationGroup) and not scales:
        raise ValueError(f"group must be finite, without scales, got {group!r}")
    if not isinstance(group, (FiniteGroup, DilationGroup)):
        raise ValueError(f"group must be a tg_equiattn.groups.FiniteGroup, got {type(group).__name__}")


def _snap(matrices: Tensor) -> Tensor:
    """Orthogonal matrices, with what is almost an integer made one."""
    deviation = (matrices @ matrices.mT - torch.eye(matrices.shape[-1], dtype=matrices.dtype, device="cpu")).abs().max()
    if not deviation <= _TOLERANCE:
        raise ValueError(f"matrices must be orthogonal, got one with |M M^T - 1| = {deviation:.3g}")
    rounded = matrices.round()
    return torch.where((matrices - rounded).abs() < _TOLERANCE, rounded, matrices) + 0.0  # no negative zeros


def _matches(candidates: Tensor, elements: Tensor) -> Tensor:
    """Which elements each candidate is, (..., |H|)."""
    return (candidates[..., None, :, :] - elements).abs().amax((-1, -2)) < 1e-4


def trivial(dim: int = 2) -> FiniteGroup:
    """The identity alone in ``dim`` (2 or 3) dimensions: translation equivariance only."""
    if dim not in (2, 3):
        raise ValueError(f"dim must be 2 or 3, got {dim!r}")
    return FiniteGroup(torch.eye(dim, dtype=torch.float64, device="cpu")[None], name="trivial")


def mirror(dim: int = 2) -> FiniteGroup:
    """The reflection x -> -x (left-right in an image) and the identity."""
    flip = torch.eye(trivial(dim).dim, dtype=torch.float64, device="cpu")
    flip[0, 0] = -1
    return FiniteGroup(torch.stack([flip.abs(), flip]), name="mirror")


@checks.python_numbers
def cyclic(n: int) -> FiniteGroup:
    r"""The ``n`` rotations of the plane by multiples of :math:`2\pi/n`, counter-clockwise."""
    checks.positive(n=n)
    turns = [(math.cos(angle), math.sin(angle)) for angle in (2 * math.pi * i / n for i in range(n))]
    return FiniteGroup([[[c, -s], [s, c]] for c, s in turns], f"C{n}")


@checks.python_numbers
def dihedral(n: int) -> FiniteGroup:
    """``n`` rotations of the plane, then each of them after the reflection x -> -x: ``2 n`` elements."""
    rotations = cyclic(n).matrices
    return FiniteGroup(torch.cat([rotations, rotations @ mirror().matrices[1]]), f"D{n}")


def octahedral(reflections: bool = False) -> FiniteGroup:
    """The 24 rotations of the cube; with ``reflections`` all its 48 symmetries."""
    quarter_z = [[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]
    quarter_x = [[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]
    rotations = from_generators([quarter_z, quarter_x], name="octahedral")
    if not reflections:
        return rotations
    return FiniteGroup(torch.cat([rotations.matrices, -rotations.matrices]), "octahedral with reflections")


def icosahedral() -> FiniteGroup:
    """The 60 rotations of the icosahedron with vertices at the cyclic permutations of (0, +-1, +-golden)."""
    golden = (1 + math.sqrt(5)) / 2
    a, b = golden / 2, (golden - 1) / 2
    fifth = [[0.5, -a, b], [a, b, -0.5], [b, 0.5, a]]
    third = [[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]
    return from_generators([fifth, third], name="icosahedral")


def from_generators(matrices: Tensor | Sequence, *, max_order: int = 200, name: str = "FiniteGroup") -> FiniteGroup:
    """The smallest group that holds the given orthogonal matrices, ``(n, d, d)``; ValueError if one is not orthogonal
    or they do not close within ``max_order`` elements."""
    generators = torch.as_tensor(matrices, dtype=torch.float64, device="cpu")
    if generators.ndim != 3 or generators.shape[-1] != generators.shape[-2]:
        raise ValueError(f"matrices must have shape (n, d, d), got {tuple(generators.shape)}")
    generators = _snap(generators)
    elements = frontier = torch.eye(generators.shape[-1], dtype=torch.float64, device="cpu")[None]
    while len(frontier):
        before = len(elements)
        for product in (generators[:, None] @ frontier[None]).flatten(0, 1):
            if not _matches(product, elements).any():
                elements = torch.cat([elements, _snap(product[None])])
        frontier = elements[before:]
        if len(elements) > max_order:
            raise ValueError(f"matrices must generate at most max_order={max_order} elements, got more")
    return FiniteGroup(elements, name=name)
