r"""Cells of crystals, slabs and open clouds, and the waves that repeat with them.

The rows of a cell A are lattice vectors. Waves that repeat with it have wavevectors :math:`k = 2 \pi A^{-1} n` with n
three integers, so at a position x = f A their phase is :math:`2 \pi\, n \cdot f`: it hangs on the fractions f alone,
which are wrapped before they are multiplied. Along directions in which a graph does not repeat it gets a box so wide
that no image comes near, and potentials end at a distance that no two of its nodes have.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...kept import ordinary_tensors
from ...ranks import Ranks

_MOST = 2**23  # waves of one graph and kernel, whose table would be larger than a memory
_FLAT = 1e-6  # the smallest volume of a cell, as a share of that of a box with edges as long
TAPER = 1.1  # from the largest wavenumber that is promised to this times it, waves fade


class Cells(NamedTuple):
    """What repeats, of each graph of a batch.

    Attributes:
        vectors: ``(B, 3, 3)``, rows the lattice vectors, unit vectors where there are none, in double precision.
        periodic: bool ``(B, 3)``, along which of them it repeats: all three, two, or none.
    """

    vectors: Tensor
    periodic: Tensor

    @classmethod
    def none(cls, count: int, like: Tensor) -> Cells:
        """Of graphs of which none repeats."""
        unit = torch.eye(3, dtype=torch.float64, device=like.device).expand(count, 3, 3)
        return cls(unit, torch.zeros(count, 3, dtype=torch.bool, device=like.device))

    def of(self, graphs: Tensor | None) -> Cells:
        """Of some of the graphs, None for all."""
        return self if graphs is None else Cells(*(x.index_select(0, graphs) for x in self))


class Lattice(NamedTuple):
    """The waves of one kernel in each graph of a batch, one of each pair of opposite ones.

    Attributes:
        angles: ``(B, N, 3)``, 2 pi times the fractions of nodes.
        numbers: int64 ``(B, D, 3)``, n.
        wavevectors: ``(B, D, 3)``, in radians per unit of length, in double precision.
        weights: ``(B, D)``, how many waves each stands for (2, 1 for n = 0, none for padding), divided by the volume.
        radius: ``(B,)``, where potentials end.
        normals: ``(B, 3, 3)``, unit vectors along what does not repeat, zero for the others.
    """

    angles: Tensor
    numbers: Tensor
    wavevectors: Tensor
    weights: Tensor
    radius: Tensor
    normals: Tensor


def cells_of(cell: Tensor | None, pbc: Tensor | None, count: int, like: Tensor) -> Cells | None:
    """What users give as cells, checked; ``None`` where nothing repeats.

    Args:
        cell: ``(3, 3)``, of all graphs, or ``(count, 3, 3)``, or ``(3 count, 3)``; rows are lattice vectors.
        pbc: bool ``(3,)`` or ``(count, 3)``, ``(3 count,)``, along which vectors graphs repeat; ``None`` for those
            that are not zero.
        count: of graphs.
        like: features of nodes.

    Raises:
        ValueError: for other shapes, cells that are flat or not finite, ``pbc`` without ``cell``, and wires.
    """
    if cell is None:
        if isinstance(pbc, Tensor) and checks.values_are_free(pbc) and not bool(pbc.any()):
            return None
        if pbc is not None:
            raise ValueError("cell must be given with pbc, got None")
        return None
    fits = isinstance(cell, Tensor) and cell.ndim in (2, 3) and cell.shape[-1] == 3 and cell.shape[-2] % 3 == 0
    if not fits or not ((cell.ndim == 2 and cell.shape[0] == 3) or cell.numel() == 9 * count):
        came = str(tuple(cell.shape)) if isinstance(cell, Tensor) else type(cell).__name__
        raise ValueError(f"cell must be (3, 3) or one a graph, ({count}, 3, 3), got {came}")
    if cell.device != like.device or not cell.is_floating_point():
        raise ValueError(f"cell must be floating point on {like.device} as x is, got {cell.dtype} on {cell.device}")
    vectors = cell.double().reshape(-1, 3, 3).expand(count, 3, 3)
    if pbc is None:
        periodic = (vectors != 0).any(2)
    else:
        shape, came = (tuple(pbc.shape), f"{pbc.dtype}") if isinstance(pbc, Tensor) else ((), type(pbc).__name__)
        fits = isinstance(pbc, Tensor) and pbc.ndim in (1, 2) and (pbc.ndim == 1 or pbc.shape[1] == 3)
        fits = fits and ((pbc.ndim == 1 and shape[0] == 3) or pbc.numel() == 3 * count)
        if not fits or pbc.dtype != torch.bool or pbc.device != like.device:
            came = f"{came} of shape {shape} on {pbc.device}" if isinstance(pbc, Tensor) else came
            raise ValueError(f"pbc must be bool (3,) or ({count}, 3) on {like.device} as x is, got {came}")
        periodic = pbc.reshape(-1, 3).expand(count, 3)
    if checks.values_are_free(cell) and checks.values_are_free(periodic):
        _check_cells(vectors.detach(), periodic, "pbc" if pbc is not None else "cell")
    unit = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    return Cells(torch.where(periodic[..., None], vectors, unit), periodic)


def _check_cells(vectors: Tensor, periodic: Tensor, name: str) -> None:
    if not bool(vectors.isfinite().all()):
        raise ValueError(f"cell must be finite, got {vectors.tolist()}")
    repeats = periodic.sum(1)
    if bool((repeats == 1).any()):
        which = int((repeats == 1).nonzero()[0])
        raise ValueError(
            f"{name} must let graph {which} repeat along three directions, two or none, got one: the potential of a "
            "wire grows with the logarithm of the distance, whatever its waves; give it two vectors more, with vacuum"
        )
    lengths = vectors.norm(dim=2)
    if bool(((lengths == 0) & periodic).any()):
        which = int(((lengths == 0) & periodic).any(1).nonzero()[0])
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {vectors[which].tolist()}")
    full = torch.where(periodic[..., None], vectors, _normals(vectors, periodic))
    flat = full.det().abs() <= _FLAT * full.norm(dim=2).prod(1)
    if bool(flat.any()):
        which = int(flat.nonzero()[0])
        raise ValueError(f"cell must have a volume, got lattice vectors in one plane: {vectors[which].tolist()}")


def _normals(vectors: Tensor, periodic: Tensor) -> Tensor:
    """Unit vectors along what does not repeat, (B, 3, 3): across a slab, along x, y, z for open clouds."""
    across = torch.linalg.cross(vectors.roll(-1, 1), vectors.roll(-2, 1))  # of the two others, for each vector
    length = across.square().sum(2, keepdim=True)
    across = across / torch.where(length > 0, length, 1.0).sqrt()
    unit = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    return torch.where(periodic.any(1)[:, None, None], across, unit)


def lattice_of(
    cells: Cells,
    pos: Tensor,
    mask: Tensor | None,
    *,
    ends: bool,
    margin: float,
    largest: float,
    dtype: torch.dtype,
    bound: tuple[int, int, int] | None = None,
    ranks: Ranks | None = None,
) -> Lattice:
    r"""The waves :math:`|k| <` ``largest`` of each graph.

    Boxes and where potentials end hang on positions without gradients, as sums do not hang on them but for what is
    promised: of Gaussians, the extent and ``margin``; of potentials, which end at R, the largest distance and
    ``margin``, the extent, R and ``margin``, or twice R across a slab.

    Args:
        pos: ``(B, N, 3)``, in double precision.
        mask: bool ``(B, N)``, where there are nodes.
        ends: whether the kernel reaches so far that it has to end beyond the largest distance.
        margin: the distance at which a kernel's short part is as small as is promised.
        largest: of wavenumbers.
        dtype: of angles and weights.
        bound: of wave numbers, which then are all within it, whatever the cells are; ``None`` to look for them, which
            reads values.
        ranks: among which nodes are shared.
    """
    periodic, vectors = cells.periodic, cells.vectors
    normals = _normals(vectors, periodic)
    with torch.no_grad():
        along = torch.einsum("bnx,bax->bna", pos, normals)
        low, high = along, along
        if mask is not None:
            low = along.masked_fill(~mask[..., None], torch.inf)
            high = along.masked_fill(~mask[..., None], -torch.inf)
        infinite = along.new_full((along.shape[0], 1, 3), torch.inf)  # where there are no nodes at all
        sides = torch.stack([torch.cat([high, -infinite], 1).amax(1), torch.cat([-low, -infinite], 1).amax(1)])
        sides = sides if ranks is None else ranks.largest(sides)
        extent = sides.sum(0).clamp(min=0).nan_to_num(0, 0, 0)
        extent = torch.where(periodic, 0.0, extent)
        radius = extent.norm(dim=1) + margin
        around = extent + margin
        if ends:
            slab = periodic.any(1, keepdim=True)
            around = torch.where(slab, 2 * radius[:, None], extent + radius[:, None] + margin)
    full = torch.where(periodic[..., None], vectors, normals * around[..., None])
    inverse = torch.linalg.inv(full)
    fractions = torch.einsum("bnx,bxa->bna", pos, inverse)
    fractions = fractions - torch.where(periodic[:, None], fractions.detach().round(), 0.0)
    numbers, counts = _fixed(full, bound, largest) if bound is not None else _found(full, largest)
    wavevectors = 2 * math.pi * numbers.to(full.dtype) @ inverse.mT
    weights = counts.to(full.dtype) / torch.linalg.det(full).abs()[:, None]
    normals = torch.where(periodic[..., None], 0.0, normals)
    return Lattice((2 * math.pi * fractions).to(dtype), numbers, wavevectors, weights, radius, normals)


def coulomb(lattice: Lattice, periodic: Tensor) -> Tensor:
    r""":math:`4 \pi / k^2` of potentials (B, D): without k = 0 where graphs repeat in three directions, ending at the
    radius where they do not (in a sphere, Vico et al.; in a layer, Rozzi et al.)."""
    waves, radius = lattice.wavevectors, lattice.radius[:, None]
    square = waves.square().sum(2)
    zero = (lattice.numbers == 0).all(2)
    whole = 4 * math.pi / torch.where(zero, 1.0, square)
    half = torch.where(zero, 1.0, square).sqrt() * radius / 2
    ball = 2 * math.pi * radius.square() * torch.where(zero, 1.0, half.sin() / half).square()
    normal = lattice.normals.sum(1, keepdim=True)  # of slabs, which have one
    along = waves - (waves * normal).sum(2, keepdim=True) * normal
    slanted = (lattice.numbers * periodic[:, None] != 0).any(2)
    along = torch.where(slanted[..., None], along, 0.0).square().sum(2)
    fall = torch.where(slanted, -torch.where(slanted, along, 1.0).sqrt() * radius, 0.0).exp()
    odd = (lattice.numbers * ~periodic[:, None]).sum(2).remainder(2)  # cos(k R) across, as the box is 2 R thick
    layer = torch.where(zero, -2 * math.pi * radius.square(), whole * (1 - (1 - 2 * odd) * fall))
    repeats = periodic.sum(1)[:, None]
    return torch.where(repeats == 3, torch.where(zero, 0.0, whole), torch.where(repeats == 2, layer, ball))


def taper(wavevectors: Tensor, largest: float) -> Tensor:
    """1 up to ``largest / TAPER``, and from there to zero at ``largest``, with all derivatives (B, D)."""
    square = wavevectors.square().sum(2)
    fading = (square > (largest / TAPER) ** 2) & (square < largest**2)
    wave = torch.where(fading, square, (largest * (1 + 1 / TAPER) / 2) ** 2).sqrt()
    place = ((wave * TAPER / largest - 1) / (TAPER - 1)).clamp(1e-6, 1 - 1e-6)  # whose ends are zeros anyhow
    falls, rises = (-1 / (1 - place)).exp(), (-1 / place).exp()
    return torch.where(fading, falls / (falls + rises), (square < largest**2).to(square.dtype))


def count_of_waves(volume: float, largest: float) -> float:
    """About how many waves, one of each pair, a cell of this volume has."""
    return volume * largest**3 / (12 * math.pi**2)


def _found(vectors: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Numbers (B, D, 3) of the waves of each cell, and how many waves each stands for, (B, D), zero for padding."""
    if checks.is_traced(vectors) or checks.is_batched(vectors):
        raise ValueError("max_waves must be given where cells are traced or mapped over, got None")
    cells = vectors.detach().to("cpu", torch.float64).flatten(1).tolist()
    found = [_numbers_of(tuple(cell), largest) for cell in cells]
    longest = max((len(numbers) for numbers in found), default=0)
    numbers = torch.zeros(len(found), longest, 3, dtype=torch.int64, device="cpu")
    counts = torch.zeros(len(found), longest, dtype=torch.int64, device="cpu")
    for row, own in enumerate(found):
        numbers[row, : len(own)] = own
        counts[row, : len(own)] = 2
        counts[row, 0] = 1
    return numbers.to(vectors.device), counts.to(vectors.device)


@functools.lru_cache(maxsize=1024)
@ordinary_tensors()
def _numbers_of(entries: tuple[float, ...], largest: float) -> Tensor:
    """(D, 3) of one cell, the first zero."""
    cell = torch.tensor(entries, dtype=torch.float64, device="cpu").view(3, 3)
    # |n_a| = |a . k| / 2 pi <= |a| largest / 2 pi
    bounds = [math.floor(length * largest / (2 * math.pi)) for length in cell.norm(dim=1).tolist()]
    if count_of_waves(float(cell.det().abs()), largest) > _MOST:
        raise ValueError(
            f"width must be larger, or method='pairs', for so large a cell: {cell.tolist()} has "
            f"{count_of_waves(float(cell.det().abs()), largest):,.0f} waves shorter than {largest:.3g}, and more than "
            f"{_MOST:,} are refused; a width twice as large has an eighth of them"
        )
    numbers = half_lattice(bounds[0], bounds[1], bounds[2], cell.device)
    wavevectors = 2 * math.pi * numbers.double() @ torch.linalg.inv(cell).T
    return numbers[wavevectors.square().sum(1) < largest**2]


def half_lattice(first: int, second: int, third: int, device: torch.device) -> Tensor:
    """Three integers within these bounds, (D, 3): zero, then one of each pair of opposite ones."""
    axes = [torch.arange(-n, n + 1, device=device) for n in (first, second, third)]
    numbers = torch.cartesian_prod(*axes)
    return numbers[len(numbers) // 2 :]  # in this order n and -n lie opposite about zero


def _fixed(vectors: Tensor, bound: tuple[int, int, int], largest: float) -> tuple[Tensor, Tensor]:
    """All numbers within ``bound``, whatever the cells are, if these have no waves beyond."""
    needed = vectors.detach().norm(dim=2) * largest / (2 * math.pi)
    fits = torch.stack([needed[:, axis] < n + 1 for axis, n in enumerate(bound)]).all()
    numbers = half_lattice(*bound, vectors.device).expand(vectors.shape[0], -1, -1)
    counts = torch.where((numbers == 0).all(2), 1, 2)
    if checks.values_are_free(vectors):
        if vectors.shape[0] and not bool(fits):
            most = needed.floor().amax(0).long().tolist()
            raise ValueError(f"max_waves must be at least {tuple(most)} for kernels of this width, got {bound}")
    elif not checks.is_traced(vectors) and checks.is_batched(vectors):  # torch.vmap lets nothing be raised
        counts = torch.where(fits, counts, torch.nan)
    else:
        torch._assert_async(fits, "max_waves must be larger for these cells")
    return numbers, counts
