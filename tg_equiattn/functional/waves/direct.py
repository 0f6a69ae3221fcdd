"""Ewald attention by direct sums over all pairs of nodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ..operators import OPERATOR, choose_form, tile_numbers, use_plain
from ..tiles import is_whole, recomputed
from .cells import Cells
from .kernel import Interaction, Kernel, Product, Sources

if TYPE_CHECKING:
    from jaxtyping import Float

Images = tuple[int, int, int]
_PAIRS = 1 << 21  # pairs times kernels of a tile on a CPU


def direct_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    sources: Sources, interaction: Interaction, cells: Cells | None = None, images: Images | None = None,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    """Sums over pairs, in tiles of graphs or of queries, which backward computes a second time.

    They are exact without ``images``. In crystals they run over the nearest image of each node and the ``images``
    around it, so many to either side along each lattice vector.
    """
    (graphs, count), ours, nodes = pos.shape[:2], (interaction.kernels, interaction.product, images), sources
    row = max(1, count * query.shape[2] * query.shape[3])
    if cells is None or images is None:
        pos = pos.to(query.dtype)
    else:
        nodes = cells.vectors, *sources
        row *= math.prod(2 * n + 1 for n in images)
    if is_whole(pos) and (use_plain() or choose_form(pos, 0) == OPERATOR):
        return _tile(*ours, pos, query, pos, *nodes)
    limit = tile_numbers(pos.device, _PAIRS, 8)
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return _tile(*ours, pos, query, pos, *nodes)
    out = []
    for own in zip(*(x.split(some_graphs) for x in (pos, query, *nodes)), strict=True):
        queries = zip(*(x.split(some_nodes, 1) for x in own[:2]), strict=True)
        out.append(torch.cat([recomputed(_tile, *ours, *some, own[0], *own[2:]) for some in queries], 1))
    return torch.cat(out)


def _tile(
    kernels: tuple[Kernel, ...], product: Product, images: Images | None, pos_i: Tensor, query: Tensor, pos: Tensor,
    *sources: Tensor,
) -> Tensor:  # fmt: skip
    """Sums (B, n, heads, E) over all nodes of each graph, for queries at ``pos_i`` (B, n, 3). With ``images``, lattice
    vectors (B, 3, 3) come before the sources."""
    # 3, B, n, N; gradients of coordinates taken apart are contiguous, as hosts expect of forces
    offsets = torch.stack([a[:, :, None] - b[:, None] for a, b in zip(pos_i.unbind(2), pos.unbind(2), strict=True)])
    copies = 1
    if images is not None:
        offsets, sources = _to_images(offsets, sources[0], images, query.dtype), sources[1:]
        copies = offsets.shape[3] // pos.shape[1]
    square = offsets.square().sum(0)
    query, values = query.permute(0, 2, 3, 1, 4), sources[-1].movedim(1, -2)  # B, H, C, n, A and B, H, (C,) N, V
    scores = query @ sources[0].permute(0, 2, 3, 4, 1) if len(sources) == 2 else query  # B, H, C, n, N or 1
    scores = scores.repeat_interleave(copies, -1) if len(sources) == 2 and copies > 1 else scores
    each = [*zip(kernels, scores.split([kernel.count for kernel in kernels], 2), strict=True)]
    if len(sources) == 2:  # one value for all kernels
        parts, values = [_joined(kernel, x, square)[:, :, :, None] for kernel, x in each], values[:, :, None]
        weights = sum(parts[1:], parts[0])
    else:
        weights = torch.cat([kernel.real_space(square) * x for kernel, x in each], 3)
    harmonics, out = solid_harmonics(offsets, kernels[0].lmax, 0), []
    for degree, weight in enumerate(weights.unsqueeze(4)):  # B, H, C or 1, 1, n, N
        if degree:
            own = harmonics[degree**2 : (degree + 1) ** 2].movedim(0, 1)  # B, 2 l + 1, n, N
            weight = weight * own[:, None, None]
        weight = weight if copies == 1 else weight.unflatten(-1, (-1, copies)).sum(-1)
        sums = (weight @ values[:, :, :, None]).sum(2)  # B, H, 2 l + 1, n, V
        out.append(product(sums.permute(0, 3, 1, 2, 4), None, degree))
    return sum(out[1:], out[0])


def _to_images(
    offsets: Float[Tensor, "3 graphs queries nodes"], lattice: Float[Tensor, "graphs 3 3"], images: Images,
    dtype: torch.dtype,
) -> Float[Tensor, "3 graphs queries copies"]:  # fmt: skip
    """Offsets to the images of each node, in double precision until they are short."""
    inverse = torch.linalg.inv(lattice.detach())
    nearest = torch.einsum("xbij,bxa->abij", offsets.detach(), inverse).round()
    offsets = (offsets - torch.einsum("abij,bax->xbij", nearest, lattice)).to(dtype)
    steps = torch.cartesian_prod(*(torch.arange(-n, n + 1.0, device=lattice.device) for n in images))
    around = (steps.to(lattice.dtype) @ lattice).to(dtype)  # B, copies, 3
    return (offsets[..., None] + around.permute(2, 0, 1)[:, :, None, None]).flatten(3)


def _joined(kernel: Kernel, scores: Tensor, square: Tensor) -> Tensor:
    """Sums (lmax + 1, B, H, n, N) over the kernels of scores (B, H, C, n, N) times R_l(r)."""
    weights, scales = kernel.radial(square) * scores, kernel.scales(square.dtype)
    if len(weights) == 1:
        return torch.einsum("lhc,bhcnm->lbhnm", scales, weights[0])
    return torch.einsum("lhc,lbhcnm->lbhnm", scales, weights)


def own_terms(
    query: Float[Tensor, "nodes heads kernels contracted"], sources: Sources, interaction: Interaction
) -> Float[Tensor, "nodes heads out"]:
    """The terms j = i of the sums: the attention of each node to itself, but not to its images."""
    zero = query.new_zeros(1, 1, 1)
    at_zero = torch.cat([kernel.real_space(zero)[0, 0, :, :, 0] for kernel in interaction.kernels], 1)  # H, C, 1
    weights, value = query * at_zero, sources[-1]
    pairs = len(sources) == 2
    found = (weights * sources[0]).sum((2, 3))[..., None] * value if pairs else (weights * value).sum(2)
    return interaction.product(found, found.new_ones(1, 1), 0)
