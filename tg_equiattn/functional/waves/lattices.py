"""Reciprocal vectors of cells, and of boxes around graphs that do not repeat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...modes import cached, is_batched, is_readable
from .cells import Cells
from .kernel import Range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

_MOST = 2**23  # largest number of reciprocal vectors of a graph and kernel; a larger table would not fit into memory
_STEP, _STEPS = 1.15, 16  # errors name the needed bound in 16 steps, each by a factor of 1.15
TAPER = 1.1  # weights fade to zero between the cutoff and this times the cutoff


class Lattice(NamedTuple):
    """Reciprocal vectors k of some kernels, one kernel after the other, with one vector of each pair k and -k.

    The phase k . x of a node is the scalar product of its ``angles`` with ``numbers``.

    Attributes:
        angles: 2 pi times the fractional coordinates of nodes in the box of the first kernel.
        numbers: Miller indices times the ratio of the box of the first kernel to that of k.
        wavevectors: the vectors k, in float64.
        weights: 2 for a pair k and -k and 1 for zero, divided by the volume; they fade to zero beyond the cutoff.
        coulomb: 4 pi / k², truncated along directions that do not repeat; zeros if no kernel has a long range.
        kernel: index of the kernel of each vector, or one entry for a single kernel.
        counts: number of vectors of each kernel.
    """

    angles: Float[Tensor, "graphs nodes 3"]
    numbers: Float[Tensor, "graphs vectors 3"]
    wavevectors: Float[Tensor, "graphs vectors 3"]
    weights: Float[Tensor, "graphs vectors"]
    coulomb: Float[Tensor, "graphs vectors"]
    kernel: Int[Tensor, " #vectors"]
    counts: list[int]


def lattice_of(
    cells: Cells, pos: Float[Tensor, "graphs nodes 3"], extent: Float[Tensor, "graphs 3"], ranges: Sequence[Range],
    dtype: torch.dtype, bounds: Sequence[tuple[int, int, int]] | None = None,
) -> Lattice:  # fmt: skip
    r"""Reciprocal vectors up to the cutoffs of some kernels.

    With ``bounds``, these are all Miller indices within the bounds, and cells are not read. Without bounds there is one
    kernel, and its Miller indices are found by reading the cells. The reciprocal vectors of a cell A are
    :math:`k = 2 \pi A^{-1} n` with three integers n, so at a position x = f A the phase is :math:`2 \pi\, n \cdot f`.
    It depends on the fractions f only, which are wrapped before they are multiplied.

    Along directions that do not repeat there is a box, so wide that images do not interact: its side is the sum of the
    extent and the margin of a kernel. Long-range kernels are truncated at R, the sum of the largest distance and the
    margin. Their boxes have sides of extent + R + margin, and 2 R for slabs. Boxes depend on positions without
    gradients, since sums depend on the box by less than the promised error. Boxes of several kernels differ by factors,
    so they share one set of fractions.

    Args:
        cells: cells of the graphs.
        pos: positions of the nodes.
        extent: largest distance between nodes along each direction that does not repeat.
        ranges: cutoffs and margins of the kernels.
        dtype: dtype of the angles.
        bounds: largest Miller indices of each kernel; ``None`` reads cells.
    """
    periodic, normals, truncates = cells.periodic, cells.normals(), any(own.long_range for own in ranges)
    table = _table([(TAPER * own.cutoff, own.margin, own.long_range) for own in ranges], torch.float64, pos.device)
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
    if bounds is None:
        numbers, stands = _found(full, TAPER * ranges[0].cutoff)
        kernel, counts = torch.zeros(1, dtype=torch.int64, device=pos.device), [numbers.shape[1]]
    else:
        numbers, stands, kernel, counts = _bounded(full.detach().norm(dim=2)[:, None] / ratio, bounds, cutoff)
        kernel = kernel[:1] if len(ranges) == 1 else kernel
    own = [radius, ratio, volume[:, None] / ratio.prod(2)]
    radius, ratio, volume = own if len(ranges) == 1 else [x.index_select(1, kernel) for x in own]  # B, D or 1, ...
    steps = numbers.to(full.dtype) * ratio
    vectors = 2 * math.pi * steps @ inverse.mT
    weights = stands.to(full.dtype) / volume * _taper(vectors, cutoff[kernel])
    coulomb = torch.zeros_like(weights)
    if truncates:
        normal = torch.where(periodic[..., None], 0.0, normals).sum(1, keepdim=True)  # the normal of a slab
        coulomb = _coulomb(numbers, vectors, radius, normal, periodic)
    return Lattice((2 * math.pi * fractions).to(dtype), steps, vectors, weights, coulomb, kernel, counts)


def _table(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> Shaped[Tensor, "kernels numbers"]:
    """A table with a row of numbers for each kernel. A single row is made on the device, since a copy would wait for
    CUDA."""
    if len(rows) > 1:
        return torch.tensor(rows, dtype=dtype, device=device)
    return torch.cat([torch.full((1, 1), x, dtype=dtype, device=device) for x in rows[0]], 1)


def _inverse(
    vectors: Float[Tensor, "graphs 3 3"],
) -> tuple[Float[Tensor, "graphs 3 3"], Float[Tensor, " graphs"]]:
    """Inverses and volumes of cells, by cross products, which compilers fuse."""
    across = torch.linalg.cross(vectors.roll(-1, 1), vectors.roll(-2, 1))
    volume = (vectors[:, 0] * across[:, 0]).sum(1)
    return across.mT / volume[:, None, None], volume.abs()


def _coulomb(
    numbers: Float[Tensor, "graphs vectors 3"], vectors: Float[Tensor, "graphs vectors 3"],
    radius: Float[Tensor, "graphs vectors"], normal: Float[Tensor, "graphs 1 3"], periodic: Bool[Tensor, "graphs 3"],
) -> Float[Tensor, "graphs vectors"]:  # fmt: skip
    r""":math:`4 \pi / k^2`: without k = 0 in crystals, truncated at the radius in open graphs (a sphere, Vico et
    al. 2016) and in slabs (a layer, Rozzi et al. 2006)."""
    square = vectors.square().sum(2)
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


def _taper(
    vectors: Float[Tensor, "graphs vectors 3"], end: Float[Tensor, " #vectors"]
) -> Float[Tensor, "graphs vectors"]:
    """Weights: 1 up to ``end / TAPER``, and from there to zero at ``end``, with all derivatives."""
    square = vectors.square().sum(2)
    fading = (square > (end / TAPER) ** 2) & (square < end**2)
    length = torch.where(fading, square, (end * (1 + 1 / TAPER) / 2) ** 2).sqrt()
    place = ((length * TAPER / end - 1) / (TAPER - 1)).clamp(1e-6, 1 - 1e-6)  # at both ends all derivatives are 0
    falls, rises = (-1 / (1 - place)).exp(), (-1 / place).exp()
    return torch.where(fading, falls / (falls + rises), (square < end**2).to(square.dtype))


def count_of_vectors(volume: float, end: float) -> float:
    """The approximate number of reciprocal vectors of a cell up to the wavenumber ``end``, one of each pair."""
    return volume * end**3 / (12 * math.pi**2)


def _found(
    vectors: Float[Tensor, "graphs 3 3"], end: float
) -> tuple[Int[Tensor, "graphs vectors 3"], Int[Tensor, "graphs vectors"]]:
    """Miller indices of the reciprocal vectors of each cell, and how many vectors each stands for: zero for padding."""
    if not is_readable(vectors):
        raise ValueError("max_hkl must be given where cells are traced or mapped over, got None")
    cells = vectors.detach().to("cpu", torch.float64).flatten(1).tolist()
    found = torch.nn.utils.rnn.pad_sequence([_indices_of(tuple(cell), end) for cell in cells], batch_first=True)
    return found[..., :3].to(vectors.device), found[..., 3].to(vectors.device)


@cached(maxsize=1024)
def _indices_of(entries: tuple[float, ...], end: float) -> Int[Tensor, "vectors 4"]:
    """Miller indices of one cell, zero first, and in the last column how many vectors each stands for."""
    cell = torch.tensor(entries, dtype=torch.float64, device="cpu").view(3, 3)
    count = count_of_vectors(float(cell.det().abs()), end)
    if count > _MOST:
        raise ValueError(
            f"width must be larger, or method 'direct' if graphs do not repeat, for so large a cell, got {count:,.0f} "
            f"reciprocal vectors shorter than {end:.3g} for {cell.tolist()}; more than {_MOST:,} are refused, and "
            "twice the width needs an eighth of them"
        )
    # |n_a| = |a . k| / 2 pi <= |a| end / 2 pi
    h, k, l = (math.floor(length * end / (2 * math.pi)) for length in cell.norm(dim=1).tolist())  # noqa: E741
    indices = _half_lattice((h, k, l), cell.device)
    vectors = 2 * math.pi * indices[:, :3].double() @ torch.linalg.inv(cell).T
    return indices[vectors.square().sum(1) < end**2]


def _half_lattice(bound: tuple[int, int, int], device: torch.device) -> Int[Tensor, "vectors 4"]:
    """Miller indices within a bound, zero first and one of each pair n and -n, and in the last column how many vectors
    each stands for."""
    number = torch.arange((math.prod(2 * n + 1 for n in bound) + 1) // 2, device=device)
    indices = _indices_at(number, torch.tensor(bound, device=device))
    return torch.cat([indices, torch.where((indices == 0).all(1, keepdim=True), 1, 2)], 1)


def _indices_at(number: Int[Tensor, " vectors"], bound: Int[Tensor, "*vectors 3"]) -> Int[Tensor, "vectors 3"]:
    """Miller indices with these numbers. All indices within a bound are counted from the zero vector, in an order in
    which n and -n are at equal distances from it."""
    first, second, third = (2 * bound + 1).unbind(-1)
    number = number + first * second * third // 2
    return torch.stack([number // (second * third), number // third % second, number % third], 1) - bound


def _bounded(
    lengths: Float[Tensor, "graphs kernels 3"], bounds: Sequence[tuple[int, int, int]], end: Float[Tensor, " kernels"]
) -> tuple[Int[Tensor, "graphs vectors 3"], Int[Tensor, "graphs vectors"], Int[Tensor, " vectors"], list[int]]:
    """All Miller indices within the bounds of each kernel, how many vectors each stands for, the kernel of each, and
    the number of indices of each kernel.

    Raise ValueError if a bound is too small for boxes with sides of these ``lengths`` and cutoffs ``end``. If values
    cannot be read, the device raises an error later, or, under ``torch.vmap``, outputs are NaN.
    """
    device = lengths.device
    needed = lengths * end[:, None] / (2 * math.pi)
    most = _table(bounds, torch.int64, device)  # P, 3
    fits = (needed < most + 1).all()
    counts = [((2 * a + 1) * (2 * b + 1) * (2 * c + 1) + 1) // 2 for a, b, c in bounds]
    each = _table([(n,) for n in counts], torch.int64, device)[:, 0]
    ends = each.cumsum(0)
    number = torch.arange(sum(counts), device=device)
    kernel = (number[:, None] >= ends).sum(1)
    indices = _indices_at(number - (ends - each)[kernel], most[kernel])
    stands = torch.where((indices == 0).all(1), 1, 2)
    _check_bounds(needed, fits, bounds)
    if is_batched(lengths):
        stands = torch.where(fits, stands, torch.nan)
    else:
        _assert_bounds(needed, bounds)
    count = lengths.shape[0]
    return indices.expand(count, -1, -1), stands.expand(count, -1), kernel, counts


def _assert_bounds(needed: Float[Tensor, "graphs kernels 3"], bounds: Sequence[tuple[int, int, int]]) -> None:
    """Assert on the device that Miller indices are within their bounds.

    The texts of such errors are fixed when a model is compiled. So there is a text for each of several factors by which
    a bound may be too small. Compilers do not keep the order of assertions, so only one of them fails along an axis.
    """
    if not needed.shape[0]:
        return
    fits = (needed.amax(0) < _table(bounds, torch.int64, needed.device) + 1).all()
    largest = max(range(len(bounds)), key=lambda p: sum(bounds[p]))
    for axis, most in enumerate(bounds[largest]):
        own, enough = needed[:, largest, axis].amax(), [math.ceil(most * _STEP**n) for n in range(_STEPS, -1, -1)]
        for more, less in itertools.pairwise(enough):
            text = f"max_hkl along lattice vector {'abc'[axis]} must be at least {more} for these cells, got {most}"
            checks.must_hold((own < less + 1) | (own >= more + 1), text)  # own is not between the two
        fits = fits | ((own >= most + 1) & (own < enough[0] + 1))  # or a text above tells the bound
    checks.must_hold(fits, f"max_hkl must be far larger than {bounds[largest]} for these cells")


@checks.of_values
def _check_bounds(needed: Tensor, fits: Tensor, bounds: Sequence[tuple[int, int, int]]) -> None:
    if needed.shape[0] and not bool(fits):
        wanted = tuple(needed[:, 0].floor().amax(0).long().tolist())
        raise ValueError(
            f"max_hkl must be at least {wanted} for kernels of this width and these cells, got {bounds[0]}"
        )
