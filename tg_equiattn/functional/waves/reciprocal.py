"""Ewald attention by sums over reciprocal vectors, of a cell or of a box around what does not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ...ranks import Ranks
from ..backend import tile_numbers
from ..chunks import checkpointed, is_whole
from .cells import Cells
from .coulomb import Coulomb
from .interaction import EwaldNodes, Interaction, Product
from .kernel import Kernel, scaled_cutoff
from .lattices import Lattice, lattice_of
from .nufft import sums_at_nodes, sums_over_nodes

_VECTORS = 1 << 22  # numbers in the largest tensor of a block of reciprocal vectors on a CPU


def reciprocal_sums(
    nodes: EwaldNodes, mask: Tensor | None, interaction: Interaction, cells: Cells, splits: Sequence[float] = (),
    nufft: bool = False, ranks: Ranks | None = None,
) -> Tensor:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images, (B, N, heads, E).

    .. math:: \mathrm{out}_i = \sum_{c, l} q_i^c \cdot \frac{1}{V} \sum_k g_{c l}\, u_c^l\, \hat K_c(k)\,
        e^{i k \cdot x_i} \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    Every kernel has reciprocal vectors of its own. If ``splits`` are given, the Coulomb kernels of open graphs are
    split at these widths, one for each. With ``nufft``, sums are non-uniform fast Fourier transforms. In a traced
    graph with ``max_hkl`` all kernels go through one expression: compile time grows with the length of a graph.
    """
    pos, query, key, value = nodes
    most, extent, out = pos.shape[1], cells.extents(pos, mask, ranks), []
    scaled = scaled_cutoff(interaction.error, interaction.lmax)
    if ranks is not None:
        most = int(ranks.largest(torch.tensor([most], device=pos.device)))

    def mix(sums: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        return _mixed(sums if ranks is None else ranks.sum(sums), weights, harmonics, interaction.product)

    for these, group in _groups(interaction, splits, interaction.max_hkl is not None and is_whole(pos)):
        ranges = [own for kernel in group for own in kernel.ranges(scaled)]
        lattice = lattice_of(cells, pos, extent, ranges, value.dtype, interaction.bounds_of(ranges, scaled))
        weights = (lattice.weights[..., None, None] * _transforms(group, lattice)).to(value.dtype)  # B, D, H, L
        harmonics = solid_harmonics(lattice.wavevectors, interaction.lmax).to(value.dtype)
        scores = key[:, :, :, these].permute(0, 1, 3, 4, 2)[..., None]
        sources = scores * value[:, :, None, None]  # B, N, P, A, H, V
        if nufft:
            found = checkpointed(_by_nufft, mix, lattice, sources, weights, harmonics, interaction.error)
        else:
            found = _by_products(mix, lattice, sources, weights, harmonics, most)
        out.append((found * query[:, :, :, these].permute(0, 1, 3, 4, 2)[..., None]).sum((2, 3)))
    return sum(out[1:], out[0])


def _groups(
    interaction: Interaction, splits: Sequence[float], together: bool
) -> Iterator[tuple[slice, tuple[Kernel, ...]]]:
    """Kernels that go through one expression, and their places among the kernels of queries and keys."""
    if together:
        yield slice(interaction.num_kernels), interaction.kernels
        return
    widths = iter(splits)
    for c, kernel in enumerate(interaction.singles()):
        parts = kernel.split(next(widths)) if isinstance(kernel, Coulomb) and splits else (kernel,)
        yield from ((slice(c, c + 1), (own,)) for own in parts)


def _transforms(group: Sequence[Kernel], lattice: Lattice) -> Tensor:
    """Fourier transforms of kernels at their reciprocal vectors, (B, D, heads, lmax + 1)."""
    square = lattice.wavevectors.square().sum(2)
    if len(lattice.counts) == 1:
        return group[0].reciprocal(square, lattice.coulomb, lattice.kernel)
    out, first, start = [], 0, 0
    for kernel in group:
        end = start + sum(lattice.counts[first : first + kernel.count])
        own = square[:, start:end], lattice.coulomb[:, start:end], lattice.kernel[start:end] - first
        out.append(kernel.reciprocal(*own))
        first, start = first + kernel.count, end
    return _joined(out, 1)


def _mixed(sums: Tensor, weights: Tensor, harmonics: Tensor, product: Product) -> Tensor:
    """Products of sums over nodes (B, 2, D, A, H, V), the cosines first, with Y_l(i k): i^l times the harmonics (B, D,
    ...) and weights (B, D, H, L)."""
    out = []
    for degree in range(weights.shape[3]):
        rotated = torch.stack([-sums[:, 1], sums[:, 0]], 1) if degree % 2 else sums
        weight = weights[:, None, :, None, :, degree, None]
        scaled = rotated * (-weight if degree % 4 in (1, 2) else weight)
        out.append(product(scaled, harmonics[:, None, :, None, None, degree**2 : (degree + 1) ** 2], degree))
    return sum(out[1:], out[0])


def _by_nufft(
    mix: Callable[..., Tensor], lattice: Lattice, sources: Tensor, weights: Tensor, harmonics: Tensor, error: float
) -> Tensor:
    """Sums of one kernel by non-uniform fast Fourier transforms."""
    angles, indices = lattice.angles, lattice.numbers.long()
    sums = sums_over_nodes(angles, indices, sources.flatten(2), error)
    table = mix(sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    return sums_at_nodes(angles, indices, table.flatten(3), error).unflatten(2, (1, *table.shape[3:]))


def _by_products(
    mix: Callable[..., Tensor], lattice: Lattice, sources: Tensor, weights: Tensor, harmonics: Tensor, most: int
) -> Tensor:
    """Sums by matrix products, in blocks of reciprocal vectors, which backward computes again. All ranks have as many
    blocks, from the largest number of nodes of a rank, as they add up their sums in each block."""
    angles, numbers, counts = lattice.angles, lattice.numbers, lattice.counts

    def block(angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        steps = numbers.to(angles.dtype)  # no matrix product, as TF32 would round phases
        along = [angles[:, :, None, axis] * steps[:, None, :, axis] for axis in range(3)]
        phases = along[0] + along[1] + along[2]
        phases = torch.stack([phases.cos(), phases.sin()], 2)  # B, N, 2, D
        each = [x.flatten(2) for x in (phases.split(counts, 3) if len(counts) > 1 else [phases])]  # B, N, 2 D
        sums = [(x.mT @ own.flatten(2)).unflatten(1, (2, -1)) for x, own in zip(each, sources.unbind(2), strict=True)]
        table = mix(_joined(sums, 2).unflatten(3, sources.shape[3:]), weights, harmonics)
        tables = table.split(counts, 2) if len(counts) > 1 else [table]
        out = [x @ own.flatten(1, 2).flatten(2) for x, own in zip(each, tables, strict=True)]
        return _joined(out, 2).unflatten(2, (len(out), *table.shape[3:]))

    if is_whole(angles):
        return block(angles, sources, numbers, weights, harmonics)
    count, nodes = angles.shape[:2]
    each = max(1, count * max(2 * most, 4 * sources[0, 0].numel() if count and nodes else 1))
    step = max(1, tile_numbers(angles.device, _VECTORS, 4) // each)
    if numbers.shape[1] <= step:
        return block(angles, sources, numbers, weights, harmonics)
    parts = zip(*(x.split(step, 1) for x in (numbers, weights, harmonics)), strict=True)
    return sum((checkpointed(block, angles, sources, *part) for part in parts), sources.new_zeros(()))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
