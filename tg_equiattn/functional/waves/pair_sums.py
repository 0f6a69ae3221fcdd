"""Attention through kernels as they stand, over all pairs of each graph."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...encodings.harmonics import solid_harmonics
from ...transforms import transformed
from .kernels import EwaldKernels, Nodes, Product, radial_factors
from .lattice_sums import again

_BLOCK = {"cpu": 1 << 21, "other": 1 << 26}  # pairs times kernels of a block


def pair_sums(nodes: Nodes, kernels: EwaldKernels, product: Product) -> Tensor:
    """(B, N, H, E), exactly: by blocks of graphs, or of nodes that attend, which backward computes again."""
    pos, query, key, value = nodes.pos.to(nodes.value.dtype), *nodes[1:]
    widths, gains = kernels.widths.to(value.dtype), kernels.gains.to(value.dtype)

    def block(pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _sums(pos_i, query, pos, key, value, widths, gains, kernels.gaussians, product)

    if checks.is_traced(pos) or transformed():
        return block(pos, query, pos, key, value)
    graphs, count = pos.shape[:2]
    limit = _BLOCK.get(pos.device.type, _BLOCK["other"])
    row = max(1, count * widths.numel())
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return block(pos, query, pos, key, value)
    out = []
    for part in zip(*(x.split(some_graphs) for x in (pos, query, key, value)), strict=True):
        blocks = zip(*(x.split(some_nodes, 1) for x in part[:2]), strict=True)
        out.append(torch.cat([again(block, *rows, part[0], *part[2:]) for rows in blocks], 1))
    return torch.cat(out)


def _sums(
    pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor, widths: Tensor, gains: Tensor,
    gaussians: int, product: Product,
) -> Tensor:  # fmt: skip
    """Over all nodes of each graph, for those at ``pos_i`` (B, n, 3) with their queries: (B, n, H, E)."""
    apart = pos_i[:, :, None] - pos[:, None]  # B, n, N, 3
    lmax, width = gains.shape[2] - 1, widths[..., None, None]  # H, C, 1, 1
    t = apart.square().sum(3)[:, None, None] / (2 * width.square())
    factors = radial_factors(t, gaussians, lmax)  # L, B, H, C, n, N
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
