"""Measure the equivariance errors of modules, from this library or any other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .grids import PixelGrid, transform_grid
from .groups import DilationGroup, FiniteGroup

__all__ = ["act", "dilation_errors", "equivariance_error", "off_lattice_errors"]

# Largest allowed error relative to the largest output, for modules with random parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_WAVES = 6  # number of plane waves in each channel of smooth images
_WAVELENGTH = 20  # their root mean square wavelength in pixels

Group = FiniteGroup | DilationGroup
Action = Callable[[Tensor, Group, int], Tensor]


def act(x: Tensor, group: Group, element: int) -> Tensor:
    r"""Transform an image, volume or regular feature map by a lattice element of a group.

    .. math:: (L_g f)(x, k) = f(g^{-1} x, g^{-1} k)

    Here g is the element, x a pixel and k a group element. Rotations by 90 degrees exchange the sides of the image.

    Args:
        x: The tensor to transform. Its number of axes tells which of the layouts under Shapes it has.
        group: The group, finite or a group of scales.
        element: Index of the element g. It must map the pixel grid to itself (``group.lattice``).

    Shapes:
        Invariant features ``(B, C)``, an image or volume ``(B, C, *spatial)``, or a regular feature map ``(B, C, |H|,
        *spatial)`` -> the same layout. Invariant features do not change.

    Raises:
        ValueError: if ``element`` does not map the pixel grid to itself, or if ``x`` has another layout.
    """
    if x.ndim == 2:
        return x
    _check_axes("x", x.shape, group)
    if not group.lattice[element]:
        raise ValueError(
            f"element must be a lattice element of {group!r}, got {element}; off_lattice_errors measures the others"
        )
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
    module: nn.Module | Callable[[Tensor], Tensor], group: Group, x: Tensor, *, elements: Iterable[int] | None = None,
    input_action: Action = act, output_action: Action = act,
) -> float:  # fmt: skip
    r"""The largest relative equivariance error of a module over the elements of a group.

    .. math:: \max_g \; \max |f(L_g x) - L_g f(x)| \,/\, \max |f(x)|

    Here f is the module and :math:`L_g` the action of the element g. Some terms of new layers are multiplied by
    parameters that start at zero, such as far offsets. The error does not contain these terms, so check trained models,
    or give all parameters random values first.

    Args:
        module: Any map from a tensor to a tensor. Call ``eval()`` first if it has dropout.
        group: The group, finite or a group of scales.
        x: The input. With the default action it is an image or volume ``(B, C, *spatial)``, a regular feature map ``(B,
            C, |H|, *spatial)`` or invariant features ``(B, C)``.
        elements: Indices of the elements g to test. ``None`` means all lattice elements, for which the action is exact.
        input_action: Function ``action(tensor, group, element)`` that transforms the input. The default is :func:`act`;
            pass another function for other layouts.
        output_action: Function ``action(tensor, group, element)`` that transforms the output. The default is
            :func:`act`.

    Returns:
        The error. It is 0, up to rounding, for an equivariant module, and about 1 for a random module that is not
        equivariant.

    Warns:
        UserWarning: if parameters of the module, besides biases, are zero everywhere.

    Raises:
        ValueError: if there is no element to test, if an element is not a lattice element, if the module changes its
            output shape, or if an output is not finite or is zero everywhere.

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
        raise ValueError("elements must name at least one group element, got none; pass elements=None to test all")
    if elements is None and chosen == [group.identity] and len(group) > 1:
        raise ValueError(
            f"group must have lattice elements besides the identity, got {group!r}; pass elements and their actions, "
            "or use off_lattice_errors"
        )
    expected = _finite(module(x))
    warn_of_zeros(module)
    moved = ((_finite(module(input_action(x, group, g))), output_action(expected, group, g)) for g in chosen)
    return max(float(_difference(*pair, expected).max()) for pair in moved)


def warn_of_zeros(module: object, stacklevel: int = 4) -> None:
    """Warn if parameters of a module, besides biases, are zero everywhere: no output depends on the terms that they
    multiply."""
    parameters = module.named_parameters() if isinstance(module, nn.Module) else ()
    names = [name for name, p in parameters if p.numel() and not name.endswith("bias") and not bool(p.any())]
    if names:
        warnings.warn(
            "parameters are zero everywhere, so this check does not see the terms that they multiply: "
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}. Give all parameters "
            "random values first, for example by: for p in module.parameters(): torch.nn.init.normal_(p, std=0.3)",
            stacklevel=stacklevel,
        )


def _finite(out: Tensor) -> Tensor:
    if not bool(out.isfinite().all()):
        raise ValueError("module must give finite outputs, got NaN or infinity")
    return out


def _difference(moved: Tensor, target: Tensor, expected: Tensor) -> Tensor:
    if moved.shape != target.shape:
        raise ValueError(
            f"module must keep shapes, got {tuple(moved.shape)} for f(L_g x) and {tuple(target.shape)} for L_g f(x)"
        )
    size = expected.abs().max()
    if size == 0:
        raise ValueError(
            "module must give an output that is not zero everywhere, got zeros, whose error is zero for any module; "
            "initialise its parameters at random"
        )
    return (moved - target).abs() / size


@torch.no_grad()
def off_lattice_errors(
    module: nn.Module | Callable[[Tensor], Tensor], group: Group, shape: Sequence[int], *,
    elements: Iterable[int] | None = None, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu",
) -> dict[int, float]:  # fmt: skip
    r"""Relative errors of a module on smooth images, for group elements that do not map the pixel grid to itself.

    .. math:: \mathrm{rms}\,\big(f(L_g x)(0, k) - f(x)(0, g^{-1} k)\big) \,/\, \mathrm{rms}\, f(x)(0, k)

    Here 0 is the middle pixel, which no element moves, and k are group elements. Images are random plane waves with a
    root mean square wavelength of 20 pixels, which vanish near the border. They are evaluated at the rotated pixels, so
    that there is no interpolation error. The error comes from the pixel grid: windows and borders do not rotate, and
    sums over pixels replace integrals. Expect errors of some percent instead of rounding errors.

    Args:
        module: Any map from a tensor to a tensor. Call ``eval()`` first if it has dropout.
        group: The group, finite or a group of scales.
        shape: Shape of the input, ``(B, C, *spatial)`` for images and volumes or ``(B, C, |H|, *spatial)`` for regular
            features.
        elements: Indices of the elements to measure. ``None`` means all isometries that do not map the pixel grid to
            itself.
        dtype: Dtype of the input. The default is float64.
        device: Device of the input. The default is the CPU.

    Returns:
        A dict from the index of each element to its error. It is empty if all elements map the pixel grid to itself. If
        the module is exact for lattice elements, elements that differ by a lattice element have equal errors.

    Raises:
        ValueError: if ``shape`` or an output has another layout, if the output has no middle pixel (sides must be odd),
            or if an output is not finite.

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
    wavevectors = wavevectors * (2 * math.pi / _WAVELENGTH / math.sqrt(group.dim))
    phases = 2 * math.pi * torch.rand(functions, dtype=torch.float64, device="cpu")
    pos = PixelGrid(spatial).pos(dtype=torch.float64)
    pos = pos - pos.mean(0)

    def moved(element: int) -> Tensor:
        before = pos @ group.matrices[element]  # g^-1 x
        angle = torch.einsum("...wd,pd->...wp", wavevectors, before) + phases[..., None]
        within = (0.5 - before.norm(dim=-1) / min(spatial)) / 0.2  # 1 within 30 % of a side, 0 beyond 50 %
        rim = (math.pi / 2 * within.clamp(0, 1)).sin().square()
        x = (math.sqrt(2 / _WAVES) * angle.cos().sum(-2) * rim).unflatten(-1, spatial).to(device, dtype)
        return x[:, :, group.moved(element).to(x.device)] if x.ndim == 3 + group.dim else x

    expected = _middle(module(moved(group.identity)), group)
    warn_of_zeros(module)
    size, errors = expected.square().mean().sqrt(), {}
    for element in (~group.isometries.lattice).nonzero().flatten().tolist() if elements is None else elements:
        target = expected[:, :, group.moved(element).to(expected.device)] if expected.ndim == 3 else expected
        error = _middle(module(moved(element)), group) - target
        errors[element] = float(error.square().mean().sqrt() / size)
    return errors


@torch.no_grad()
def dilation_errors(module: nn.Module | Callable[[Tensor], Tensor], group: DilationGroup, x: Tensor) -> list[float]:
    r"""Relative errors of a module under dilation by 2, which repeats every pixel and moves features up one scale.

    .. math:: \max \big|f(L x)(p, j + 1) - f(x)(\lfloor p / 2 \rfloor, j)\big| \,/\, \max |f(x)|

    L repeats every pixel :math:`2^d` times and moves regular features from scale j to j + 1. The features of the first
    scale are then undetermined and are drawn at random. p is a pixel of the dilated image.

    Args:
        module: Any map from a tensor to regular features. Call ``eval()`` first if it has dropout.
        group: The group of scales, from :func:`tg_equiattn.groups.dyadic`.
        x: An image or volume ``(B, C, *spatial)``, or regular features ``(B, C, |H|, *spatial)``.

    Returns:
        The errors of the scales j = 0 ... J - 2. They are zero, up to rounding, for lifting attention. Group attention
        has errors at scales whose window of scales is cut off: by the first scale for j, by the last scale for j + 1.

    Raises:
        ValueError: if ``group`` is not a group of scales, or if an output has another shape, is not finite or is zero
            everywhere.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dyadic
        >>> from tg_equiattn.nn import ScaleLiftingAttention
        >>> layer = ScaleLiftingAttention(dyadic(3), 1, 6, heads=2, kernel_size=3).double()
        >>> [error < 1e-10 for error in dilation_errors(layer, dyadic(3), torch.randn(2, 1, 5, 6).double())]
        [True, True]
    """
    if not isinstance(group, DilationGroup):
        raise ValueError(f"group must be made by tg_equiattn.groups.dyadic, got {group!r}")
    expected, moved = (_finite(module(y)) for y in (x, _repeated(x, group)))
    warn_of_zeros(module)
    for out in (expected, moved):
        if out.ndim != 3 + group.dim or out.shape[2] != len(group):
            raise ValueError(f"module must give (B, C, {len(group)}, *spatial), got shape {tuple(out.shape)}")
    error = _difference(moved, _repeated(expected, group), expected).unflatten(2, (group.scales, -1))
    return [float(error[:, :, j + 1].max()) for j in range(group.scales - 1)]


def _repeated(x: Tensor, group: DilationGroup) -> Tensor:
    """Repeat every pixel along all spatial axes, and move regular features up one scale, with random features on the
    first scale."""
    for axis in range(x.ndim - group.dim, x.ndim):
        x = x.repeat_interleave(2, axis)
    if x.ndim == 3 + group.dim:
        new = torch.randn_like(x[:, :, : group.isometries.order])
        x = torch.cat([new, x[:, :, : -group.isometries.order]], 2)
    return x


def _middle(out: Tensor, group: Group) -> Tensor:
    """The output itself if it is invariant, (B, C), otherwise its middle pixel: (B, C) or (B, C, |H|)."""
    spatial = out.shape[-group.dim :]
    if out.ndim == 2:
        return _finite(out)
    if out.ndim not in (2 + group.dim, 3 + group.dim) or any(n % 2 == 0 for n in spatial):
        wanted = "invariants (B, C), or images or regular features with an odd number of pixels a side"
        raise ValueError(f"module must give {wanted}, so that one is in the middle, got shape {tuple(out.shape)}")
    return _finite(out.flatten(-group.dim)[..., math.prod(spatial) // 2])  # for odd sides this is the middle pixel
