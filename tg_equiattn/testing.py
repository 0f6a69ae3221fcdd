"""Measuring equivariance, of this library's modules and of anyone's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .grids import PixelGrid, transform_grid
from .groups import DilationGroup, FiniteGroup

__all__ = ["act", "dilation_errors", "equivariance_error", "off_lattice_errors"]

# Of the worst error relative to the largest output, with random parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_WAVES = 6  # plane waves a channel of smooth images

Group = FiniteGroup | DilationGroup
Action = Callable[[Tensor, Group, int], Tensor]


def act(x: Tensor, group: Group, element: int) -> Tensor:
    r"""Act with a lattice element: :math:`(L_g f)(x, k) = f(g^{-1} x, g^{-1} k)`. Quarter turns exchange sides.

    Args:
        x: an invariant ``(B, C)``, an image or volume ``(B, C, *spatial)``, or a regular feature map
            ``(B, C, |H|, *spatial)``; told apart by the number of axes.

    Raises:
        ValueError: if the element moves pixels off the grid, or x has none of these layouts.
    """
    if x.ndim == 2:
        return x
    _check_axes("x", x.shape, group)
    if not group.lattice[element]:
        raise ValueError(f"element must be a lattice element of {group!r}, got {element}")
    if x.ndim == 3 + group.dim:
        if x.shape[2] != len(group):
            raise ValueError(f"x must have |H|={len(group)} on axis 2, got {x.shape[2]}")
        x = x[:, :, group.moved(element).to(x.device)]
    return transform_grid(x, group.matrices[element])


def _check_axes(name: str, shape: Sequence[int], group: Group) -> None:
    if len(shape) not in (2 + group.dim, 3 + group.dim):
        axes = f"{2 + group.dim} axes (image or volume) or {3 + group.dim} (regular features)"
        raise ValueError(f"{name} must have {axes}, got {tuple(shape)}")


@torch.no_grad()
def equivariance_error(
    module: nn.Module | Callable[[Tensor], Tensor],
    group: Group,
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
    moved = ((_finite(module(input_action(x, group, g))), output_action(expected, group, g)) for g in chosen)
    return max(float(_difference(*pair, expected).max()) for pair in moved)


def _finite(out: Tensor) -> Tensor:
    if not bool(out.isfinite().all()):
        raise ValueError("module must give finite outputs, got NaN or infinity")
    return out


def _difference(moved: Tensor, target: Tensor, expected: Tensor) -> Tensor:
    if moved.shape != target.shape:
        raise ValueError(f"module must keep shapes: {tuple(moved.shape)} for L_g x, {tuple(target.shape)} for L_g f(x)")
    size = expected.abs().max()
    if size == 0:
        raise ValueError("module must not give zeros alone, which any symmetry maps to themselves")
    return (moved - target).abs() / size


@torch.no_grad()
def off_lattice_errors(
    module: nn.Module | Callable[[Tensor], Tensor],
    group: Group,
    shape: Sequence[int],
    *,
    elements: Iterable[int] | None = None,
    wavelength: float = 20.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> dict[int, float]:
    r"""Relative errors of a module on smooth images, for the elements that do not map the pixel grid to itself.

    .. math:: \mathrm{rms}\,\big(f(L_g x)(0, k) - f(x)(0, g^{-1} k)\big) \,/\, \mathrm{rms}\, f(x)(0, k)

    Images are random plane waves, zero near the rim, and are sampled at the pixels moved by the element, so nothing is
    interpolated; outputs are compared at the middle pixel, which stays where it is. What is left is what a rotation of
    pixels costs: windows and borders that do not turn along, sums over pixels for integrals. Expect percent, and no
    tolerance of rounding.

    Args:
        module: as for :func:`equivariance_error`.
        shape: of the input, ``(B, C, *spatial)`` for images, ``(B, C, |H|, *spatial)`` for regular features.
        elements: indices to measure; ``None`` means all off the lattice.
        wavelength: root mean square wavelength of the images in pixels.
        dtype, device: of the input.

    Returns:
        The error of each element, by its index; empty where none is off the lattice. Where the elements of the lattice
        are exact, two that differ by one of them have the same error.

    Raises:
        ValueError: if shape or outputs have none of these layouts, or there is no middle pixel.

    Example:
        >>> from tg_equiattn.groups import cyclic
        >>> from tg_equiattn.nn import LiftingAttention
        >>> layer = LiftingAttention(cyclic(8), 3, 8, heads=2, kernel_size=5).double()
        >>> errors = off_lattice_errors(layer, cyclic(8), (8, 3, 11, 11))
        >>> list(errors), max(errors.values()) < 0.03
        ([1, 3, 5, 7], True)
    """
    _check_axes("shape", shape, group)
    spatial, functions = tuple(shape[-group.dim :]), (*shape[: -group.dim], _WAVES)
    wavevectors = torch.randn(*functions, group.dim, dtype=torch.float64, device="cpu")
    wavevectors = wavevectors * (2 * math.pi / wavelength / math.sqrt(group.dim))
    phases = 2 * math.pi * torch.rand(functions, dtype=torch.float64, device="cpu")
    place = PixelGrid(spatial).pos(dtype=torch.float64)
    place = place - place.mean(0)

    def moved(element: int) -> Tensor:
        before = place @ group.matrices[element]  # g^-1 x
        angle = torch.einsum("...wd,pd->...wp", wavevectors, before) + phases[..., None]
        within = (0.5 - before.norm(dim=-1) / min(spatial)) / 0.2  # 1 from 30 % of a side on inwards
        rim = (math.pi / 2 * within.clamp(0, 1)).sin().square()
        x = (math.sqrt(2 / _WAVES) * angle.cos().sum(-2) * rim).unflatten(-1, spatial).to(device, dtype)
        return x[:, :, group.moved(element).to(x.device)] if x.ndim == 3 + group.dim else x

    expected = _middle(module(moved(group.identity)), group)
    size, errors = expected.square().mean().sqrt(), {}
    for element in (~group.isometries.lattice).nonzero().flatten().tolist() if elements is None else elements:
        target = expected[:, :, group.moved(element).to(expected.device)] if expected.ndim == 3 else expected
        error = _middle(module(moved(element)), group) - target
        errors[element] = float(error.square().mean().sqrt() / size)
    return errors


@torch.no_grad()
def dilation_errors(module: nn.Module | Callable[[Tensor], Tensor], group: DilationGroup, x: Tensor) -> list[float]:
    r"""Relative errors of a module where every pixel is repeated: its features should move up one scale.

    .. math:: \max \big|f(L x)(p, j + 1) - f(x)(\lfloor p / 2 \rfloor, j)\big| \,/\, \max |f(x)|

    L repeats every pixel :math:`2^d`-fold and moves regular features up one scale. What is new on the first scale then,
    of which repetition says nothing, is drawn at random.

    Args:
        module: as for :func:`equivariance_error`, to regular features.
        x: an image or volume ``(B, C, *spatial)``, or regular features ``(B, C, |H|, *spatial)``.

    Returns:
        The errors of scales j = 0 ... J - 2. Lifting has none; group attention and what is made of it have some where
        the first scale cuts the window of scales of j, or the last one that of j + 1.

    Raises:
        ValueError: for another group, or an output that is not regular, not finite or zero everywhere.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dyadic
        >>> from tg_equiattn.nn import LiftingAttention
        >>> layer = LiftingAttention(dyadic(3), 1, 6, heads=2, kernel_size=3).double()
        >>> [error < 1e-10 for error in dilation_errors(layer, dyadic(3), torch.randn(2, 1, 5, 6).double())]
        [True, True]
    """
    if not isinstance(group, DilationGroup):
        raise ValueError(f"group must be made by tg_equiattn.groups.dyadic, got {group!r}")
    expected, moved = (_finite(module(y)) for y in (x, _repeated(x, group)))
    for out in (expected, moved):
        if out.ndim != 3 + group.dim or out.shape[2] != len(group):
            raise ValueError(f"module must give (B, C, {len(group)}, *spatial), got shape {tuple(out.shape)}")
    error = _difference(moved, _repeated(expected, group), expected).unflatten(2, (group.scales, -1))
    return [float(error[:, :, j + 1].max()) for j in range(group.scales - 1)]


def _repeated(x: Tensor, group: DilationGroup) -> Tensor:
    """Every pixel repeated along all axes; regular features one scale up, the first at random."""
    for axis in range(x.ndim - group.dim, x.ndim):
        x = x.repeat_interleave(2, axis)
    if x.ndim == 3 + group.dim:
        new = torch.randn_like(x[:, :, : group.isometries.order])
        x = torch.cat([new, x[:, :, : -group.isometries.order]], 2)
    return x


def _middle(out: Tensor, group: Group) -> Tensor:
    """(B, C) or (B, C, |H|): an invariant itself, of other outputs the middle pixel."""
    spatial = out.shape[-group.dim :]
    if out.ndim == 2:
        return _finite(out)
    if out.ndim not in (2 + group.dim, 3 + group.dim) or any(n % 2 == 0 for n in spatial):
        wanted = "invariants (B, C), or images or regular features with an odd number of pixels a side"
        raise ValueError(f"module must give {wanted}, one of which is in the middle, got shape {tuple(out.shape)}")
    return _finite(out.flatten(-group.dim)[..., math.prod(spatial) // 2])  # of odd sides the middle in row order, too
