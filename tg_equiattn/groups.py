"""Finite subgroups of O(2) and O(3) as matrices and a Cayley table, and their products with scales."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from . import checks

__all__ = [
    "FiniteGroup", "cyclic", "dihedral", "dyadic", "from_generators", "icosahedral", "mirror", "octahedral", "trivial"
]  # fmt: skip

_TOLERANCE = 1e-6
_LARGEST = 200  # elements of a group from generators


class _Elements:
    """Base class of finite groups and their products with scales, made from the matrices of all elements."""

    def __init__(self, matrices: Tensor) -> None:
        self.matrices, self.order, self.dim = matrices, len(matrices), matrices.shape[-1]

    def __len__(self) -> int:
        return self.order

    @property
    def digest(self) -> str:
        """A hash of the elements, with which checkpoints of layers identify their group."""
        exact = (1e6 * self.matrices).round().to(torch.int64).flatten().tolist()
        return hashlib.sha256(repr(exact).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and torch.equal(self.matrices, other.matrices)

    def __hash__(self) -> int:
        return hash((self.order, self.dim))


class FiniteGroup(_Elements):
    r"""A finite group :math:`H \subset O(d)`, given by the orthogonal matrices of all its elements.

    Elements are indices ``0 ... |H|-1``. Matrices are compared as floats only once, at construction, to fill the Cayley
    table; everything else uses integer tables. Matrix entries within 1e-6 of an integer are rounded to it, so that
    lattice elements (multiples of 90 degrees, axis flips) are exact, also if they were computed in float32.

    Args:
        matrices: The elements, ``(|H|, d, d)`` with ``d`` 2 or 3, in any order, including the identity.
        name: Name that ``repr`` shows. The default is ``"FiniteGroup"``.

    Attributes:
        matrices: Elements, ``(|H|, d, d)`` float64.
        order: The number of elements.
        dim: The dimension ``d`` of the space that the group acts on.
        cayley: Cayley table, ``(|H|, |H|)`` int64: ``cayley[a, b]`` is the index of :math:`a \cdot b`.
        inverse: Indices of the inverses, ``(|H|,)`` int64.
        identity: Index of the identity.
        lattice: ``(|H|,)`` bool, true if the element maps the integer grid onto itself.

    Raises:
        ValueError: if ``matrices`` is empty or has another shape, if a matrix is not orthogonal or occurs twice, or if
            the matrices are not closed under products and inverses.

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
            raise ValueError("matrices must contain at least the identity, got none")
        super().__init__(_snap(matrices))
        self.name = name
        if int(_matches(self.matrices, self.matrices).sum()) != len(matrices):
            raise ValueError("matrices must be distinct, got the same element twice; remove duplicates")
        hits = _matches(self.matrices[:, None] @ self.matrices, self.matrices)
        if not bool((hits.sum(-1) == 1).all()):
            a, b = (hits.sum(-1) != 1).nonzero()[0].tolist()
            raise ValueError(
                f"matrices must be closed under products, got none equal to element {a} times element {b}; "
                "from_generators completes a group"
            )
        self.cayley = table = hits.int().argmax(-1)
        self.lattice = (self.matrices == self.matrices.round()).flatten(1).all(1)
        every = torch.arange(len(table), device="cpu")
        neutral = (table == every).all(1) & (table == every[:, None]).all(0)
        self.identity = int(neutral.int().argmax())
        inverse = table == self.identity
        self.inverse = inverse.int().argmax(1)
        associative = torch.equal(table[table[:, :, None], every], table[every[:, None, None], table[None]])
        if not associative or not bool(neutral.any()) or not bool((inverse.sum(1) == 1).all()):
            raise ValueError("matrices must form a group, got products without identity, inverses or associativity")

    @property
    def isometries(self) -> FiniteGroup:
        """The elements that preserve lengths: the group itself."""
        return self

    def moved(self, element: int) -> Tensor:
        """Indices ``(|H|,)`` of :math:`g^{-1} k` for all elements k, where g is ``element``. They permute regular
        features: g moves f to f(g^-1 k) at k."""
        return self.cayley[self.inverse[element]]

    def __repr__(self) -> str:
        return f"{self.name}(order={self.order}, dim={self.dim})"


class DilationGroup(_Elements):
    r"""Dilations by 1, 2, 4, ... :math:`2^{J-1}`, each with all elements of a finite group.

    .. math:: H = \{2^j m : 0 \le j < J,\; m \in M\}, \qquad M \subset O(d) \text{ finite}

    This is a part of the group of all dilations, cut off at J scales. The first and last scale therefore have fewer
    neighboring scales, as pixels at a border have fewer neighbors. Elements are indices :math:`j |M| + m`. Use
    :func:`dyadic` to make one.

    Args:
        scales: Number of scales J, positive.
        isometries: The finite group M.

    Attributes:
        matrices: Elements, ``(J |M|, d, d)`` float64.
        order: The number of elements.
        dim: The dimension ``d`` of the space that the group acts on.
        identity: Index of the identity.
        lattice: ``(J |M|,)`` bool, true if the element maps the integer grid onto itself; false for all scales but the
            first.

    Raises:
        ValueError: if ``scales`` is not a positive integer, or if ``isometries`` is not a finite group.

    Source: GSA-Nets App. E; Worrall & Welling (2019) for scales that are powers of two.
    """

    def __init__(self, scales: int, isometries: FiniteGroup) -> None:
        self.scales, self.isometries = scales, isometries
        super().__init__(torch.cat([2.0**j * isometries.matrices for j in range(scales)]))
        first = torch.arange(len(self.matrices), device="cpu") < isometries.order
        self.lattice = first & isometries.lattice.repeat(scales)
        self.identity = isometries.identity

    def moved(self, element: int) -> Tensor:
        """Indices ``(J |M|,)`` of :math:`g^{-1} k` for all elements k, where g is the isometry ``element``."""
        if not 0 <= element < self.isometries.order:
            raise ValueError(
                f"element must be an isometry, one of the first {self.isometries.order}, got {element}; use "
                "tg_equiattn.testing.dilation_errors for scales"
            )
        scales = self.isometries.order * torch.arange(self.scales, device="cpu")
        return (scales[:, None] + self.isometries.moved(element)).flatten()

    def __repr__(self) -> str:
        return f"dyadic({self.scales}, {self.isometries!r})"


# annotations of arguments
_MADE = "made by cyclic, dihedral or another function of tg_equiattn.groups"
_FINITE = f"{_MADE} (for scales of dyadic: ScaleLiftingAttention, ScaleGroupAttention)"
Group = Annotated[FiniteGroup, checks.Kind(f"a finite group, {_FINITE}", lambda x: isinstance(x, FiniteGroup))]
Scales = Annotated[DilationGroup, checks.Kind("scales, made by dyadic", lambda x: isinstance(x, DilationGroup))]
AnyGroup = Annotated[
    FiniteGroup | DilationGroup,
    checks.Kind(f"a finite group or scales, {_MADE}", lambda x: isinstance(x, FiniteGroup | DilationGroup)),
]


@checks.arguments
def dyadic(scales: checks.Count, isometries: Group | None = None) -> DilationGroup:
    """Dilations by 1, 2, 4, ..., each combined with all elements of a finite group.

    Args:
        scales: Number of scales, positive.
        isometries: The finite group. ``None`` means the trivial group of the plane, so scales only.

    Raises:
        ValueError: if ``scales`` is not a positive integer, or if ``isometries`` is not a finite group.

    Example:
        >>> dyadic(3, cyclic(4))
        dyadic(3, C4(order=4, dim=2))
    """
    return DilationGroup(scales, trivial() if isometries is None else isometries)


def _snap(matrices: Tensor) -> Tensor:
    """Check that matrices are orthogonal, and round entries that are close to an integer."""
    deviation = (matrices @ matrices.mT - torch.eye(matrices.shape[-1], dtype=matrices.dtype, device="cpu")).abs().max()
    if not deviation <= _TOLERANCE:
        raise ValueError(f"matrices must be orthogonal, got one with |M M^T - 1| = {deviation:.3g}")
    rounded = matrices.round()
    return torch.where((matrices - rounded).abs() < _TOLERANCE, rounded, matrices) + 0.0  # no negative zeros


def _matches(candidates: Tensor, elements: Tensor) -> Tensor:
    """Compare each candidate (..., d, d) with each element (|H|, d, d): bool (..., |H|)."""
    return (candidates[..., None, :, :] - elements).abs().amax((-1, -2)) < 1e-4


def trivial(dim: int = 2) -> FiniteGroup:
    """The group of the identity only. Layers with it are equivariant to translations only.

    Args:
        dim: Dimension of the space, 2 or 3. The default is 2.

    Raises:
        ValueError: if ``dim`` is not 2 or 3.
    """
    if dim not in (2, 3):
        raise ValueError(f"dim must be 2 or 3, got {dim!r}")
    return FiniteGroup(torch.eye(dim, dtype=torch.float64, device="cpu")[None], name="trivial")


def mirror(dim: int = 2) -> FiniteGroup:
    """The group of the identity and the reflection x -> -x, which exchanges left and right in an image.

    Args:
        dim: Dimension of the space, 2 or 3. The default is 2.

    Raises:
        ValueError: if ``dim`` is not 2 or 3.
    """
    flip = torch.eye(trivial(dim).dim, dtype=torch.float64, device="cpu")
    flip[0, 0] = -1
    return FiniteGroup(torch.stack([flip.abs(), flip]), name="mirror")


@checks.arguments
def cyclic(n: checks.Count) -> FiniteGroup:
    r"""The rotations of the plane by multiples of :math:`2\pi/n`, counter-clockwise.

    Args:
        n: Number of rotations, positive. For n = 1, 2 and 4 all elements map the pixel grid to itself.

    Raises:
        ValueError: if ``n`` is not a positive integer.
    """
    rotations = [(math.cos(angle), math.sin(angle)) for angle in (2 * math.pi * i / n for i in range(n))]
    return FiniteGroup([[[c, -s], [s, c]] for c, s in rotations], f"C{n}")


@checks.arguments
def dihedral(n: checks.Count) -> FiniteGroup:
    """The dihedral group of the plane: ``n`` rotations, followed by each rotation after the reflection x -> -x.

    Args:
        n: Number of rotations, positive; the group has ``2 n`` elements. For n = 1, 2 and 4 all elements map the pixel
            grid to itself.

    Raises:
        ValueError: if ``n`` is not a positive integer.
    """
    rotations = cyclic(n).matrices
    return FiniteGroup(torch.cat([rotations, rotations @ mirror().matrices[1]]), f"D{n}")


@checks.arguments
def octahedral(reflections: bool = False) -> FiniteGroup:
    """The symmetries of the cube, all of which map the voxel grid to itself.

    Args:
        reflections: Whether to include reflections. The default ``False`` gives the 24 rotations, ``True`` all 48
            symmetries.
    """
    quarter_z = [[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]
    quarter_x = [[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]
    rotations = from_generators([quarter_z, quarter_x], name="octahedral")
    if not reflections:
        return rotations
    return FiniteGroup(torch.cat([rotations.matrices, -rotations.matrices]), "octahedral with reflections")


def icosahedral() -> FiniteGroup:
    """The 60 rotations of the icosahedron whose vertices are the cyclic permutations of (0, +-1, +-golden ratio)."""
    golden = (1 + math.sqrt(5)) / 2
    a, b = golden / 2, (golden - 1) / 2
    fifth = [[0.5, -a, b], [a, b, -0.5], [b, 0.5, a]]
    third = [[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]
    return from_generators([fifth, third], name="icosahedral")


def from_generators(matrices: Tensor | Sequence, *, name: str = "FiniteGroup") -> FiniteGroup:
    """The smallest finite group that contains the given orthogonal matrices.

    Args:
        matrices: The generators, ``(n, d, d)`` with ``d`` 2 or 3.
        name: Name that ``repr`` shows. The default is ``"FiniteGroup"``.

    Raises:
        ValueError: if ``matrices`` has another shape, if a matrix is not orthogonal, or if the group has more than 200
            elements.
    """
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
        if len(elements) > _LARGEST:
            raise ValueError(
                f"matrices must generate at most {_LARGEST} elements, got more; check that rotations are by fractions "
                "of a full rotation"
            )
    return FiniteGroup(elements, name=name)
