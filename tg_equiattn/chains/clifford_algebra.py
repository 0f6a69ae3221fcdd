"""The geometric algebra Cl(3,0).

The components of a multivector are 1; e1, e2, e3; e23, e31, e12; e123. They have grade 0 (a scalar, 0e), 1 (a polar
vector, 1o), 2 (a bivector, stored as the axial vector that it is dual to, 1e) and 3 (a pseudoscalar, 0o). The product
of grades i and k has parts in some of the grades j. There are twenty such grade paths (i, k -> j).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import Float, Int
from ..torch_state import is_traced

GRADE_SIZES = (1, 3, 3, 1)
GRADE_OF = (0, 1, 1, 1, 2, 2, 2, 3)  # grade of each component
COMPONENTS = 8
_FEW_NUMBERS = 1 << 12  # components that a CPU multiplies in the time of a call of an operation
EPS = 1e-12  # added to squared norms, so that derivatives are finite at zero
_BLADES = (0b000, 0b001, 0b010, 0b100, 0b110, 0b101, 0b011, 0b111)  # bit n: component is a product with e_(n+1)
_ORIENTATION = (1, 1, 1, 1, 1, -1, 1, 1)  # e31 = -e1 e3


def _sign(i: int, k: int) -> int:
    """Sign of the product of components i and k. Each vector of i swaps with all smaller vectors of k, and each swap
    changes the sign."""
    a, b = _BLADES[i], _BLADES[k]
    swaps = sum(((a >> n) & b).bit_count() for n in (1, 2))
    return (-1) ** swaps * _ORIENTATION[i] * _ORIENTATION[k] * _ORIENTATION[_BLADES.index(a ^ b)]


# For output component j and left component i: the right component k, and the sign, of (i, k -> j).
RIGHT = [[_BLADES.index(a ^ j) for a in _BLADES] for j in _BLADES]
SIGNS = [[_sign(i, k) for i, k in enumerate(row)] for row in RIGHT]


PATHS = tuple(
    sorted({(GRADE_OF[i], GRADE_OF[RIGHT[j][i]], GRADE_OF[j]) for j in range(COMPONENTS) for i in range(COMPONENTS)})
)


def _sign_of(i: int, k: int, j: int) -> int:
    """Sign of e1 e2 -> e3 in cross products, and of the first components in other products."""
    second = _FIRST[k] + (GRADE_SIZES[i] == GRADE_SIZES[k] == GRADE_SIZES[j] == 3)
    return SIGNS[_BLADES.index(_BLADES[_FIRST[i]] ^ _BLADES[second])][_FIRST[i]]


_FIRST = (0, 1, 4, 7)  # the first component of each grade


def grades_of_products(grades: Iterable[int]) -> list[int]:
    """The grades that occur in products of multivectors of some grades."""
    return sorted({j for i, k, j in PATHS if {i, k} <= set(grades)})


def cross_product(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """The cross product along an axis. ``torch.linalg.cross`` is one operation, but on a CPU it takes up to eight times
    as long for many numbers."""
    if not is_traced(a) and (a.device.type != "cpu" or 0 < a.numel() <= _FEW_NUMBERS):
        return torch.linalg.cross(a, b, dim=dim)
    u, v = a.unbind(dim), b.unbind(dim)
    return torch.stack([torch.addcmul(u[x] * v[y], u[y], v[x], value=-1) for x, y in ((1, 2), (2, 0), (0, 1))], dim)


def _add(sums: dict[int, Tensor], grade: int, sign: int, product: Tensor, weight: Tensor) -> None:
    if grade in sums:
        sums[grade] = torch.addcmul(sums[grade], product, weight, value=sign)
    else:
        sums[grade] = product * (weight if sign > 0 else -weight)


def _add_product(
    sums: dict[int, Tensor], path: tuple[int, int, int], a: Float[Tensor, "left channels tokens"],
    b: Float[Tensor, "right channels tokens"], weight: Float[Tensor, "channels 1"],
) -> None:  # fmt: skip
    """Add the weighted product of two grades: a product with a number, a dot product, or a cross product. If one grade
    is a number, the weight multiplies it, since it has the fewest components."""
    i, k, j = path
    sign = _sign_of(i, k, j)
    if GRADE_SIZES[i] == 1:
        _add(sums, j, sign, b, a * weight)
    elif GRADE_SIZES[k] == 1:
        _add(sums, j, sign, a, b * weight)
    else:
        product = cross_product(a, b, 0) if GRADE_SIZES[j] == 3 else (a * b).sum(0, keepdim=True)
        _add(sums, j, sign, product, weight)


def channelwise_product(
    weight: Float[Tensor, "20 channels"], x: Float[Tensor, "left channels tokens"],
    y: Float[Tensor, "left channels tokens"], grades: Sequence[int],
) -> Float[Tensor, "out channels tokens"]:  # fmt: skip
    """Weighted geometric products of multivectors with the components of some ``grades``, channel by channel.
    ``weight`` holds a number for each grade path and channel."""
    sums: dict[int, Tensor] = {}
    left, right = (z.split_with_sizes(component_counts(grades)) for z in (x, y))
    for weights, (i, k, j) in zip(weight[..., None].unbind(), PATHS, strict=True):
        if i in grades and k in grades:
            _add_product(sums, (i, k, j), left[i], right[k], weights)
    return torch.cat([sums[j] for j in sorted(sums)])


def component_counts(grades: Sequence[int]) -> list[int]:
    """The number of components of each of the four grades, 0 for those that are not among ``grades``."""
    return [size if grade in grades else 0 for grade, size in enumerate(GRADE_SIZES)]


class ProductTables(NamedTuple):
    """Tables for multivectors of some grades as one tensor (components, channels, tokens).

    A *pair* below is a component of a product with a component of the left factor. It determines the component of the
    right factor, which is absent if its grade is.

    Attributes:
        present: the grades.
        grade: grade of each component.
        position: position of that grade in ``present``.
        place: position of each component among the components of a product.
        right: position of the right component of each pair; 0 if it is absent.
        signs: sign of each pair in the column of its grade path; 0 if its right component is absent.
        one: the number 1.
        scalar: 1 for the component of grade 0, 0 for others.
        eps: what is added to the square of each component, :data:`EPS` for each grade.
        eps_out: the same for components of products, twice as much for all together.
    """

    present: Int[Tensor, " grades"]
    grade: Int[Tensor, " components"]
    position: Int[Tensor, " components"]
    place: Int[Tensor, " components"]
    right: Int[Tensor, " pairs"]
    signs: Float[Tensor, "pairs 20"]
    one: Float[Tensor, ""]
    scalar: Float[Tensor, "components 1 1"]
    eps: Float[Tensor, "components 1 1"]
    eps_out: Float[Tensor, ""]


def product_tables(grades: tuple[int, ...]) -> ProductTables:
    left, out = ([n for n in range(COMPONENTS) if GRADE_OF[n] in kept] for kept in (grades, grades_of_products(grades)))
    pairs, grade = [(j, i, RIGHT[j][i]) for j in out for i in left], [GRADE_OF[n] for n in left]
    eye = torch.eye(len(PATHS), dtype=torch.float64)
    return ProductTables(
        present=torch.tensor(grades),
        grade=torch.tensor(grade),
        position=torch.tensor([grades.index(g) for g in grade]),
        place=torch.tensor([out.index(n) for n in left]),
        right=torch.tensor([left.index(k) if k in left else 0 for *_, k in pairs]),
        signs=torch.stack(
            [SIGNS[j][i] * (k in left) * eye[PATHS.index((GRADE_OF[i], GRADE_OF[k], GRADE_OF[j]))] for j, i, k in pairs]
        ),
        one=torch.ones((), dtype=torch.float64),
        scalar=torch.tensor([float(g == 0) for g in grade], dtype=torch.float64)[:, None, None],
        eps=torch.tensor([EPS / GRADE_SIZES[g] for g in grade], dtype=torch.float64)[:, None, None],
        eps_out=torch.tensor(2 * EPS / len(out), dtype=torch.float64),
    )


def channelwise_product_of_components(
    weight: Float[Tensor, "20 channels"], x: Float[Tensor, "left channels tokens"],
    y: Float[Tensor, "left channels tokens"], tables: ProductTables,
) -> Float[Tensor, "out channels tokens"]:  # fmt: skip
    """:func:`channelwise_product` in five operations, which form up to 64 numbers for each channel and token.

    It is faster for few channels and tokens, for which calls of operations take most of the time.
    """
    pairs = -1, len(x)
    weights = (tables.signs @ weight).view(*pairs, x.shape[1], 1)
    return (weights * y.index_select(0, tables.right).unflatten(0, pairs) * x).sum(1)
