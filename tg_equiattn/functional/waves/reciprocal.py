"""Ewald attention by sums over reciprocal vectors of a cell, or of a box along directions that do not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ...modes import is_readable
from ...ranks import Ranks
from ..operators import tile_numbers
from ..tiles import is_whole, joined, recomputed
from .cells import Cells, Lattice, lattice_of
from .kernels import Interaction, Kernel, Product, Sources
from .nufft import sums_at_nodes, sums_over_nodes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Mix = tuple[Product, "Ranks | None"]
_VECTORS = 1 << 22  # numbers in the largest tensor of a tile of reciprocal vectors on a CPU


def reciprocal_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, mask: Bool[Tensor, "graphs nodes"] | None, interaction: Interaction, cells: Cells,
    nufft: bool = False, ranks: Ranks | None = None,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images.

    .. math:: \mathrm{out}_i = \sum_{c, l} q_i^c \cdot \frac{1}{V} \sum_k g_{c l}\, u_c^l\, \hat K_c(k)\,
        e^{i k \cdot x_i} \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    In crystals, kernels share one list of reciprocal vectors, sorted by length, and the sum over each kernel ends at
    its cutoff. Otherwise every kernel has its own vectors. With ``nufft``, sums are non-uniform fast Fourier
    transforms. While tracing with ``max_hkl``, all kernels are computed by one expression, since the time to compile
    grows with the length of a program.
    """
    most, extent, kernels, dtype = pos.shape[1], cells.extents(pos, mask, ranks), interaction.kernels, query.dtype
    if ranks is not None:
        most = int(ranks.largest(torch.tensor([most], device=pos.device)))
    ranges = [own for kernel in kernels for own in kernel.ranges(interaction.scaled_cutoff)]
    shared = interaction.max_hkl is None and is_readable(cells.periodic) and bool(cells.periodic.all())
    lattice = lattice_of(cells, pos, extent, ranges, dtype, interaction.hkl_bounds(ranges), shared)
    counts, key = lattice.counts, sources[0]
    weights = (lattice.weights[..., None, None] * _transforms(kernels, lattice)).to(dtype)  # B, D, H, L
    harmonics = solid_harmonics(lattice.wavevectors, interaction.lmax).to(dtype)
    each: Sequence[Tensor] = _split(weights, counts, 1)
    if shared and counts != sorted(counts, reverse=True):
        order = sorted(range(len(counts)), key=lambda c: -counts[c])
        index = torch.tensor(order, device=pos.device)
        query, key, each = query.index_select(3, index), key.index_select(3, index), [each[c] for c in order]
        counts = [counts[c] for c in order]
    query = query.permute(0, 1, 3, 4, 2)[..., None]  # B, N, C, A, H, 1
    if len(sources) == 2:
        source = key.permute(0, 1, 3, 4, 2)[..., None] * sources[1][:, :, None, None]  # B, N, C, A, H, V
    else:
        source = key.transpose(2, 3)[:, :, :, None]
    mix, out = (interaction.product, ranks), []
    if is_whole(pos) and interaction.max_hkl is not None:
        own = source[:, :, :, None], lattice.numbers, weights[:, :, None], harmonics
        return (_tile(mix, tuple(counts), lattice.angles, *own) * query[:, :, :, None]).sum((2, 3, 4))
    for start, stop, columns in _windows(counts, shared, nufft):
        weight = torch.stack([x[:, start:stop] if shared else x for x in each[columns]], 2)
        own = source[:, :, None, columns], lattice.numbers[:, start:stop], weight, harmonics[:, start:stop]
        if nufft:
            found = _by_nufft(mix, lattice.angles, *own, lattice.ratio[:, columns.start, None], interaction.error)
        else:
            found = _by_products(mix, lattice.angles, *own, most)
        out.append((found * query[:, :, None, columns]).sum((2, 3, 4)))
    return sum(out[1:], out[0])


def _windows(counts: Sequence[int], shared: bool, nufft: bool) -> Iterator[tuple[int, int, slice]]:
    """Yield the first and the last reciprocal vector of each expression, and its kernels. Shared vectors are cut where
    a kernel ends, so that phases are computed once. Non-uniform transforms have whole lists."""
    start = 0
    for n, count in enumerate(counts):
        if not shared:
            yield start, start + count, slice(n, n + 1)
            start += count
        elif n + 1 == len(counts) or counts[n + 1] < count:
            yield (0 if nufft or n + 1 == len(counts) else counts[n + 1]), count, slice(start if nufft else 0, n + 1)
            start = n + 1


def _transforms(kernels: Sequence[Kernel], lattice: Lattice) -> Float[Tensor, "graphs terms heads degrees"]:
    """Fourier transforms of kernels at their reciprocal vectors."""
    out, first, start = [], 0, 0
    for kernel in kernels:
        last = first + kernel.count
        end = start + sum(lattice.counts[first:last])
        own = lattice.square[:, start:end], lattice.coulomb[:, start:end], lattice.kernel[start:end] - first
        out.append(kernel.reciprocal(*own))
        first, start = last, end
    return joined(out, 1)


def _mixed(
    mix: Mix, sums: Float[Tensor, "graphs 2 vectors kernels contracted heads channels"],
    weights: Float[Tensor, "graphs vectors kernels heads degrees"],
    harmonics: Float[Tensor, "graphs vectors harmonics"],
) -> Float[Tensor, "graphs 2 vectors kernels contracted heads out"]:  # fmt: skip
    """Products of sums over nodes (of cosines, then of sines) of all ranks with weights times Y_l(i k), which is
    i^l Y_l(k)."""
    (product, ranks), out = mix, []
    sums = sums if ranks is None else ranks.sum(sums)
    for degree in range(weights.shape[4]):
        weight = weights[:, :, :, None, :, degree, None]  # B, D, C, 1, H, 1
        signs = ((1, 1), (1, -1), (-1, -1), (-1, 1))[degree % 4]
        scaled = (sums.flip(1) if degree % 2 else sums) * torch.stack([sign * weight for sign in signs], 1)
        out.append(product(scaled, harmonics[:, None, :, None, None, None, degree**2 : (degree + 1) ** 2], degree))
    return sum(out[1:], out[0])


def _by_nufft(
    mix: Mix, angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor, ratio: Tensor,
    error: float,
) -> Tensor:  # fmt: skip
    """Sums of kernels with one box by non-uniform fast Fourier transforms, which backward does not compute a second
    time. ``ratio`` is that of the box of the first kernel to this box."""
    angles, indices = angles * ratio.to(angles.dtype), (numbers / ratio).round().long()
    sums = sums_over_nodes(angles, indices, sources.flatten(2), error)
    table = recomputed(_mixed, mix, sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    return sums_at_nodes(angles, indices, table.flatten(3), error).unflatten(2, (1, *table.shape[3:]))


def _by_products(
    mix: Mix, angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor, most: int
) -> Tensor:
    """Sums by matrix products, in tiles of reciprocal vectors, which backward computes a second time.

    Ranks add up their sums in each tile, so all ranks need the same number of tiles. It follows from ``most``, the
    largest number of nodes of a rank.
    """
    each = max(1, angles.shape[0] * max(2 * most, 4 * sources.shape[2:].numel()))
    step = max(1, tile_numbers(angles.device, _VECTORS, 4) // each)
    if is_whole(angles) or numbers.shape[1] <= step:
        return _tile(mix, (numbers.shape[1],), angles, sources, numbers, weights, harmonics)
    tiles = zip(*(x.split(step, 1) for x in (numbers, weights, harmonics)), strict=True)
    found = (recomputed(_tile, mix, (step,), angles, sources, *own) for own in tiles)
    return sum(found, sources.new_zeros(()))


def _tile(
    mix: Mix, counts: tuple[int, ...], angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor,
    harmonics: Tensor,
) -> Tensor:  # fmt: skip
    """Sums at nodes (B, N, P, C, A, H, E) of sources (B, N, P, C, A, H, V). The vectors of P lists, as long as
    ``counts`` says, stand one after the other. On each list there are C kernels."""
    steps = numbers.to(angles.dtype)  # no matrix product, as TF32 would round phases
    phases = angles[:, :, None, 0] * steps[:, None, :, 0]
    for axis in (1, 2):
        phases = torch.addcmul(phases, angles[:, :, None, axis], steps[:, None, :, axis])
    phases = torch.stack([phases.cos(), phases.sin()], 2)  # B, N, 2, D
    each = [x.flatten(2) for x in _split(phases, counts, 3)]  # B, N, 2 D
    sums = [(x.mT @ own.flatten(2)).unflatten(1, (2, -1)) for x, own in zip(each, sources.unbind(2), strict=True)]
    table = _mixed(mix, joined(sums, 2).unflatten(3, sources.shape[3:]), weights, harmonics)
    tables = [own.flatten(1, 2).flatten(2) for own in _split(table, counts, 2)]
    out = [x @ own for x, own in zip(each, tables, strict=True)]
    return joined(out, 2).unflatten(2, (len(out), *table.shape[3:]))


def _split(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    return [x] if len(sizes) == 1 else x.split(list(sizes), dim)
