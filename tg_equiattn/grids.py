"""Pixel and voxel grids: relative offsets, windows, and lattice transformations.

A planar position is (x right, y up) and image rows run down, so row = -y. Volumes are (x, y, z) with
the tensor's axes (z, -y, x). Offsets are x(j) - x(i) in whole pixels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import checks
from .graphs.neighbors import NeighborList
from .shapes import Float, Int, Num
from .torch_state import cached

__all__ = ["PixelGrid", "Window"]

WINDOW_SHAPES = ("square", "disk")
PADDING_MODES = ("mask", "circular")


def _axes_to_position(index: Num[Tensor, "*points dim"]) -> Num[Tensor, "*points dim"]:
    """Offsets along the tensor's axes, (row, column) or (z, row, column), as positions (x, y) or (x, y, z)."""
    position = index.flip(-1).clone()
    if position.shape[-1] > 1:
        position[..., 1] *= -1
    return position


def _mesh(axes: Iterable[tuple[int, int]], device: torch.device | str) -> Int[Tensor, "pixels dim"]:
    """All indices of a grid in row order. Each axis runs from the first of its two numbers to before the second."""
    ranges = [torch.arange(start, stop, device=device) for start, stop in axes]  # range() takes no symbols
    return torch.stack(torch.meshgrid(*ranges, indexing="ij"), -1).flatten(0, -2)


def longest(sides: Sequence[int]) -> int:
    """The longest side of a grid, also of one with symbols for sizes."""
    return functools.reduce(torch.sym_max if any(isinstance(side, torch.SymInt) for side in sides) else max, sides)


def centred_positions(spatial: Sequence[int], device: torch.device, dtype: torch.dtype) -> Float[Tensor, "pixels dim"]:
    """Positions of pixels in pixels from the middle of the image, x right and y up, so that an isometry of the image
    acts on them as a matrix."""
    axes = [torch.arange(n, device=device, dtype=dtype) - (n - 1) / 2 for n in spatial]
    return _axes_to_position(torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2))


@checks.arguments
@dataclass(frozen=True)
class Window:
    """The keys that a query attends to: an odd window around it, or the whole grid.

    Only pixels of the grid are keys. With ``padding_mode="mask"`` a window that reaches over a border, or is larger
    than the grid, ends there; with ``"circular"`` it goes on at the other side, as in a circular convolution.

    Args:
        dim: 2 for images, 3 for volumes.
        kernel_size: odd side of the window in pixels, or a side for each axis of images or volumes, or ``None`` for
            global attention.
        shape: ``"square"``, or ``"disk"`` for offsets of at most ``kernel_size / 2`` (an ellipse if the sides differ).
        padding_mode: ``"mask"`` or ``"circular"``. Circular windows may reach as far as the grid has pixels, no
            further; a pixel that a window meets twice is two keys. Global attention on a torus would need offsets that
            are periodic, and has no circular mode.

    Attributes:
        sides: the side along each axis of images or volumes. A global window has none.
        is_global: true for the whole grid.
        circular: true with ``padding_mode="circular"``.
        selection: indices in the square window of the offsets that belong to a disk; empty means all.

    Raises:
        ValueError: for an even or non-positive window, an unknown shape, dimension or padding mode.
    """

    dim: int
    kernel_size: int | tuple[int, ...] | None
    shape: str = "square"
    padding_mode: str = "mask"
    sides: tuple[int, ...] = field(init=False, repr=False)
    is_global: bool = field(init=False, repr=False)
    circular: bool = field(init=False, repr=False)
    selection: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = self.kernel_size
        object.__setattr__(self, "is_global", size is None)
        object.__setattr__(self, "circular", self.padding_mode == "circular")
        if self.dim not in (2, 3):
            raise ValueError(f"dim must be 2 or 3, got {self.dim!r}")
        sides = () if size is None else tuple(size) if isinstance(size, Sequence) else (size,) * self.dim
        object.__setattr__(self, "sides", sides)
        if size is not None and not (len(sides) == self.dim and all(type(n) is int and n % 2 and n > 0 for n in sides)):
            raise ValueError(
                f"kernel_size must be a positive odd integer, a tuple of {self.dim} such integers, or None (global), "
                f"got {size!r}"
            )
        if size is not None:
            object.__setattr__(self, "kernel_size", sides if len(set(sides)) > 1 else sides[0])
        checks.choice("shape (window_shape)", self.shape, WINDOW_SHAPES)
        if size is None and self.shape != "square":
            raise ValueError(f"window_shape must be 'square' where kernel_size is None (global), got {self.shape!r}")
        checks.choice("padding_mode", self.padding_mode, PADDING_MODES)
        if size is None and self.circular:
            raise ValueError(
                "padding_mode must be 'mask' where kernel_size is None (global): half a side away an offset has no "
                "direction on a torus; GlobalGroupAttention joins a circular window with all pixels. Got 'circular'"
            )
        box = itertools.product(*(range(1 - side, side, 2) for side in sides))
        chosen = tuple(i for i, offset in enumerate(box) if self.holds(offset))
        object.__setattr__(self, "selection", chosen if len(chosen) < math.prod(sides) else ())

    def holds(self, doubled: Sequence[int]) -> bool:
        """True if the window has an offset of the box around it, given as its double along the tensor's axes."""
        whole = math.prod(self.sides)  # sum (2 offset / side)^2 <= 1, in whole numbers
        lengths = (n * (whole // side) for n, side in zip(doubled, self.sides, strict=True))
        return self.shape == "square" or sum(n**2 for n in lengths) <= whole**2

    def check(self, spatial: Sequence[int], step: int = 1) -> None:
        """Raise ValueError unless a grid of this size can be attended over. Neighbouring offsets of the window are
        ``step`` pixels apart."""
        if len(spatial) != self.dim:
            raise ValueError(f"the input must have {self.dim} spatial axes, got {tuple(spatial)}")
        if min(spatial) < 1:
            raise ValueError(f"the input must have at least one pixel on every spatial axis, got {tuple(spatial)}")
        if self.circular and any(n < step * (side // 2) for n, side in zip(spatial, self.sides, strict=True)):
            scaled = "" if step == 1 else f" at the largest scale, {step}"
            raise ValueError(
                f"kernel_size must be at most {tuple(2 * (n // step) + 1 for n in spatial)} with "
                f"padding_mode='circular' for input sides {tuple(spatial)}, which a window may reach around "
                f"once{scaled}, got {self.kernel_size}"
            )

    def count(self, spatial: Sequence[int] | None = None) -> int:
        """The number of offsets."""
        if not self.is_global:
            return len(self.selection) or math.prod(self.sides)
        return math.prod([2 * n - 1 for n in self._grid(spatial)])

    def offsets(self, spatial: Sequence[int] | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Relative positions, (D, dim) int64: of the window, or with global attention of all pairs on the grid."""
        radii = [n - 1 for n in self._grid(spatial)] if self.is_global else [n // 2 for n in self.sides]
        every = _axes_to_position(_mesh(((-n, n + 1) for n in radii), device))
        return every[list(self.selection)] if self.selection else every

    def _grid(self, spatial: Sequence[int] | None) -> Sequence[int]:
        if spatial is None:
            raise ValueError("spatial must be given for a global window, got None")
        return spatial

    def scale(self, spatial: Sequence[int] | None = None) -> float:
        """The offset length, in pixels along an axis, that encodings see as 1."""
        if not self.is_global:
            return max(*self.sides, 2) // 2
        return longest((longest(self._grid(spatial)) - 1, 1))


class Phase(NamedTuple):
    """Every second pixel of the finer of two grids, and its part of a window between the two.

    ``first`` is its first pixel, 0 or 1 along each axis. ``window`` leads from queries to keys in pixels of the coarser
    grid, and ``offsets`` are the same as positions in pixels of the finer grid.
    """

    first: tuple[int, ...]
    window: Window
    offsets: Float[Tensor, "D dim"]


def phases(window: Window, finer_keys: bool, half: bool) -> list[Phase]:
    """Split a window between two grids, of which one is twice as fine, into windows on the coarser one.

    ``half`` tells where pixel m of the coarser grid is: at pixel 2 m of the finer one, or at 2 m + 1/2, the centre of a
    block of 2 x 2. The window has the offsets of at most ``kernel_size / 2`` in pixels of the finer grid. Parts without
    offsets are left out.
    """
    sign, result = 1 if finer_keys else -1, []
    axes = ([n for n in range(-side, side + 1) if n % 2 == half] for side in window.sides)
    doubled = [offset for offset in itertools.product(*axes) if window.holds(offset)]
    for first in itertools.product((0, 1), repeat=window.dim):
        # (the double of an offset, and four times the offset in pixels of the coarser grid)
        steps = [(x, [n + sign * (half - 2 * p) for n, p in zip(x, first, strict=True)]) for x in doubled]
        steps = [(x, step) for x, step in steps if not any(n % 4 for n in step)]
        if not steps:
            continue
        reach = [max(abs(n) // 4 for n in along) for along in zip(*(step for _, step in steps), strict=True)]
        box = itertools.product(*(range(-4 * n, 4 * n + 1, 4) for n in reach))
        places = {step: place for place, step in enumerate(box)}
        part = replace(window, kernel_size=tuple(2 * n + 1 for n in reach), shape="square")
        object.__setattr__(part, "selection", tuple(places[tuple(step)] for _, step in steps))
        offsets = torch.tensor([x for x, _ in steps], dtype=torch.float64, device="cpu") / 2
        result.append(Phase(first, part, _axes_to_position(offsets)))
    return result


def between_grids(queries: Sequence[int], keys: Sequence[int]) -> tuple[bool, bool] | None:
    """``finer_keys`` and ``half`` of :func:`phases` for grids of n pixels, and of 2 n - 1 or 2 n along each axis;
    ``None`` for other sizes."""
    for finer_keys, coarse, fine in ((True, queries, keys), (False, keys, queries)):
        for half in (False, True):
            if all(more == 2 * n - 1 + half for n, more in zip(coarse, fine, strict=True)):
                return finer_keys, half
    return None


@checks.arguments
@dataclass(frozen=True)
class PixelGrid:
    """Pixels of an image (or voxels of a volume) as nodes in row order, and which of them are near each other.

    Args:
        shape: ``(H, W)`` or ``(D, H, W)``, or ``(N,)`` for pixels along a line.
        cutoff: pixels at a smaller Manhattan distance, the sum along the axes, are near. The unit is that of
            ``spacing``. The default is 6.
        periodic: whether the last pixel of an axis is next to the first. The offset of two pixels is then the shortest
            one; if two are equally short, half a side either way, it is that of the positive index step. The default
            is ``False``.
        spacing: distance of neighboring pixels in the unit of positions: one number, or one for each axis of
            ``shape``. Offsets are whole numbers if it is 1, the default.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Example:
        >>> grid = PixelGrid((4, 5), cutoff=2)
        >>> [tuple(t.shape) for t in grid.edges()]  # 31 pairs of pixels that share a side, both ways
        [(2, 62), (62, 2)]
    """

    shape: tuple[int, ...]
    cutoff: checks.Positive = 6
    periodic: bool = False
    spacing: checks.Positive | tuple[checks.Positive, ...] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) not in (1, 2, 3) or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise ValueError(f"shape must be one to three positive integers, got {self.shape}")
        spacing = self.spacing
        spacing = tuple(spacing) if isinstance(spacing, Sequence) else (spacing,) * len(self.shape)
        if len(spacing) != len(self.shape):
            raise ValueError(
                f"spacing must be one number or {len(self.shape)}, one for each axis, got {self.spacing!r}"
            )
        object.__setattr__(self, "spacing", spacing)

    @property
    def is_whole(self) -> bool:
        """True if offsets are counted in pixels."""
        return all(number == 1 for number in self._spacings)

    @property
    def _spacings(self) -> tuple[float, ...]:
        return cast("tuple[float, ...]", self.spacing)

    def _in_units(self, position: Int[Tensor, "*points dim"]) -> Num[Tensor, "*points dim"]:
        """Whole positions or offsets times the spacing of their axis."""
        if self.is_whole:
            return position
        return position * torch.tensor(self._spacings[::-1], dtype=torch.float64, device=position.device)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def pos(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """(N, dim) positions of pixels from 0, x right and y up."""
        pos = _axes_to_position(_mesh(((0, side) for side in self.shape), device))
        return self._in_units(pos - pos.amin(0)).to(dtype or torch.get_default_dtype())

    @property
    def lengths(self) -> Float[Tensor, " dim"]:
        """The lengths of the sides along x, y (and z), which are the periods of a periodic grid."""
        return self._in_units(torch.tensor(self.shape[::-1])).double()

    def pairs(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Targets, sources, offsets (E, dim) and a mask (E,) of near pairs.

        Pairs are all steps of all pixels; the mask is false for steps off the image. Sizes do not depend on values, so
        that nothing waits for the device.
        """
        axes, count, limit = [], 0, self.cutoff * (1 - 1e-9)  # sums of spacings are rounded
        for side, unit in zip(self.shape, self._spacings, strict=True):
            most = math.ceil(self.cutoff / unit)
            back, ahead = ((side - 1) // 2, side // 2) if self.periodic else (side - 1, side - 1)
            axes.append((-min(most, back), min(most, ahead) + 1))
        for step in itertools.product(*[range(*axis) for axis in axes]):
            count += 0 < sum(abs(n) * unit for n, unit in zip(step, self._spacings, strict=True)) < limit
        steps = _mesh(axes, device)
        along = zip(steps.unbind(-1), self._spacings, strict=True)
        lengths = torch.stack([n.abs().double() * unit for n, unit in along]).sum(0)
        near = (lengths > 0) & (lengths < limit)
        steps = steps[near.to(torch.int32).argsort(descending=True, stable=True)[:count]]
        grid = _mesh(((0, side) for side in self.shape), device)[:, None] + steps
        source, mask = torch.zeros_like(grid[..., 0]), torch.ones_like(grid[..., 0], dtype=torch.bool)
        for side, index in zip(self.shape, grid.unbind(-1), strict=True):
            if self.periodic:
                index = index % side
            mask = mask & (index >= 0) & (index < side)
            source = source * side + index.clamp(0, side - 1)
        target = torch.arange(len(self), device=device)[:, None].expand_as(source)
        offsets = self._in_units(_axes_to_position(steps)).repeat(len(self), 1)
        return target.flatten(), source.flatten(), offsets, mask.flatten()

    @cached(maxsize=32)
    def edges(self) -> tuple[Tensor, Tensor]:
        """``edge_index`` (2, E), sorted by target, and offsets (E, dim). Equal grids share them: do not write into
        them."""
        target, source, offsets, mask = self.pairs()
        return torch.stack([source, target])[:, mask], offsets[mask]

    def neighbors(self, batch_size: int = 1, device: torch.device | str = "cpu") -> NeighborList:
        """The near pairs of ``batch_size`` images, one after the other. Those of the last few grids are kept."""
        return _neighbors(self, batch_size, torch.device(device))


@cached(maxsize=8)
def _neighbors(grid: PixelGrid, batch_size: int, device: torch.device) -> NeighborList:
    target, source, offsets, mask = grid.pairs(device)
    near = NeighborList(torch.stack([source, target]), len(grid), offsets, mask=mask, checked=True)
    return near.repeated(batch_size)


def transform_grid(x: Tensor, matrix: Tensor) -> Tensor:
    r"""Act with a lattice element on the last ``d`` axes: :math:`(L_g f)(x) = f(g^{-1} x)` about the grid's centre.

    Args:
        x: images ``(..., H, W)`` or volumes ``(..., D, H, W)``. Rotations by 90 degrees exchange sides.
        matrix: matrix of g in coordinates (x, y) or (x, y, z), a signed permutation.

    Raises:
        ValueError: if the matrix is not a signed permutation.
    """
    dim = matrix.shape[-1]
    if not torch.equal(matrix.abs().round(), matrix.abs()) or not bool((matrix.abs().sum(0) == 1).all()):
        raise ValueError(f"matrix must be a signed permutation (a lattice element), got {matrix.tolist()}")
    to_axes = _axes_to_position(torch.eye(dim, dtype=matrix.dtype)).to(matrix)
    on_axes = to_axes.T @ matrix @ to_axes  # rows: output axis, columns: input axis
    source = on_axes.abs().argmax(1).tolist()
    batch = x.ndim - dim
    permuted = x.permute(*range(batch), *(batch + a for a in source))
    flips = [batch + a for a in range(dim) if on_axes[a, source[a]] < 0]
    return permuted.flip(flips) if flips else permuted
