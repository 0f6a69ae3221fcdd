"""Cells of crystals, slabs and open graphs, and reciprocal vectors of them and of boxes around open graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..shapes import Bool, Float, Int, Shaped
from ..tiles import joined
from ..torch_state import cached, is_mapped, is_readable
from .harmonics import solid_harmonics
from .kernels import Interaction

_FLAT = 1e-6  # smallest volume of a unit cell, relative to a box with edges of the same lengths
_MOST = 2**23  # largest number of reciprocal vectors of a graph and kernel; a larger table would not fit into memory
_FEW = 64  # in crystals, smallest number of vectors of a kernel: kernels with few are computed together
_ALIKE = 1.25  # also kernels whose numbers differ by less than this factor
TAPER = 1.1  # weights fade to zero between the cutoff and this times the cutoff


class Cells(NamedTuple):
    """Cells of graphs.

    Attributes:
        vectors: lattice vectors as rows, in float64; unit vectors along directions that do not repeat.
        periodic: true for directions along which a graph repeats: all three, two, or none.
    """

    vectors: Float[Tensor, "graphs 3 3"]
    periodic: Bool[Tensor, "graphs 3"]

    @classmethod
    def none(cls, count: int, device: torch.device) -> Cells:
        """Cells of graphs that do not repeat."""
        unit = torch.eye(3, dtype=torch.float64, device=device).expand(count, 3, 3)
        return cls(unit, torch.zeros(count, 3, dtype=torch.bool, device=device))

    def select(self, graphs: Tensor | None) -> Cells:
        """Cells of some of the graphs; ``None`` means all."""
        return self if graphs is None else Cells(*(x.index_select(0, graphs) for x in self))

    def normals(self) -> Float[Tensor, "graphs 3 3"]:
        """Unit vectors along directions that do not repeat: the normal of a slab, or x, y and z."""
        across = torch.linalg.cross(self.vectors.roll(-1, 1), self.vectors.roll(-2, 1))  # products of the other two
        length = across.square().sum(2, keepdim=True)
        across = across / torch.where(length > 0, length, 1.0).sqrt()
        unit = Cells.none(1, across.device).vectors
        return torch.where(self.periodic.any(1)[:, None, None], across, unit)

    def extents(
        self, pos: Float[Tensor, "graphs nodes 3"], mask: Bool[Tensor, "graphs nodes"] | None
    ) -> Float[Tensor, "graphs 3"]:
        """Largest distance between nodes along each direction that does not repeat, zero along the others."""
        with torch.no_grad():
            along = torch.einsum("bnx,bax->bna", pos, self.normals())
            ends = torch.stack([along, -along], 2)
            ends = ends if mask is None else ends.masked_fill(~mask[..., None, None], -torch.inf)
            ends = torch.nn.functional.pad(ends, (0, 0, 0, 0, 0, 1), value=-torch.inf).amax(1)  # there may be no nodes
            return torch.where(self.periodic, 0.0, ends.sum(1).clamp(min=0).nan_to_num(0, 0, 0))


def cells_of(cell: Tensor | None, pbc: Tensor | None, count: int, like: Tensor) -> Cells | None:
    """Check the cells of ``count`` graphs and return them on the device of ``like``; ``None`` if no graph repeats."""
    if cell is None:
        none = isinstance(pbc, Tensor) and is_readable(pbc, wait=True) and not bool(pbc.any())
        if pbc is not None and not none:
            raise ValueError("cell must be given with pbc, got None")
        return None
    checks.tensor("cell", cell, "floating point", [(3, 3), (count, 3, 3), (1, 3, 3), (3 * count, 3)], like.device)
    if pbc is not None:
        checks.tensor("pbc", pbc, torch.bool, [(3,), (count, 3), (1, 3), (3 * count,)], like.device)
        if is_readable(pbc) and not bool(pbc.any()):
            return None
    vectors, periodic = _read_lattice(cell, pbc, count)
    wires, name = periodic.sum(1) == 1, "cell" if pbc is None else "pbc"
    note = f"{name} must let graphs repeat along three directions, two or none"
    checks.must_hold(
        ~wires.any(), note, lambda: (
            f", got one for graph {int(wires.nonzero()[0])}: the potential of a wire grows with the logarithm of the "
            "distance; give the cell two more lattice vectors, with vacuum"
        ),
    )  # fmt: skip
    return Cells(torch.where(periodic[..., None], vectors, Cells.none(count, like.device).vectors), periodic)


def _read_lattice(
    cell: Tensor, pbc: Tensor | None, graphs: int
) -> tuple[Float[Tensor, "graphs 3 3"], Bool[Tensor, "graphs 3"]]:
    """Check the lattice vectors of graphs.

    ``cell`` is one for all graphs, one for each, or (3 graphs, 3) as PyG batches them. Return the lattice vectors
    as rows in float64, zero along directions that do not repeat, and the directions that repeat.
    """
    vectors = cell.double().reshape(-1, 3, 3).expand(graphs, 3, 3)
    periodic = (vectors != 0).any(2) if pbc is None else pbc.reshape(-1, 3).expand(graphs, 3)
    _check_lattice(periodic, vectors.detach())
    return torch.where(periodic[..., None], vectors, 0.0), periodic


def _check_lattice(periodic: Bool[Tensor, "graphs 3"], vectors: Float[Tensor, "graphs 3 3"]) -> None:
    if not is_readable(periodic, vectors):
        return
    checks.finite("cell", vectors)
    length = vectors.norm(dim=2)
    without = ((length == 0) & periodic).any(1)
    if bool(without.any()):
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {vectors[without][0].tolist()}")
    units = torch.where(periodic, 1 / length.clamp(min=1e-300), 0.0)[..., None] * vectors
    flat = (units @ units.mT + torch.diag_embed((~periodic).double())).det() <= _FLAT**2
    if bool(flat.any()):
        wanted = "a volume, got lattice vectors that depend on each other"
        raise ValueError(f"cell must have {wanted}: {vectors[flat][0].tolist()}")


class Lattice(NamedTuple):
    """Reciprocal vectors k of some kernels, with one vector of each pair k and -k.

    The phase k . x of a node is the scalar product of its ``angles`` with ``numbers``.

    Attributes:
        angles: 2 pi times the fractional coordinates of nodes in the box of the first kernel.
        numbers: Miller indices times the ratio of the box of the first kernel to that of k.
        weights: Fourier transforms of kernels times Y_l(k), and 2 for a pair k and -k or 1 for zero, divided by the
            volume; they fade to zero beyond the cutoff. Kernels follow one another.
        ratio: ratio of the box of the first kernel to that of each kernel.
        spans: first and last vector of each kernel. In crystals all spans begin at 0.
    """

    angles: Float[Tensor, "graphs nodes 3"]
    numbers: Float[Tensor, "graphs vectors 3"]
    weights: Float[Tensor, "graphs terms heads harmonics"]
    ratio: Float[Tensor, "graphs kernels 3"]
    spans: list[tuple[int, int]]


def lattice_of(
    cells: Cells, pos: Float[Tensor, "graphs nodes 3"], extent: Float[Tensor, "graphs 3"], interaction: Interaction
) -> Lattice:
    r"""Reciprocal vectors up to the cutoffs of kernels.

    With ``max_hkl``, these are all Miller indices within bounds, and cells are not read. Otherwise Miller indices are
    found by reading the cells. If all graphs are crystals, kernels share one list of them, sorted by length, and each
    kernel has the first ones. The reciprocal vectors of a cell A are :math:`k = 2 \pi A^{-1} n` with three
    integers n, so at a position x = f A the phase is :math:`2 \pi\, n \cdot f`. It depends on the fractions f only,
    which are wrapped before they are multiplied.

    Along directions that do not repeat there is a box, so wide that images do not interact: its side is the sum of the
    extent and the margin of a kernel. Long-range kernels are truncated at R, the sum of the largest distance and the
    margin. Their boxes have sides of extent + R + margin, and 2 R for slabs. Boxes depend on positions without
    gradients, since sums depend on the box by less than the promised error. Boxes of several kernels differ by factors,
    so they share one set of fractions.

    Args:
        cells: cells of the graphs.
        pos: positions of the nodes.
        extent: largest distance between nodes along each direction that does not repeat.
        interaction: the kernels.
    """
    periodic, normals, ranges = cells.periodic, cells.normals(), interaction.ranges
    bounds, truncates = interaction.hkl_bounds(), any(reach.long_range for reach in ranges)
    ends = [TAPER * reach.cutoff for reach in ranges]
    table = _table([(end, reach.margin, reach.long_range) for end, reach in zip(ends, ranges, strict=True)], pos.device)
    cutoff, margin, truncated = table.unbind(1)  # P
    radius = extent.norm(dim=1)[:, None] + margin  # B, P
    box = extent[:, None] + margin[:, None]  # B, P, 3
    if truncates:
        is_slab = periodic.any(1)[:, None, None]
        wide = torch.where(is_slab, 2 * radius[..., None], box + radius[..., None])
        box = torch.where(truncated[:, None] != 0, wide, box)
    full = torch.where(periodic[..., None], cells.vectors, normals * box[:, 0, :, None])
    ratio = torch.where(periodic[:, None], 1.0, box[:, :1] / box)  # first box over the box of each kernel
    inverse, volume = _inverse(full)
    fractions = torch.einsum("bnx,bxa->bna", pos, inverse)
    fractions = fractions - torch.where(periodic[:, None], fractions.detach().round(), 0.0)
    shared = bounds is None and is_readable(periodic, wait=True) and bool(periodic.all())
    if bounds is None:
        boxes = full[:, None] / ratio[:, : 1 if shared else None, :, None]
        numbers, counts = _listed(boxes, [tuple(ends)] if shared else [(end,) for end in ends])
        numbers, stands = numbers[..., :3], numbers[..., 3]
        counts = _rounded(counts) if shared else counts
    else:
        numbers, stands, counts = _bounded(full.detach().norm(dim=2)[:, None] / ratio, bounds, cutoff)
    kernel = _kernels_of(counts, pos.device)
    boxed = radius, ratio, volume[:, None] / ratio.prod(2)
    radius, scale, volume = (x if len(counts) == 1 else x.index_select(1, kernel) for x in boxed)
    steps = numbers.to(full.dtype) if shared else numbers * scale
    if shared:
        numbers, stands = (joined([x[:, :n] for n in counts], 1) for x in (numbers, stands))
    vectors = 2 * math.pi * (numbers.to(full.dtype) * scale) @ inverse.mT
    square, weights = vectors.square().sum(2), stands.to(full.dtype) / volume
    coulomb = torch.zeros_like(square)
    if truncates:
        normal = torch.where(periodic[..., None], 0.0, normals).sum(1, keepdim=True)  # the normal of a slab
        coulomb = _coulomb(numbers, vectors, square, radius, normal, periodic)
    weights, first, transforms = weights * _taper(square, cutoff[kernel]), 0, []
    stops = [0, *itertools.accumulate(counts)]
    for own in interaction.kernels:
        start, end = stops[first], stops[first + own.count]
        transforms.append(own.reciprocal(square[:, start:end], coulomb[:, start:end], kernel[start:end] - first))
        first += own.count
    every = joined(transforms, 1)
    every = torch.cat([every[..., n, None].expand(-1, -1, -1, 2 * n + 1) for n in range(every.shape[3])], 3)
    weights = every * (weights[..., None] * solid_harmonics(vectors, interaction.lmax))[:, :, None]
    spans = [(0, n) for n in counts] if shared else [*itertools.pairwise(stops)]
    return Lattice(2 * math.pi * fractions, steps, weights, ratio, spans)


def _rounded(counts: Sequence[int]) -> list[int]:
    """Numbers of vectors of kernels that share them, with numbers that differ by little made equal, so that these
    kernels are computed together."""
    out, last = list(counts), 0
    for c in sorted(range(len(out)), key=lambda c: -out[c]):
        if out[c] <= last <= max(_FEW, _ALIKE * out[c]):
            out[c] = last
        last = out[c]
    return out


def _kernels_of(counts: Sequence[int], device: torch.device) -> Int[Tensor, " #terms"]:
    """The kernel of each vector where they stand one kernel after the other; one entry for a single kernel."""
    each = [torch.full((1 if len(counts) == 1 else n,), p, device=device) for p, n in enumerate(counts)]
    return joined(each, 0)


def _table(
    rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.float64
) -> Shaped[Tensor, "kernels numbers"]:
    """A table with a row of numbers for each kernel. An accelerator makes it itself, since it would wait for a copy."""
    if len(rows) > 1 and device.type == "cpu":
        return torch.tensor(rows, dtype=dtype)
    each = [torch.full((1, 1), x, dtype=dtype, device=device) for row in rows for x in row]
    return torch.cat(each, 1).view(len(rows), -1)


def _inverse(vectors: Float[Tensor, "graphs 3 3"]) -> tuple[Float[Tensor, "graphs 3 3"], Float[Tensor, " graphs"]]:
    """Inverses and volumes of cells, by cross products, which compilers fuse."""
    across = torch.linalg.cross(vectors.roll(-1, 1), vectors.roll(-2, 1))
    volume = (vectors[:, 0] * across[:, 0]).sum(1)
    return across.mT / volume[:, None, None], volume.abs()


def _coulomb(
    numbers: Int[Tensor, "graphs vectors 3"], vectors: Float[Tensor, "graphs vectors 3"],
    square: Float[Tensor, "graphs vectors"], radius: Float[Tensor, "graphs _"], normal: Float[Tensor, "graphs 1 3"],
    periodic: Bool[Tensor, "graphs 3"],
) -> Float[Tensor, "graphs vectors"]:  # fmt: skip
    r""":math:`4 \pi / k^2`: without k = 0 in crystals, truncated at the radius in open graphs (a sphere, Vico et
    al. 2016) and in slabs (a layer, Rozzi et al. 2006)."""
    zero = (numbers == 0).all(2)
    whole = 4 * math.pi / torch.where(zero, 1.0, square)
    half = torch.where(zero, 1.0, square).sqrt() * radius / 2
    sphere = 2 * math.pi * radius.square() * torch.where(zero, 1.0, half.sin() / half).square()
    along = vectors - (vectors * normal).sum(2, keepdim=True) * normal
    slanted = (numbers * periodic[:, None] != 0).any(2)
    along = torch.where(slanted[..., None], along, 0.0).square().sum(2)
    decay = torch.where(slanted, -torch.where(slanted, along, 1.0).sqrt() * radius, 0.0).exp()
    odd = (numbers * ~periodic[:, None]).sum(2).remainder(2)  # cos(k R) across the slab, whose box is 2 R thick
    layer = torch.where(zero, -2 * math.pi * radius.square(), whole * (1 - (1 - 2 * odd) * decay))
    repeats = periodic.sum(1)[:, None]
    return torch.where(repeats == 3, torch.where(zero, 0.0, whole), torch.where(repeats == 2, layer, sphere))


def _taper(square: Float[Tensor, "graphs terms"], end: Float[Tensor, " #terms"]) -> Float[Tensor, "graphs terms"]:
    """Weights: 1 up to ``end / TAPER``, and from there to zero at ``end``, with all derivatives."""
    fading = (square > (end / TAPER) ** 2) & (square < end**2)
    length = torch.where(fading, square, (end * (1 + 1 / TAPER) / 2) ** 2).sqrt()
    place = ((length * TAPER / end - 1) / (TAPER - 1)).clamp(1e-6, 1 - 1e-6)  # at both ends all derivatives are 0
    falls, rises = (-1 / (1 - place)).exp(), (-1 / place).exp()
    return torch.where(fading, falls / (falls + rises), (square < end**2).to(square.dtype))


def count_of_vectors(volume: float, end: float) -> float:
    """The approximate number of reciprocal vectors of a cell up to the wavenumber ``end``, one of each pair."""
    return volume * end**3 / (12 * math.pi**2)


def _listed(
    boxes: Float[Tensor, "graphs boxes 3 3"], ends: Sequence[tuple[float, ...]]
) -> tuple[Int[Tensor, "graphs vectors 4"], list[int]]:
    """Miller indices of the reciprocal vectors of each box, zero first. The last column is the number of vectors that
    an index stands for, zero for padding. Return also, for each end, the number of first indices up to it."""
    if not is_readable(boxes, wait=True):
        raise ValueError("max_hkl must be given where cells are traced or mapped over, got None")
    numbers: list[Tensor] = []
    counts: list[int] = []
    for box, cutoffs in zip(boxes.detach().to("cpu", torch.float64).flatten(2).unbind(1), ends, strict=True):
        indices, each = zip(*(_indices_of(tuple(entries), cutoffs) for entries in box.tolist()), strict=True)
        numbers.append(torch.nn.utils.rnn.pad_sequence(list(indices), batch_first=True))
        counts += [max(of_graphs) for of_graphs in zip(*each, strict=True)]
    return joined(numbers, 1).to(boxes.device), counts


@cached(maxsize=1024)
def _indices_of(entries: tuple[float, ...], ends: tuple[float, ...]) -> tuple[Int[Tensor, "vectors 4"], list[int]]:
    """:func:`_listed` of one box, sorted by the lengths of vectors."""
    largest = max(ends)
    cell = torch.tensor(entries, dtype=torch.float64, device="cpu").view(3, 3)
    count = count_of_vectors(float(cell.det().abs()), largest)
    if count > _MOST:
        raise ValueError(
            f"width must be larger, or method 'direct' if graphs do not repeat, for so large a cell, got {count:,.0f} "
            f"reciprocal vectors shorter than {largest:.3g} for {cell.tolist()}; more than {_MOST:,} are refused, and "
            "twice the width needs an eighth of them"
        )
    # |n_a| = |a . k| / 2 pi <= |a| end / 2 pi
    h, k, l = (math.floor(length * largest / (2 * math.pi)) for length in cell.norm(dim=1).tolist())  # noqa: E741
    number = torch.arange(((2 * h + 1) * (2 * k + 1) * (2 * l + 1) + 1) // 2, device="cpu")
    indices = _indices_at(number, torch.tensor([h, k, l], device="cpu"))
    square = (2 * math.pi * indices.double() @ torch.linalg.inv(cell).T).square().sum(1)
    square, order = square.sort(stable=True)
    counts = torch.searchsorted(square, torch.tensor([end**2 for end in ends], dtype=torch.float64, device="cpu"))
    indices = indices[order[: int(counts.max())]]
    return torch.cat([indices, torch.where((indices == 0).all(1, keepdim=True), 1, 2)], 1), counts.tolist()


def _indices_at(number: Int[Tensor, " vectors"], bound: Int[Tensor, "*vectors 3"]) -> Int[Tensor, "vectors 3"]:
    """Miller indices with these numbers. All indices within a bound are counted from the zero vector, in an order in
    which n and -n are at equal distances from it."""
    first, second, third = (2 * bound + 1).unbind(-1)
    number = number + first * second * third // 2
    return torch.stack([number // (second * third), number // third % second, number % third], 1) - bound


def _bounded(
    lengths: Float[Tensor, "graphs kernels 3"], bounds: Sequence[Sequence[int]], end: Float[Tensor, " kernels"]
) -> tuple[Int[Tensor, "graphs vectors 3"], Int[Tensor, "graphs vectors"], list[int]]:
    """All Miller indices within the bounds of each kernel, how many vectors each stands for, and the number of indices
    of each kernel.

    Raise ValueError if a bound is too small for boxes with sides of these ``lengths`` and cutoffs ``end``. If values
    cannot be read, the device raises an error later, or, under ``torch.vmap``, outputs are NaN.
    """
    device = lengths.device
    needed = lengths * end[:, None] / (2 * math.pi)
    most = _table(bounds, device, torch.int64)  # P, 3
    fits = needed < most + 1
    counts = [((2 * a + 1) * (2 * b + 1) * (2 * c + 1) + 1) // 2 for a, b, c in bounds]
    kernel = _kernels_of(counts, device)
    first = _table([(n,) for n in itertools.accumulate(counts[:-1], initial=0)], device, torch.int64)[:, 0]
    number = torch.arange(sum(counts), device=device)
    indices = _indices_at(number - first[kernel], most[kernel])
    stands = torch.where((indices == 0).all(1), 1, 2)
    if is_mapped(lengths):
        stands = torch.where(fits.all(), stands, torch.nan)
    else:

        def wanted() -> str:
            kernel = int((~fits).any(2).any(0).nonzero()[0])
            least = tuple(needed[:, kernel].floor().amax(0).long().tolist())
            return f"; a kernel with {bounds[kernel]} needs at least {least}"

        text = f"max_hkl must be larger for kernels of this width and these cells, got {max(bounds, key=sum)}"
        checks.must_hold(fits.all(), text, wanted)
    count = lengths.shape[0]
    return indices.expand(count, -1, -1), stands.expand(count, -1), counts
