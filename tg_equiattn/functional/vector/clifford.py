"""The geometric algebra Cl(3,0): components 1; e1, e2, e3; e23, e31, e12; e123, of grade 0 (a scalar, 0e), 1 (a polar
vector, 1o), 2 (a bivector, as the axial vector it is dual to, 1e) and 3 (a pseudoscalar, 0o). The product of grades i
and k has parts in some of the grades j: twenty grade paths (i, k -> j)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision, transformed
from ..backend import use_plain

Components = tuple[Tensor, ...]
GRADE_SIZES = (1, 3, 3, 1)
GRADE_OF = (0, 1, 1, 1, 2, 2, 2, 3)  # of each component
COMPONENTS = 8
_BLADES = ((), (1,), (2,), (3,), (2, 3), (3, 1), (1, 2), (1, 2, 3))


def _blade_product(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int]:
    """Component and sign of the product of two basis blades: swap factors into order, equal neighbors square to 1."""
    factors, sign = [*a, *b], 1
    place = 0
    while place < len(factors) - 1:
        if factors[place] == factors[place + 1]:
            del factors[place : place + 2]
            place = max(0, place - 1)
        elif factors[place] > factors[place + 1]:
            factors[place], factors[place + 1] = factors[place + 1], factors[place]
            sign, place = -sign, max(0, place - 1)
        else:
            place += 1
    for component, blade in enumerate(_BLADES):
        if tuple(sorted(blade)) == tuple(factors):
            return component, -sign if blade == (3, 1) else sign
    raise AssertionError("every product of blades is a blade")


def _blade_tables() -> tuple[list[list[int]], list[list[int]]]:
    """For output component j and left component i: the right component k, and the sign, of (i, k -> j)."""
    right = [[0] * COMPONENTS for _ in range(COMPONENTS)]
    signs = [[0] * COMPONENTS for _ in range(COMPONENTS)]
    for i in range(COMPONENTS):
        for k in range(COMPONENTS):
            j, sign = _blade_product(_BLADES[i], _BLADES[k])
            right[j][i], signs[j][i] = k, sign
    return right, signs


RIGHT, SIGNS = _blade_tables()
PATHS = tuple(
    sorted({(GRADE_OF[i], GRADE_OF[RIGHT[j][i]], GRADE_OF[j]) for j in range(COMPONENTS) for i in range(COMPONENTS)})
)
PATH_OF = [
    [PATHS.index((GRADE_OF[i], GRADE_OF[RIGHT[j][i]], GRADE_OF[j])) for i in range(COMPONENTS)]
    for j in range(COMPONENTS)
]


def _on_device(table: list[list[int]], device: torch.device) -> Tensor:
    """A table (8, 8) of numbers from 0 to 31, each row sent as one integer: a tensor would have to be copied there."""
    bits = 5 * torch.arange(COMPONENTS, device=device)
    rows = [sum(number << 5 * place for place, number in enumerate(row)) for row in table]
    return torch.stack([(torch.full_like(bits, row) >> bits) & 31 for row in rows])


def _make_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):  # may be asked for in evaluation first, and trained with later
        signs = _on_device([[sign + 1 for sign in row] for row in SIGNS], device) - 1
        return _on_device(RIGHT, device).flatten(), signs.to(dtype), _on_device(PATH_OF, device).flatten()


@functools.lru_cache(maxsize=32)
def product_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Right components (64,), signs (8, 8), and paths (64,), by output and left component; kept, and shared by all."""
    return _make_tables(device, dtype)


def _tables_like(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # dynamo warns of caches, and what is made under a transform is of no use after it
    make = _make_tables if torch.compiler.is_compiling() or transformed() else product_tables
    return make(x.device, x.dtype)


def _weights_by_component(weight: Tensor) -> Tensor:
    """Weights by grade path (20, C) spread over pairs of components, with the product's signs: (8, 8, C)."""
    _, signs, paths = _tables_like(weight)
    return weight.index_select(0, paths).unflatten(0, (COMPONENTS, COMPONENTS)) * signs[..., None]


class _ChannelwiseProduct(torch.autograd.Function):
    """One output component at a time, so that nothing of 64 components exists. The right component that goes with left
    component i for an output goes with i in turn: gathers undo themselves."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, weight)
        right = _tables_like(y)[0].unflatten(0, (COMPONENTS, COMPONENTS))
        out = torch.empty_like(x)
        for j in range(COMPONENTS):
            torch.sum(y.index_select(0, right[j]).mul_(weight[j, ..., None]).mul_(x), 0, out=out[j])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, weight = ctx.saved_tensors
        right = _tables_like(y)[0].unflatten(0, (COMPONENTS, COMPONENTS))
        grad_x, grad_y, grad_weight = torch.zeros_like(x), torch.zeros_like(y), []
        for j in range(COMPONENTS):
            product = y.index_select(0, right[j]).mul_(grad[j])
            grad_weight.append((product * x).sum(-1))
            grad_x = grad_x.addcmul_(product, weight[j, ..., None])
            product = x.index_select(0, right[j]).mul_(grad[j])
            grad_y = grad_y.addcmul_(product, weight[j].index_select(0, right[j])[..., None])
        return grad_x, grad_y, torch.stack(grad_weight)


def _sums_of_products(x: Components, y: Components, weight: Callable[[int, int], Tensor]) -> Components:
    """The product by components, with ``weight`` (C,) of output and left component."""
    sums = []
    for j, row in enumerate(RIGHT):
        first, *others = (weight(j, i)[:, None] * x[i] * y[k] for i, k in enumerate(row))
        sums.append(sum(others, first))
    return tuple(sums)


def _of_pairs(weight: Tensor) -> Callable[[int, int], Tensor]:
    """Weights by grade path (20, C) as those of output and left components, with the product's signs."""
    return lambda j, i: SIGNS[j][i] * weight[PATH_OF[j][i]]


class _ProductOfComponents(torch.autograd.Function):
    """For compilers for accelerators, which fuse expressions, but write into memory what is gathered. Derivatives are
    such products."""

    @staticmethod
    def forward(ctx, weight: Tensor, x: Tensor, *y: Tensor) -> Components:
        ctx.save_for_backward(weight, x, *y)
        return _sums_of_products(x.unbind(), y, _of_pairs(weight))

    @staticmethod
    def backward(ctx, *grad: Tensor):
        weight, x, *y = ctx.saved_tensors
        of_pair = _of_pairs(weight)
        grad_x = _sums_of_products(grad, y, lambda i, j: of_pair(j, i))
        grad_y = _sums_of_products(grad, x.unbind(), lambda k, j: of_pair(j, RIGHT[j][k]))
        right, signs, paths = _tables_like(x)
        factors = torch.stack(y).index_select(0, right).unflatten(0, (COMPONENTS, COMPONENTS))
        pairs = signs[..., None] * (torch.stack(grad)[:, None] * x * factors).sum(-1)
        of_paths = torch.zeros_like(weight).index_add(0, paths, pairs.flatten(0, 1))
        return of_paths, torch.stack(grad_x), *grad_y


def channelwise_product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Products of multivectors (8, C, T) with weights by grade path (20, C)."""
    weight = _weights_by_component(weight)
    if use_plain() or torch.compiler.is_compiling():  # which fuses, and keeps nothing either
        right = y.index_select(0, _tables_like(y)[0]).unflatten(0, (COMPONENTS, COMPONENTS))
        return (right * weight[..., None] * x).sum(1)
    return _ChannelwiseProduct.apply(x, y, weight)


def product_of_components(x: Tensor, y: Components, weight: Tensor) -> Components:
    """As :func:`channelwise_product`, with (C, T) for each of the eight components of ``y`` and the product."""
    return _ProductOfComponents.apply(weight, x, *y)


def geometric_product(x: Tensor, y: Tensor) -> Tensor:
    r"""The geometric product of multivectors.

    .. math:: (x y)_j = \sum_{i, k} \Gamma^{j}_{ik}\, x_i\, y_k, \qquad \Gamma \in \{-1, 0, 1\}

    With x = s + v + I b + I p (I = e123, b the axial vector a bivector is dual to), it holds the products of scalars,
    dot products and cross products of vectors: for two polar vectors, v w = v.w + I (v x w).

    Args:
        x, y: multivectors, components (1; e1, e2, e3; e23, e31, e12; e123) last.

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
        right, signs, _ = _tables_like(y)
        factors = y.index_select(-1, right).unflatten(-1, (COMPONENTS, COMPONENTS))
        return (factors * signs * x[..., None, :]).sum(-1)
