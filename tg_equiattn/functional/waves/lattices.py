"""Cells of crystals, slabs and open clouds, and the waves that repeat with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
    if not checks.values_are_free(wires):
        if checks.is_traced(wires) or not checks.is_batched(wires):  # torch.vmap lets nothing be raised
            torch._assert_async(~wires.any(), "graphs must repeat along three directions, two or none, not one")
    elif bool(wires.any()):
        raise ValueError(
            f"{'cell' if pbc is None else 'pbc'} must let graph {int(wires.nonzero()[0])} repeat along three "
            "directions, two or none, got one: the potential of a wire grows with the logarithm of the distance, "
            "whatever its waves; give it two vectors more, with vacuum"
        )
    return Cells(torch.where(periodic[..., None], vectors, Cells.none(count, like.device).vectors), periodic)


class Lattice(NamedTuple):
    """The waves of some parts, one part after the other, one of each pair of opposite ones: 2 pi times the fractions of
    nodes in the box of the first part, (B, N, 3); what these are multiplied with, n times the ratio of boxes, and
    wavevectors in double precision, (B, D, 3); how many waves each stands for, divided by the volume, fading towards
    the largest, times 4 pi / k^2 where the part ends, (B, D); the part of each wave and whether it ends, (D,), or
    (1,) of one part; and how many waves each part has."""

    angles: Tensor
    numbers: Tensor
    wavevectors: Tensor
    weights: Tensor
    part: Tensor
    ends: Tensor
    counts: list[int]


def lattice_of(
    cells: Cells, pos: Tensor, extent: Tensor, parts: Sequence[Part], phase: float, dtype: torch.dtype,
    bounds: Sequence[tuple[int, int, int]] | None = None,
) -> Lattice:  # fmt: skip
    r"""The waves of parts up to the phase s k and what fades beyond, within bounds of their integers or, of one part,
    by reading cells; for nodes (B, N, 3) whose extents are (B, 3).

    Waves that repeat with a cell A have wavevectors :math:`k = 2 \pi A^{-1} n` with n three integers, so at a position
    x = f A their phase is :math:`2 \pi\, n \cdot f`: it hangs on the fractions f alone, which are wrapped before they
    are multiplied. Along what does not repeat there is a box so wide that no image comes near: with a margin, of the
    phase times the largest width, of Gaussians the extent and the margin; of potentials, which end at R, the largest
    distance and the margin, the extent, R and the margin, or twice R across a slab. It hangs on positions without
    gradients, as sums do not hang on it but for what is promised. As boxes are all there is between parts, one set of
    fractions does for all.
    """
    periodic, normals = cells.periodic, cells.normals()
    own = [(TAPER * phase / part.least, phase * part.largest, part.ends) for part in parts]
    largest, margin, ends = _table(own, torch.float64, pos.device).unbind(1)  # P
    ends = ends != 0
    radius = extent.norm(dim=1)[:, None] + margin  # B, P
    box = extent[:, None] + margin[:, None]  # B, P, 3
    if any(part.ends for part in parts):
        slab = periodic.any(1)[:, None, None]
        box = torch.where(ends[:, None], torch.where(slab, 2 * radius[..., None], box + radius[..., None]), box)
    full = torch.where(periodic[..., None], cells.vectors, normals * box[:, 0, :, None])
    ratio = torch.where(periodic[:, None], 1.0, box[:, :1] / box)  # of boxes, of the first and of each part
    inverse, volume = _inverse(full)
    fractions = torch.einsum("bnx,bxa->bna", pos, inverse)
    fractions = fractions - torch.where(periodic[:, None], fractions.detach().round(), 0.0)
    if bounds is None:
        numbers, stands = _found(full, own[0][0])
        part, each = torch.zeros(1, dtype=torch.int64, device=pos.device), [numbers.shape[1]]
    else:
        lengths = full.detach().norm(dim=2)[:, None] / ratio
        numbers, stands, part, each = _fixed(lengths, bounds, largest)
        part = part[:1] if len(parts) == 1 else part
    of = {"radius": radius, "ratio": ratio, "volume": volume[:, None] / ratio.prod(2)}
    of = {name: x if len(parts) == 1 else x.index_select(1, part) for name, x in of.items()}  # B, D or 1, ...
    steps = numbers.to(full.dtype) * of["ratio"]
    waves = 2 * math.pi * steps @ inverse.mT
    weights = stands.to(full.dtype) / of["volume"] * _taper(waves, largest[part])
    if any(part.ends for part in parts):
        normal = torch.where(periodic[..., None], 0.0, normals).sum(1, keepdim=True)  # of slabs, which have one
        ended = _coulomb(numbers, waves, of["radius"], normal, periodic)
        weights = weights * torch.where(ends[part], ended, 1.0)
    return Lattice((2 * math.pi * fractions).to(dtype), steps, waves, weights, part, ends[part], each)


def _table(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of each part; of a single one made on the device, as is wherever nothing is traced, without a copy."""
    if len(rows) > 1:
        return torch.tensor(rows, dtype=dtype, device=device)
    return torch.cat([torch.full((1, 1), x, dtype=dtype, device=device) for x in rows[0]], 1)


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


def _taper(wavevectors: Tensor, largest: Tensor) -> Tensor:
    """1 up to ``largest / TAPER`` (D,), and from there to zero at ``largest``, with all derivatives (B, D)."""
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
    numbers = _half_lattice((first, second, third), cell.device)
    wavevectors = 2 * math.pi * numbers[:, :3].double() @ torch.linalg.inv(cell).T
    return numbers[wavevectors.square().sum(1) < largest**2]


def _half_lattice(bound: tuple[int, int, int], device: torch.device) -> Tensor:
    """Three integers within a bound and how many waves they stand for, (D, 4): zero, then one of each pair of opposite
    ones."""
    place = torch.arange((math.prod(2 * n + 1 for n in bound) + 1) // 2, device=device)
    numbers = _numbers_at(place, torch.tensor(bound, device=device))
    return torch.cat([numbers, torch.where((numbers == 0).all(1, keepdim=True), 1, 2)], 1)


def _numbers_at(place: Tensor, bound: Tensor) -> Tensor:
    """The integers (D, 3) at places (D,) from zero on among all within a bound, (3,) or (D, 3), in an order in which n
    and -n lie opposite about zero."""
    first, second, third = (2 * bound + 1).unbind(-1)
    place = place + first * second * third // 2
    return torch.stack([place // (second * third), place // third % second, place % third], 1) - bound


def _fixed(
    lengths: Tensor, bounds: Sequence[tuple[int, int, int]], largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """All numbers within each part's bound, whatever cells are, if these, of sides (B, P, 3), have no waves beyond; how
    many waves each stands for, the part of each, and how many each part has."""
    device = lengths.device
    needed = lengths * largest[:, None] / (2 * math.pi)
    most = _table(bounds, torch.int64, device)  # P, 3
    fits = (needed < most + 1).all()
    counts = [((2 * a + 1) * (2 * b + 1) * (2 * c + 1) + 1) // 2 for a, b, c in bounds]
    each = _table([(n,) for n in counts], torch.int64, device)[:, 0]
    ends = each.cumsum(0)
    place = torch.arange(sum(counts), device=device)
    part = (place[:, None] >= ends).sum(1)
    numbers = _numbers_at(place - (ends - each)[part], most[part])
    stands = torch.where((numbers == 0).all(1), 1, 2)
    if checks.values_are_free(lengths):
        if lengths.shape[0] and not bool(fits):
            wanted = needed[:, 0].floor().amax(0).long().tolist()
            raise ValueError(f"max_waves must be at least {tuple(wanted)} for kernels of this width, got {bounds[0]}")
    elif not checks.is_traced(lengths) and checks.is_batched(lengths):  # torch.vmap lets nothing be raised
        stands = torch.where(fits, stands, torch.nan)
    else:
        torch._assert_async(fits, "max_waves must be larger for these cells")
    count = lengths.shape[0]
    return numbers.expand(count, -1, -1), stands.expand(count, -1), part, counts
