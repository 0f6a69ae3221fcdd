"""Cells of crystals, slabs and open clouds, and the waves that repeat with them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...modes import ordinary_tensors
from ...pairs import read_lattice
from ...ranks import Ranks
from .kernels import Part

_MOST = 2**23  # waves of one graph and kernel, whose table would be larger than a memory
TAPER = 1.1  # from the largest wavenumber that is promised to this times it, waves fade


class Cells(NamedTuple):
    """What repeats: lattice vectors as rows, (B, 3, 3) in float64, unit vectors where there are none; and along
    which a graph repeats, bool (B, 3): all three, two, or none."""

    vectors: Tensor
    periodic: Tensor

    @classmethod
    def none(cls, count: int, device: torch.device) -> Cells:
        """Of graphs of which none repeats."""
        unit = torch.eye(3, dtype=torch.float64, device=device).expand(count, 3, 3)
        return cls(unit, torch.zeros(count, 3, dtype=torch.bool, device=device))

    def of(self, graphs: Tensor | None) -> Cells:
        """Of some of the graphs, None for all."""
        return self if graphs is None else Cells(*(x.index_select(0, graphs) for x in self))

    def normals(self) -> Tensor:
        """Unit vectors along what does not repeat, (B, 3, 3): across a slab, along x, y, z for open clouds."""
        across = torch.linalg.cross(self.vectors.roll(-1, 1), self.vectors.roll(-2, 1))  # of the two others, for each
        length = across.square().sum(2, keepdim=True)
        across = across / torch.where(length > 0, length, 1.0).sqrt()
        unit = Cells.none(1, across.device).vectors
        return torch.where(self.periodic.any(1)[:, None, None], across, unit)

    def extents(self, pos: Tensor, mask: Tensor | None, ranks: Ranks | None) -> Tensor:
        """How far nodes ``(B, N, 3)`` lie apart along what does not repeat, (B, 3), zero along the rest."""
        with torch.no_grad():
            along = torch.einsum("bnx,bax->bna", pos, self.normals())
            ends = torch.stack([along, -along], 2)
            ends = ends if mask is None else ends.masked_fill(~mask[..., None, None], -torch.inf)
            ends = torch.nn.functional.pad(ends, (0, 0, 0, 0, 0, 1), value=-torch.inf).amax(1)  # if there are no nodes
            ends = ends if ranks is None else ranks.largest(ends)
            return torch.where(self.periodic, 0.0, ends.sum(1).clamp(min=0).nan_to_num(0, 0, 0))


def cells_of(cell: Tensor | None, pbc: Tensor | None, count: int, like: Tensor) -> Cells | None:
    """What users give, of so many graphs with features ``like``, checked; ``None`` where nothing repeats."""
    if cell is None:
        none = isinstance(pbc, Tensor) and checks.values_are_free(pbc) and not bool(pbc.any())
        if pbc is not None and not none:
            raise ValueError("cell must be given with pbc, got None")
        return None
    vectors, periodic = read_lattice(cell, pbc, count, like)
    wires = periodic.sum(1) == 1
    if checks.values_are_free(wires) and bool(wires.any()):
        raise ValueError(
            f"{'cell' if pbc is None else 'pbc'} must let graph {int(wires.nonzero()[0])} repeat along three "
            "directions, two or none, got one: the potential of a wire grows with the logarithm of the distance, "
            "whatever its waves; give it two vectors more, with vacuum"
        )
    return Cells(torch.where(periodic[..., None], vectors, Cells.none(count, like.device).vectors), periodic)


class Lattice(NamedTuple):
    """The waves of a part, one of each pair of opposite ones: 2 pi times the fractions of nodes, (B, N, 3); int64 n and
    wavevectors in double precision, (B, D, 3); how many waves each stands for, divided by the volume, fading towards
    the largest, times 4 pi / k^2 where the kernel ends, (B, D)."""

    angles: Tensor
    numbers: Tensor
    wavevectors: Tensor
    weights: Tensor


def lattice_of(
    cells: Cells, pos: Tensor, extent: Tensor, part: Part, phase: float, dtype: torch.dtype,
    bound: tuple[int, int, int] | None = None,
) -> Lattice:  # fmt: skip
    r"""The waves of a part up to the phase s k and what fades beyond, within a bound of their integers or, where there
    is none, by reading cells; for nodes (B, N, 3) whose extents are (B, 3).

    Waves that repeat with a cell A have wavevectors :math:`k = 2 \pi A^{-1} n` with n three integers, so at a position
    x = f A their phase is :math:`2 \pi\, n \cdot f`: it hangs on the fractions f alone, which are wrapped before they
    are multiplied. Along what does not repeat there is a box so wide that no image comes near: with a margin, of the
    phase times the largest width, of Gaussians the extent and the margin; of potentials, which end at R, the largest
    distance and the margin, the extent, R and the margin, or twice R across a slab. It hangs on positions without
    gradients, as sums do not hang on it but for what is promised.
    """
    periodic, largest, margin = cells.periodic, TAPER * phase / part.least, phase * part.largest
    normals = cells.normals()
    radius = extent.norm(dim=1) + margin
    box = extent + margin
    if part.ends:
        slab = periodic.any(1, keepdim=True)
        box = torch.where(slab, 2 * radius[:, None], extent + radius[:, None] + margin)
    full = torch.where(periodic[..., None], cells.vectors, normals * box[..., None])
    inverse, volume = _inverse(full)
    fractions = torch.einsum("bnx,bxa->bna", pos, inverse)
    fractions = fractions - torch.where(periodic[:, None], fractions.detach().round(), 0.0)
    numbers, counts = _fixed(full, bound, largest) if bound is not None else _found(full, largest)
    waves = 2 * math.pi * numbers.to(full.dtype) @ inverse.mT
    weights = counts.to(full.dtype) / volume[:, None] * _taper(waves, largest)
    if part.ends:
        normal = torch.where(periodic[..., None], 0.0, normals).sum(1, keepdim=True)  # of slabs, which have one
        weights = weights * _coulomb(numbers, waves, radius[:, None], normal, periodic)
    return Lattice((2 * math.pi * fractions).to(dtype), numbers, waves, weights)


def _inverse(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse (B, 3, 3) of cells and their volumes (B,), by cross products, which compilers take whole."""
    across = torch.linalg.cross(vectors.roll(-1, 1), vectors.roll(-2, 1))
    volume = (vectors[:, 0] * across[:, 0]).sum(1)
    return across.mT / volume[:, None, None], volume.abs()


def _coulomb(numbers: Tensor, waves: Tensor, radius: Tensor, normal: Tensor, periodic: Tensor) -> Tensor:
    r""":math:`4 \pi / k^2` of potentials (B, D): without k = 0 where graphs repeat in three directions, ending at the
    radius where they do not (in a sphere, Vico et al.; in a layer, Rozzi et al.)."""
    square = waves.square().sum(2)
    zero = (numbers == 0).all(2)
    whole = 4 * math.pi / torch.where(zero, 1.0, square)
    half = torch.where(zero, 1.0, square).sqrt() * radius / 2
    ball = 2 * math.pi * radius.square() * torch.where(zero, 1.0, half.sin() / half).square()
    along = waves - (waves * normal).sum(2, keepdim=True) * normal
    slanted = (numbers * periodic[:, None] != 0).any(2)
    along = torch.where(slanted[..., None], along, 0.0).square().sum(2)
    fall = torch.where(slanted, -torch.where(slanted, along, 1.0).sqrt() * radius, 0.0).exp()
    odd = (numbers * ~periodic[:, None]).sum(2).remainder(2)  # cos(k R) across, as the box is 2 R thick
    layer = torch.where(zero, -2 * math.pi * radius.square(), whole * (1 - (1 - 2 * odd) * fall))
    repeats = periodic.sum(1)[:, None]
    return torch.where(repeats == 3, torch.where(zero, 0.0, whole), torch.where(repeats == 2, layer, ball))


def _taper(wavevectors: Tensor, largest: float) -> Tensor:
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
    found = torch.nn.utils.rnn.pad_sequence([_numbers_of(tuple(cell), largest) for cell in cells], batch_first=True)
    return found[..., :3].to(vectors.device), found[..., 3].to(vectors.device)


@functools.lru_cache(maxsize=1024)
@ordinary_tensors()
def _numbers_of(entries: tuple[float, ...], largest: float) -> Tensor:
    """Of one cell (D, 4), n and how many waves it stands for, the first zero."""
    cell = torch.tensor(entries, dtype=torch.float64, device="cpu").view(3, 3)
    count = count_of_waves(float(cell.det().abs()), largest)
    if count > _MOST:
        raise ValueError(
            f"width must be larger, or method='pairs', for so large a cell: {cell.tolist()} has {count:,.0f} waves "
            f"shorter than {largest:.3g}, and more than {_MOST:,} are refused; a width twice as large has an eighth of "
            "them"
        )
    # |n_a| = |a . k| / 2 pi <= |a| largest / 2 pi
    first, second, third = (math.floor(length * largest / (2 * math.pi)) for length in cell.norm(dim=1).tolist())
    numbers = _half_lattice(first, second, third, cell.device)
    wavevectors = 2 * math.pi * numbers[:, :3].double() @ torch.linalg.inv(cell).T
    return numbers[wavevectors.square().sum(1) < largest**2]


def _half_lattice(first: int, second: int, third: int, device: torch.device) -> Tensor:
    """Three integers within these bounds and how many waves they stand for, (D, 4): zero, then one of each pair of
    opposite ones."""
    axes = [torch.arange(-n, n + 1, device=device) for n in (first, second, third)]
    numbers = torch.cartesian_prod(*axes)
    numbers = numbers[len(numbers) // 2 :]  # in this order n and -n lie opposite about zero
    return torch.cat([numbers, torch.where((numbers == 0).all(1, keepdim=True), 1, 2)], 1)


def _fixed(vectors: Tensor, bound: tuple[int, int, int], largest: float) -> tuple[Tensor, Tensor]:
    """All numbers within ``bound``, whatever the cells are, if these have no waves beyond."""
    needed = vectors.detach().norm(dim=2) * largest / (2 * math.pi)
    fits = torch.stack([needed[:, axis] < n + 1 for axis, n in enumerate(bound)]).all()
    found = _half_lattice(*bound, vectors.device).expand(vectors.shape[0], -1, -1)
    numbers, counts = found[..., :3], found[..., 3]
    if checks.values_are_free(vectors):
        if vectors.shape[0] and not bool(fits):
            most = needed.floor().amax(0).long().tolist()
            raise ValueError(f"max_waves must be at least {tuple(most)} for kernels of this width, got {bound}")
    elif not checks.is_traced(vectors) and checks.is_batched(vectors):  # torch.vmap lets nothing be raised
        counts = torch.where(fits, counts, torch.nan)
    else:
        torch._assert_async(fits, "max_waves must be larger for these cells")
    return numbers, counts
