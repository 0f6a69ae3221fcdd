"""Ewald attention by sums over reciprocal vectors of a cell, or of a box along directions that do not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ...modes import is_readable
from ...ranks import Ranks
from ..operators import tile_numbers
from ..tiles import is_whole, joined, recomputed
from .cells import Cells
from .coulomb import Coulomb
from .direct import Images, direct_sums
from .kernel import Interaction, Kernel, Product, Sources
from .lattices import Lattice, lattice_of
from .methods import Term
from .nufft import sums_at_nodes, sums_over_nodes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Mix = tuple[Product, "Ranks | None"]
_VECTORS = 1 << 22  # numbers in the largest tensor of a tile of reciprocal vectors on a CPU


def reciprocal_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, mask: Bool[Tensor, "graphs nodes"] | None, interaction: Interaction, cells: Cells,
    terms: Sequence[Term] = (), nufft: bool = False, ranks: Ranks | None = None,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images.

    .. math:: \mathrm{out}_i = \sum_{c, l} q_i^c \cdot \frac{1}{V} \sum_k g_{c l}\, u_c^l\, \hat K_c(k)\,
        e^{i k \cdot x_i} \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    Every kernel has its own reciprocal vectors; in crystals, kernels of equal cutoffs share them. ``terms`` say which
    kernels are split, and what is summed over images in real space. With ``nufft``, sums are non-uniform fast Fourier
    transforms. While tracing with ``max_hkl``, all kernels are computed by one expression, since the time to compile
    grows with the length of a program.
    """
    most, extent, scaled, out = pos.shape[1], cells.extents(pos, mask, ranks), interaction.scaled_cutoff, []
    if ranks is not None:
        most = int(ranks.largest(torch.tensor([most], device=pos.device)))
    nodes, dtype, query = (query, *sources), query.dtype, query.permute(0, 1, 3, 4, 2)[..., None]  # B, N, C, A, H, 1
    if len(sources) == 2:
        sources = sources[0].permute(0, 1, 3, 4, 2)[..., None], sources[1][:, :, None, None]
    else:
        sources = (sources[0].transpose(2, 3)[:, :, :, None],)  # B, N, C, 1, H, V
    together = is_whole(pos) and interaction.max_hkl is not None
    crystals = interaction.max_hkl is None and is_readable(cells.periodic) and bool(cells.periodic.all())
    groups = [(slice(None), interaction.kernels, None)] if together else _groups(interaction, terms, crystals)
    for these, kernels, images in groups:
        if images is not None:
            own_query, source, *value = nodes
            near = own_query[:, :, :, these], (source[:, :, :, these], *value)
            out.append(direct_sums(pos, *near, interaction._replace(kernels=kernels), cells, images))
            continue
        ranges = [own for kernel in kernels for own in kernel.ranges(scaled)]
        ranges = ranges if together else [max(ranges, key=lambda own: own.long_range)]
        lattice = lattice_of(cells, pos, extent, ranges, dtype, interaction.hkl_bounds(ranges))
        own_query, own = query[:, :, these], sources[0][:, :, these]
        own = own * sources[1] if len(sources) == 2 else own  # B, N, C, A, H, V
        if together:
            transforms = _transforms(kernels, lattice)[:, :, None]
        else:  # kernels that share vectors are columns, beside those over which queries and keys are contracted
            each = [_transforms((kernel,), lattice) for kernel in kernels]
            transforms = torch.stack(each, 2).repeat_interleave(own.shape[3], 2)
            own_query, own = own_query.flatten(2, 3)[:, :, None], own.flatten(2, 3)[:, :, None]
        weights = (lattice.weights[..., None, None, None] * transforms).to(dtype)  # B, D, 1 or C A, H, L
        harmonics = solid_harmonics(lattice.wavevectors, interaction.lmax).to(dtype)
        mix, given = (interaction.product, ranks), (lattice.angles, own, lattice.numbers, weights, harmonics)
        if nufft:
            found = _by_nufft(mix, *given, interaction.error)
        else:
            found = _by_products(mix, *given, tuple(lattice.counts), most)
        out.append((found * own_query).sum((2, 3)))
    return sum(out[1:], out[0])


def _groups(
    interaction: Interaction, terms: Sequence[Term], crystals: bool
) -> Iterator[tuple[slice, tuple[Kernel, ...], Images | None]]:
    """Yield groups of kernels that are computed by one expression, the indices of their queries and keys, and the
    images over which they are summed in real space. In ``crystals`` a group is of all kernels of one cutoff."""
    each = [kernel.single(c) for kernel in interaction.kernels for c in range(kernel.count)]
    found: dict[Any, list[tuple[int, Kernel]]] = {}
    for c, (kernel, term) in enumerate(zip(each, terms or [Term()] * len(each), strict=True)):
        parts = kernel.split(term.width) if isinstance(kernel, Coulomb) and term.width is not None else (kernel,)
        for own in parts:
            images = None if own.long_range else term.images
            if images is not None:
                yield slice(c, c + 1), (own,), images
                continue
            cutoff = own.ranges(interaction.scaled_cutoff)[0].cutoff if crystals else len(found)
            found.setdefault(cutoff, []).append((c, own))
    for group in found.values():
        indices, kernels = zip(*group, strict=True)
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        if indices == tuple(range(indices[0], indices[-1] + 1, max(1, step))):
            yield slice(indices[0], indices[-1] + 1, step), kernels, None
        else:
            yield from ((slice(c, c + 1), (own,), None) for c, own in group)


def _transforms(kernels: Sequence[Kernel], lattice: Lattice) -> Float[Tensor, "graphs vectors heads degrees"]:
    """Fourier transforms of kernels at their reciprocal vectors."""
    square, out, first, start = lattice.wavevectors.square().sum(2), [], 0, 0
    for kernel in kernels:
        last = first + kernel.count
        end = start + sum(lattice.counts[first:last])
        own = square[:, start:end], lattice.coulomb[:, start:end], lattice.kernel[start:end] - first
        out.append(kernel.reciprocal(*own))
        first, start = last, end
    return joined(out, 1)


def _mixed(
    mix: Mix, sums: Float[Tensor, "graphs 2 vectors contracted heads channels"],
    weights: Float[Tensor, "graphs vectors #contracted heads degrees"],
    harmonics: Float[Tensor, "graphs vectors harmonics"],
) -> Float[Tensor, "graphs 2 vectors contracted heads out"]:  # fmt: skip
    """Products of sums over nodes (of cosines, then of sines) of all ranks with weights times Y_l(i k), which is
    i^l Y_l(k)."""
    (product, ranks), out = mix, []
    sums = sums if ranks is None else ranks.sum(sums)
    for degree in range(weights.shape[4]):
        rotated = torch.stack([-sums[:, 1], sums[:, 0]], 1) if degree % 2 else sums
        weight = weights[:, None, ..., degree, None]
        scaled = rotated * (-weight if degree % 4 in (1, 2) else weight)
        out.append(product(scaled, harmonics[:, None, :, None, None, degree**2 : (degree + 1) ** 2], degree))
    return sum(out[1:], out[0])


def _by_nufft(
    mix: Mix, angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor, error: float
) -> Tensor:
    """Sums of one kernel by non-uniform fast Fourier transforms, which backward does not compute a second time."""
    indices = numbers.long()
    sums = sums_over_nodes(angles, indices, sources.flatten(2), error)
    table = recomputed(_mixed, mix, sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    return sums_at_nodes(angles, indices, table.flatten(3), error).unflatten(2, (1, *table.shape[3:]))


def _by_products(
    mix: Mix, angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor,
    counts: tuple[int, ...], most: int,
) -> Tensor:  # fmt: skip
    """Sums by matrix products, in tiles of reciprocal vectors, which backward computes a second time.

    Ranks add up their sums in each tile, so all ranks need the same number of tiles. It follows from ``most``, the
    largest number of nodes of a rank.
    """
    each = max(1, angles.shape[0] * max(2 * most, 4 * sources.shape[2:].numel()))
    step = max(1, tile_numbers(angles.device, _VECTORS, 4) // each)
    if is_whole(angles) or numbers.shape[1] <= step:
        return _tile(mix, counts, angles, sources, numbers, weights, harmonics)
    tiles = zip(*(x.split(step, 1) for x in (numbers, weights, harmonics)), strict=True)
    found = (recomputed(_tile, mix, (step,), angles, sources, *own) for own in tiles)
    return sum(found, sources.new_zeros(()))


def _tile(
    mix: Mix, counts: tuple[int, ...], angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor,
    harmonics: Tensor,
) -> Tensor:  # fmt: skip
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
