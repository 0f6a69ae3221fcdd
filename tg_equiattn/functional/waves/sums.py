"""Attention through kernels as they stand, over all pairs, and through the waves that repeat with a cell or a box."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ... import checks
from ...encodings.harmonics import solid_harmonics
from ...modes import transformed
from ...ranks import Ranks
from ..backend import compiles_for_accelerator, tile_numbers
from .kernels import EwaldKernels, EwaldNodes, Product, parts_of, spectrum
from .lattices import Cells, Lattice, lattice_of
from .mesh import mesh_point_sums, mesh_wave_sums
from .radial import radial_factors

_PAIRS = 1 << 21  # pairs times kernels of a block on a CPU
_WAVES = 1 << 22  # numbers in the largest tensor of a block of waves on a CPU


def again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """What backward computes again."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def pair_sums(nodes: EwaldNodes, kernels: EwaldKernels, product: Product) -> Tensor:
    """(B, N, H, E), exactly: by blocks of graphs, or of nodes that attend, which backward computes again."""
    pos, query, key, value = nodes.pos.to(nodes.value.dtype), *nodes[1:]
    block, compiles = functools.partial(_pair_block, kernels, product), compiles_for_accelerator(pos)
    if transformed() or (checks.is_traced(pos) and not compiles):
        return block(pos, query, pos, key, value)
    graphs, count = pos.shape[:2]
    limit = tile_numbers(pos.device, _PAIRS, 4 if compiles else 8)  # of which compilers join some
    row = max(1, count * kernels.widths.numel())
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return block(pos, query, pos, key, value)
    out = []
    for part in zip(*(x.split(some_graphs) for x in (pos, query, key, value)), strict=True):
        blocks = zip(*(x.split(some_nodes, 1) for x in part[:2]), strict=True)
        out.append(torch.cat([again(block, *rows, part[0], *part[2:]) for rows in blocks], 1))
    return torch.cat(out)


def _pair_block(
    kernels: EwaldKernels, product: Product, pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Over all nodes of each graph, for those at ``pos_i`` (B, n, 3) with their queries: (B, n, H, E)."""
    widths, gains = kernels.widths.to(value.dtype), kernels.unit_gains().to(value.dtype)
    apart = pos_i[:, :, None] - pos[:, None]  # B, n, N, 3
    lmax, width = kernels.lmax, widths[..., None, None]  # H, C, 1, 1
    t = apart.square().sum(3)[:, None, None] / (2 * width.square())
    factors = radial_factors(t, kernels)  # L, B, H, C, n, N
    scores = query.permute(0, 2, 3, 1, 4) @ key.permute(0, 2, 3, 4, 1)  # B, H, C, n, N
    harmonics = solid_harmonics(apart, lmax).movedim(3, 1)[:, None]  # B, 1, harmonics, n, N
    value = value.movedim(2, 1)[:, :, None]  # B, H, 1, N, V
    out = []
    for degree in range(lmax + 1):
        gain = gains[..., degree, None, None] / (-width) ** degree
        weight = (scores * factors[degree] * gain).sum(2)[:, :, None]
        sums = (weight * harmonics[:, :, degree**2 : (degree + 1) ** 2]) @ value  # B, H, 2 l + 1, n, V
        unit = torch.eye(sums.shape[2], dtype=sums.dtype, device=sums.device)[:, None]
        out.append(product(sums.permute(0, 3, 2, 1, 4), unit, degree).sum(2))
    return sum(out[1:], out[0])


def lattice_sums(
    nodes: EwaldNodes, mask: Tensor | None, kernels: EwaldKernels, cells: Cells, product: Product,
    splits: Sequence[float] = (), mesh: bool = False, ranks: Ranks | None = None,
) -> Tensor:  # fmt: skip
    r"""Sums over the nodes of each graph and all their images, (B, N, H, E).

    .. math:: \mathrm{out}_i = \sum_c q_i^c \cdot \frac{1}{V} \sum_k \hat K_c(k)\, s_c^l\, e^{i k \cdot x_i}
        \Big[ \sum_j e^{-i k \cdot x_j}\, k_j^c\, v_j \Big] \otimes Y_l(i k)

    Potentials of open clouds are split at these widths, if any; with ``mesh``, sums go through non-uniform fast Fourier
    transforms. Traced with bounded waves, those of all kernels go through one expression: what compilers take hangs on
    how long it is.
    """
    pos, query, key, value = nodes
    most, extent, out = pos.shape[1], cells.extents(pos, mask, ranks), []
    every, waves = kernels.unit_gains(), kernels.every_wavenumber()
    if ranks is not None:
        most = int(ranks.largest(torch.tensor([most], device=pos.device)))

    def mix(sums: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        return _mixed(sums if ranks is None else ranks.sum(sums), weights, harmonics, product)

    parts = parts_of(kernels, splits)
    whole = kernels.max_waves is not None and (checks.is_traced(pos) or transformed())
    for group in [parts] if whole else [[part] for part in parts]:
        these = slice(group[0].kernel, group[-1].kernel + 1)
        bounds = kernels.waves_of(group)
        lattice = lattice_of(cells, pos, extent, group, kernels.phase, value.dtype, bounds)
        width = kernels.widths[:, these].mT.to(lattice.weights.dtype)[lattice.part]  # D, H
        square = lattice.wavevectors.square().sum(2, keepdim=True)
        turns = None if waves is None else waves[:, these].mT.to(width.dtype)[lattice.part]
        weights = lattice.weights[..., None] * spectrum(group, lattice.ends[:, None], square, width, turns)
        gains = every[:, these].to(width.dtype).movedim(1, 0)[lattice.part].unbind(2)
        factors = torch.stack([gain * width**n * (-1) ** ((n + 1) // 2) for n, gain in enumerate(gains)], 2)
        weights = (weights[..., None] * factors).to(value.dtype)  # B, D, H, L
        harmonics = solid_harmonics(lattice.wavevectors, kernels.lmax).to(value.dtype)
        scores = key[:, :, :, these].permute(0, 1, 3, 4, 2)[..., None]
        sources = scores * value[:, :, None, None]  # B, N, P, A, H, V
        if mesh:
            found = again(_through_mesh, mix, lattice, sources, weights, harmonics, kernels.error)
        else:
            found = _in_blocks(mix, lattice, sources, weights, harmonics, most)
        out.append((found * query[:, :, :, these].permute(0, 1, 3, 4, 2)[..., None]).sum((2, 3)))
    return sum(out[1:], out[0])


def _mixed(sums: Tensor, weights: Tensor, harmonics: Tensor, product: Product) -> Tensor:
    """Sums over points (B, 2, D, A, H, V) times harmonics (B, D, ...) and weights (B, D, H, L): what is read."""
    out = []
    for degree in range(weights.shape[3]):
        turned = torch.stack([-sums[:, 1], sums[:, 0]], 1) if degree % 2 else sums
        scaled = turned * weights[:, None, :, None, :, degree, None]
        out.append(product(scaled, harmonics[:, None, :, None, None, degree**2 : (degree + 1) ** 2], degree))
    return sum(out[1:], out[0])


def _through_mesh(
    mix: Callable[..., Tensor], lattice: Lattice, sources: Tensor, weights: Tensor, harmonics: Tensor, error: float
) -> Tensor:
    """Sums of one part by non-uniform fast Fourier transforms."""
    angles, numbers = lattice.angles, lattice.numbers.long()
    sums = mesh_point_sums(angles, numbers, sources.flatten(2), error)
    table = mix(sums.unflatten(3, sources.shape[3:]), weights, harmonics)
    return mesh_wave_sums(angles, numbers, table.flatten(3), error).unflatten(2, (1, *table.shape[3:]))


def _in_blocks(
    mix: Callable[..., Tensor], lattice: Lattice, sources: Tensor, weights: Tensor, harmonics: Tensor, most: int
) -> Tensor:
    """Sums by matrix products, a block of waves after the other, which backward computes again. The largest number of
    nodes of a rank decides how many blocks there are, as in each block ranks add up their sums."""
    angles, numbers, counts = lattice.angles, lattice.numbers, lattice.counts

    def block(angles: Tensor, sources: Tensor, numbers: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        steps = numbers.to(angles.dtype)  # no matrix product, whose TF32 would round phases
        along = [angles[:, :, None, axis] * steps[:, None, :, axis] for axis in range(3)]
        phases = along[0] + along[1] + along[2]
        phases = torch.stack([phases.cos(), phases.sin()], 2)  # B, N, 2, D
        each = [x.flatten(2) for x in (phases.split(counts, 3) if len(counts) > 1 else [phases])]  # parts: B, N, 2 D
        sums = [(x.mT @ own.flatten(2)).unflatten(1, (2, -1)) for x, own in zip(each, sources.unbind(2), strict=True)]
        table = mix(_joined(sums, 2).unflatten(3, sources.shape[3:]), weights, harmonics)
        tables = table.split(counts, 2) if len(counts) > 1 else [table]
        out = [x @ own.flatten(1, 2).flatten(2) for x, own in zip(each, tables, strict=True)]
        return _joined(out, 2).unflatten(2, (len(out), *table.shape[3:]))

    if checks.is_traced(angles) or transformed():
        return block(angles, sources, numbers, weights, harmonics)
    count, nodes = angles.shape[:2]
    each = max(1, count * max(2 * most, 4 * sources[0, 0].numel() if count and nodes else 1))
    step = max(1, tile_numbers(angles.device, _WAVES, 4) // each)
    if numbers.shape[1] <= step:
        return block(angles, sources, numbers, weights, harmonics)
    parts = zip(*(x.split(step, 1) for x in (numbers, weights, harmonics)), strict=True)
    return sum((again(block, angles, sources, *part) for part in parts), sources.new_zeros(()))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
