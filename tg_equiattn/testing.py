"""Measuring equivariance, of this library's modules and of anyone's.

Tolerances for the worst error relative to the largest output, with random parameters:

========  =======
dtype     allowed
========  =======
float64   1e-10
float32   1e-5
========  =======
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .grids import transform_grid
from .groups import FiniteGroup

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

Action = Callable[[Tensor, FiniteGroup, int], Tensor]


def act(x: Tensor, group: FiniteGroup, element: int) -> Tensor:
    r"""Act with a lattice element: :math:`(L_g f)(x, k) = f(g^{-1} x, g^{-1} k)`.

    Args:
        x: an invariant ``(B, C)``, an image or volume ``(B, C, *spatial)``, or a regular feature map
            ``(B, C, |H|, *spatial)``; told apart by the number of axes.
        group: the finite group.
        element: index of a lattice element.

    Returns:
        The transformed tensor; quarter turns exchange sides of different length.

    Raises:
        ValueError: if the element moves pixels off the grid, or x has none of these layouts.
    """
    if x.ndim == 2:
        return x
    if x.ndim not in (2 + group.dim, 3 + group.dim):
        raise ValueError(
            f"x must have {2 + group.dim} axes (image or volume) or {3 + group.dim} (regular features), "
            f"got shape {tuple(x.shape)}"
        )
    if not group.lattice[element]:
        raise ValueError(f"element must be a lattice element of {group!r}, got {element}")
    if x.ndim == 3 + group.dim:
        if x.shape[2] != len(group):
            raise ValueError(f"x must have |H|={len(group)} on axis 2, got {x.shape[2]}")
        x = x[:, :, group.cayley[group.inverse[element]].to(x.device)]
    return transform_grid(x, group.matrices[element])


@torch.no_grad()
def equivariance_error(
    module: nn.Module | Callable[[Tensor], Tensor],
    group: FiniteGroup,
    x: Tensor,
    *,
    elements: Iterable[int] | None = None,
    input_action: Action = act,
    output_action: Action = act,
) -> float:
    r"""The worst relative equivariance error of a module over the group's elements.

    .. math:: \max_g \; \max |f(L_g x) - L_g f(x)| \,/\, \max |f(x)|

    Args:
        module: any map of tensors. Put dropout in eval mode first.
        group: the finite group.
        x: input; by default an image, volume, regular feature map or invariant, as :func:`act`.
        elements: indices to test; ``None`` means all lattice elements, on which the action is exact.
        input_action, output_action: ``action(tensor, group, element)`` for other layouts.

    Returns:
        0 for perfect equivariance. A random module that is not equivariant gives about 1.

    Raises:
        ValueError: if no element is left to test, an element is off the lattice, or an output is not finite or zero
            everywhere.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> from tg_equiattn.nn import GEViT
        >>> model = GEViT(cyclic(4), 1, 10, channels=(6,), heads=2, kernel_size=3).double().eval()
        >>> equivariance_error(model, cyclic(4), torch.randn(2, 1, 7, 7).double()) < 1e-10
        True
    """
    chosen = group.lattice.nonzero().flatten().tolist() if elements is None else list(elements)
    if not chosen:
        raise ValueError("elements must name at least one group element, got none")
    if elements is None and chosen == [group.identity] and len(group) > 1:
        raise ValueError(f"group must have lattice elements besides the identity, got {group!r}; name elements to test")
    expected = _finite(module(x))
    size = expected.abs().max()
    if size == 0:
        raise ValueError("module must not give zeros alone, which any symmetry maps to themselves")
    worst = 0.0
    for element in chosen:
        moved, target = _finite(module(input_action(x, group, element))), output_action(expected, group, element)
        if moved.shape != target.shape:
            raise ValueError(
                f"module must keep shapes: {tuple(moved.shape)} for L_g x, {tuple(target.shape)} for L_g f(x)"
            )
        worst = max(worst, float((moved - target).abs().max() / size))
    return worst


def _finite(out: Tensor) -> Tensor:
    if not bool(out.isfinite().all()):
        raise ValueError("module must give finite outputs, got NaN or infinity")
    return out
