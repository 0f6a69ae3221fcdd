"""The geometric algebra Cl(3,0): components 1; e1, e2, e3; e23, e31, e12; e123, of grade 0 (a scalar, 0e), 1 (a polar
vector, 1o), 2 (a bivector, as the axial vector it is dual to, 1e) and 3 (a pseudoscalar, 0o). The product of grades i
and k has parts in some of the grades j: twenty grade paths (i, k -> j)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ..backend import use_plain

Components = tuple[Tensor, ...]
GRADE_SIZES = (1, 3, 3, 1)
GRADE_OF = (0, 1, 1, 1, 2, 2, 2, 3)  # of each component
COMPONENTS = 8
_BLADES = (0b000, 0b001, 0b010, 0b100, 0b110, 0b101, 0b011, 0b111)  # the vectors that each component multiplies
_ORIENTATION = (1, 1, 1, 1, 1, -1, 1, 1)  # e31 = -e1 e3


def _sign(i: int, k: int) -> int:
    """Sign of the product of components i and k: one swap for every vector of k that a larger one of i passes."""
    a, b = _BLADES[i], _BLADES[k]
    swaps = sum(((a >> n) & b).bit_count() for n in (1, 2))
    return (-1) ** swaps * _ORIENTATION[i] * _ORIENTATION[k] * _ORIENTATION[_BLADES.index(a ^ b)]


# For output component j and left component i: the right component k, and the sign, of (i, k -> j).
RIGHT = [[_BLADES.index(a ^ j) for a in _BLADES] for j in _BLADES]
SIGNS = [[_sign(i, k) for i, k in enumerate(row)] for row in RIGHT]


def geometric_product_definition(x: Tensor, y: Tensor) -> Tensor:
    """The product of multivectors (..., 8): the sum over i and k of Gamma[j, i, k] x_i y_k."""
    gamma = (
        F.one_hot(torch.tensor(RIGHT, device=x.device), COMPONENTS) * torch.tensor(SIGNS, device=x.device)[..., None]
    )
    return torch.einsum("jik,...i,...k->...j", gamma.to(x.dtype), x, y)


PATHS = tuple(
    sorted({(GRADE_OF[i], GRADE_OF[RIGHT[j][i]], GRADE_OF[j]) for j in range(COMPONENTS) for i in range(COMPONENTS)})
)

_Pair = tuple[int, int, int]  # components (j, i, k) of the product and its factors
_Group = tuple[int, int, list[_Pair]]


def _grouped(grades: Collection[int], position: int) -> list[_Group]:
    """The pairs of components of some grades, by one of their components and by path."""
    groups: dict[tuple[int, int], list[_Pair]] = {}
    for j, row in enumerate(RIGHT):
        for i, k in enumerate(row):
            path = GRADE_OF[i], GRADE_OF[k], GRADE_OF[j]
            if path[0] in grades and path[1] in grades:
                groups.setdefault(((j, i, k)[position], PATHS.index(path)), []).append((j, i, k))
    return [(component, path, pairs) for (component, path), pairs in sorted(groups.items())]


_GROUPS = {
    some: tuple(_grouped(some, position) for position in range(3))
    for count in range(1, 5)
    for some in itertools.combinations(range(4), count)
}
"""Groups for multivectors of some grades, by component of the product, of its left and of its right factor."""


def components(grades: Iterable[int]) -> list[int]:
    """Components of some grades, in order."""
    return [n for n, grade in enumerate(GRADE_OF) if grade in set(grades)]


def grades_of_products(grades: Iterable[int]) -> list[int]:
    """Grades of products of multivectors of some grades."""
    return sorted({j for i, k, j in PATHS if {i, k} <= set(grades)})


def _add(sums: dict[int, Tensor], key: int, a: Tensor, b: Tensor) -> None:
    sums[key] = torch.addcmul(sums[key], a, b) if key in sums else a * b


def _sum(products: Iterable[tuple[int, Tensor, Tensor]]) -> Tensor:
    """Sum of products with signs."""
    (sign, a, b), *others = products
    total = a * b if sign > 0 else -a * b
    for sign, a, b in others:
        total = torch.addcmul(total, a, b, value=sign)
    return total


def _products(grades: tuple[int, ...], weight: Tensor, x: Tensor, y: Sequence[Tensor]) -> Components:
    weights = weight[..., None].unbind()
    sums: dict[int, Tensor] = {}
    left, right = (dict(zip(components(grades), factor, strict=True)) for factor in (x.unbind(), y))
    for j, path, pairs in _GROUPS[grades][0]:
        _add(sums, j, _sum((SIGNS[j][i], left[i], right[k]) for j, i, k in pairs), weights[path])
    return tuple(sums[j] for j in sorted(sums))


def _summed(terms: list[Tensor] | Components) -> Tensor:
    """Sums (terms, C) over the tokens of terms (C, T). Compilers make one kernel for eight that are stacked."""
    if not torch.compiler.is_compiling():
        return torch.stack([term.sum(-1) for term in terms])
    return torch.cat([torch.stack(terms[n : n + 8]).sum(-1) for n in range(0, len(terms), 8)])


def _placed(rows: Tensor, indices: Sequence[int], count: int) -> Tensor:
    """Rows (rows, C) among zeros, (count, C)."""
    if len(indices) == count:
        return rows
    first, *others = (F.pad(row[None], (0, 0, n, count - 1 - n)) for n, row in zip(indices, rows, strict=True))
    return sum(others, first)


class _RowsForTokens(torch.autograd.Function):
    """Rows of parameters, expanded over tokens.

    Its own backward takes one sum over tokens for all parameters; autograd would take one for each.
    """

    @staticmethod
    def forward(ctx, *arguments) -> Components:  # all in one: dynamo (2.13) drops ctx where as many come as have names
        rows, tokens, *parameters = arguments
        ctx.rows, ctx.counts = rows, tuple(len(parameter) for parameter in parameters)
        every = (parameter[n] for parameter, some in zip(parameters, rows, strict=True) for n in some)
        return tuple(row[:, None].expand(-1, tokens.shape[-1]) for row in every)

    @staticmethod
    def backward(ctx, *grad: Tensor):
        sums = _summed(grad).split([len(some) for some in ctx.rows])
        return None, None, *(_placed(*which) for which in zip(sums, ctx.rows, ctx.counts, strict=True))


def rows_for_tokens(tokens: Tensor, *wanted: tuple[Tensor, Sequence[int]]) -> list[Components]:
    """Some rows of parameters (rows, C), as (C, T) for tokens (..., T); gradients of all are one sum."""
    parameters, rows = zip(*wanted, strict=True)
    if use_plain():
        return [tuple(parameter[n][:, None] for n in some) for parameter, some in wanted]
    found = iter(_RowsForTokens.apply(tuple(tuple(some) for some in rows), tokens, *parameters))
    return [tuple(next(found) for _ in some) for some in rows]


class _ChannelwiseProduct(torch.autograd.Function):
    """Products one component and path at a time, in expressions that compilers fuse.

    Its own backward saves the factors; autograd would save the products of all pairs of components.
    """

    @staticmethod
    def forward(ctx, *arguments) -> Components:  # all in one, as above
        grades, weight, x, *y = arguments
        ctx.grades = grades
        ctx.save_for_backward(weight, x, *y)
        return _products(grades, weight, x, y)

    @staticmethod
    def backward(ctx, *grad: Tensor):
        weight, x, *y = ctx.saved_tensors
        present, weights = components(ctx.grades), weight[..., None].unbind()
        of_x: dict[int, Tensor] = {}
        of_y: dict[int, Tensor] = {}
        of_path: dict[int, Tensor] = {}
        left, right = (dict(zip(present, factor, strict=True)) for factor in (x.unbind(), y))
        out = dict(zip(components(grades_of_products(ctx.grades)), grad, strict=True))
        _, by_left, by_right = _GROUPS[ctx.grades]
        for i, path, pairs in by_left:
            total = _sum((SIGNS[j][i], out[j], right[k]) for j, i, k in pairs)
            _add(of_x, i, total, weights[path])
            _add(of_path, path, total, left[i])
        for k, path, pairs in by_right:
            _add(of_y, k, _sum((SIGNS[j][i], out[j], left[i]) for j, i, k in pairs), weights[path])
        found = sorted(of_path)
        of_weight = _placed(_summed([of_path[n] for n in found]), found, len(PATHS))
        return None, of_weight, torch.stack([of_x[n] for n in present]), *(of_y[n] for n in present)


def channelwise_product(grades: Sequence[int], weight: Tensor, x: Tensor, y: Components) -> Components:
    """Products of multivectors that have some grades alone, with weights by grade path (20, C).

    Components that there are lie one after the other in ``x``, (components, C, T); those of ``y`` and of the product,
    whose grades are :func:`grades_of_products`, are (C, T) each.
    """
    grades = tuple(grades)
    return _products(grades, weight, x, y) if use_plain() else _ChannelwiseProduct.apply(grades, weight, x, *y)


def geometric_product(x: Tensor, y: Tensor) -> Tensor:
    r"""The geometric product of multivectors.

    .. math:: (x y)_j = \sum_{i, k} \Gamma^{j}_{ik}\, x_i\, y_k, \qquad \Gamma \in \{-1, 0, 1\}

    With x = s + v + I b + I p (I = e123, b the axial vector a bivector is dual to), it holds the products of scalars,
    dot products and cross products of vectors: for two polar vectors, v w = v.w + I (v x w).

    Args:
        x: left factors, with components (1; e1, e2, e3; e23, e31, e12; e123) on the last axis.
        y: right factors, with the same components.

    Shapes:
        ``(..., 8)`` each, broadcast against each other -> ``(..., 8)``.

    Raises:
        ValueError: if the last axis is not 8, or dtypes or devices differ.

    Source: se3-hyena section 3.2; Ruhe et al., Clifford Group Equivariant Neural Networks (2023).

    Example:
        >>> import torch
        >>> e1, e2 = torch.eye(8)[1], torch.eye(8)[2]
        >>> geometric_product(e1, e2)  # e12
        tensor([0., 0., 0., 0., 0., 0., 1., 0.])
        >>> geometric_product(e2, e1) + geometric_product(e1, e2)
        tensor([0., 0., 0., 0., 0., 0., 0., 0.])
    """
    for name, value in (("x", x), ("y", y)):
        if not value.ndim or value.shape[-1] != COMPONENTS:
            raise ValueError(f"{name} must have 8 components on the last axis, got shape {tuple(value.shape)}")
        if not value.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {value.dtype}")
        checks.half_precision(**{name: value})
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(f"y must be {x.dtype} on {x.device} as x is, got {y.dtype} on {y.device}")
    with full_precision(x.device):
        left, right = x.unbind(-1), y.unbind(-1)
        by_component = [[(SIGNS[j][i], left[i], right[k]) for i, k in enumerate(row)] for j, row in enumerate(RIGHT)]
        return torch.stack([_sum(products) for products in by_component], -1)
