"""Ewald attention by sums over reciprocal vectors of a cell, or of a box along directions that do not repeat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    each: Sequence[Tensor] = weights.split(counts, 1)
    if shared and counts != sorted(counts, reverse=True):
        order = sorted(range(len(counts)), key=lambda c: -counts[c])
        index = torch.tensor(order, device=pos.device)
        query, key, each = query.index_select(3, index), key.index_select(3, index), [each[c] for c in order]
        counts = [counts[c] for c in order]
    if len(sources) == 2:
        source = torch.einsum("bnhca,bnhv->bncahv", key, sources[1])
    else:
        source = key.transpose(2, 3)[:, :, :, None]
    angles, mix, out, last = lattice.angles, (interaction.product, ranks), [], 0
    if is_whole(pos) and interaction.max_hkl is not None:  # one expression, which compilers take less time for
        own = source.movedim(2, 0)[:, :, :, None], weights[:, :, None]
        found = _tile(mix, counts, angles, lattice.numbers, harmonics, *own)[:, :, :, 0]
        return torch.einsum("cbnahe,bnhca->bnhe", found, query)
    # kernels with equal vectors are computed together
    groups = [len([*same]) for _, same in itertools.groupby(counts)] if shared else [1] * len(counts)
    ends, queries = itertools.accumulate(groups), query.split(groups, 3)
    for end, own, own_query in zip(ends, source.split(groups, 2), queries, strict=True):
        weight = torch.stack(list(each[end - own.shape[2] : end]), 2)  # B, D, C, H, L
        start = 0 if shared else last
        last = start + weight.shape[1]
        given = lattice.numbers[:, start:last], harmonics[:, start:last], own, weight
        if nufft:
            found = _by_nufft(mix, angles, *given, lattice.ratio[:, end - 1, None], interaction.error)
        else:
            found = _by_products(mix, angles, *given, most)
        out.append(torch.einsum("bncahe,bnhca->bnhe", found, own_query))
    return sum(out[1:], out[0])


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
    mix: Mix, angles: Tensor, numbers: Tensor, harmonics: Tensor, source: Tensor, weights: Tensor, ratio: Tensor,
    error: float,
) -> Tensor:  # fmt: skip
    """Sums of kernels with one box by non-uniform fast Fourier transforms, which backward does not compute a second
    time. ``ratio`` is that of the box of the first kernel to this box."""
    angles, indices = angles * ratio.to(angles.dtype), (numbers / ratio).round().long()
    sums = sums_over_nodes(angles, indices, source.flatten(2), error).unflatten(3, source.shape[2:])
    table = recomputed(_mixed, mix, sums, weights, harmonics)
    return sums_at_nodes(angles, indices, table.flatten(3), error).unflatten(2, table.shape[3:])


def _by_products(
    mix: Mix, angles: Tensor, numbers: Tensor, harmonics: Tensor, source: Tensor, weights: Tensor, most: int
) -> Tensor:
    """Sums of kernels with one list of vectors by matrix products, in tiles of vectors, which backward computes a
    second time.

    Ranks add up their sums in each tile, so all ranks need the same number of tiles. It follows from ``most``, the
    largest number of nodes of a rank.
    """
    each = max(1, angles.shape[0] * max(2 * most, 4 * source.shape[2:].numel()))
    step = max(1, tile_numbers(angles.device, _VECTORS, 4) // each)
    if is_whole(angles) or numbers.shape[1] <= step:
        return _tile(mix, None, angles, numbers, harmonics, source[None], weights)[0]
    tiles = zip(*(x.split(step, 1) for x in (numbers, harmonics, weights)), strict=True)
    found = (recomputed(_tile, mix, None, angles, n, y, source[None], w)[0] for n, y, w in tiles)
    return sum(found, source.new_zeros(()))


def _tile(
    mix: Mix, counts: Sequence[int] | None, angles: Tensor, numbers: Tensor, harmonics: Tensor, sources: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """Sums at nodes (P, B, N, C, A, H, E) of sources (P, B, N, C, A, H, V). Each of P sources has a list of reciprocal
    vectors, and the lists stand one after the other, as long as ``counts`` says; ``None`` means one list."""
    steps = numbers.to(angles.dtype)  # no matrix product, as TF32 would round phases
    phases = angles[:, :, None, 0] * steps[:, None, :, 0]
    for axis in (1, 2):
        phases = torch.addcmul(phases, angles[:, :, None, axis], steps[:, None, :, axis])
    each = [[x] if counts is None else x.split(list(counts), 2) for x in (phases.cos(), phases.sin())]  # B, N, D
    waves = list(zip(*each, sources.flatten(3).unbind(0), strict=True))
    sums = joined([torch.stack([cos.mT @ own, sin.mT @ own], 1) for cos, sin, own in waves], 2)
    table = _mixed(mix, sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    tables = [table] if counts is None else table.split(list(counts), 2)
    rows = [x.flatten(3).unbind(1) for x in tables]
    out = [torch.baddbmm(cos @ x, sin, y) for (cos, sin, _), (x, y) in zip(waves, rows, strict=True)]
    return joined([x[None] for x in out]).unflatten(3, table.shape[3:])
