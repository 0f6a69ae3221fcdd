"""Ewald attention by direct sums over all pairs of nodes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ..backend import FUSABLE, choose_form, tile_numbers
from ..chunks import checkpointed, is_whole
from .interaction import EwaldNodes, Interaction
from .kernel import real_space

_PAIRS = 1 << 21  # pairs times kernels of a block on a CPU


def direct_sums(nodes: EwaldNodes, interaction: Interaction) -> Tensor:
    """Exact sums (B, N, heads, E), by blocks of graphs or of nodes that attend, which backward computes again."""
    pos, query, key, value = nodes.pos.to(nodes.value.dtype), *nodes[1:]
    block, compiles = functools.partial(_block, interaction), choose_form(pos, 0) == FUSABLE
    if is_whole(pos) and not compiles:
        return block(pos, query, pos, key, value)
    graphs, count = pos.shape[:2]
    limit = tile_numbers(pos.device, _PAIRS, 4 if compiles else 8)  # compilers fuse some of the tensors of a block
    row = max(1, count * query.shape[2] * query.shape[3])
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return block(pos, query, pos, key, value)
    out = []
    for part in zip(*(x.split(some_graphs) for x in (pos, query, key, value)), strict=True):
        blocks = zip(*(x.split(some_nodes, 1) for x in part[:2]), strict=True)
        out.append(torch.cat([checkpointed(block, *rows, part[0], *part[2:]) for rows in blocks], 1))
    return torch.cat(out)


def _block(interaction: Interaction, pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sums (B, n, heads, E) over all nodes of each graph, for the nodes at ``pos_i`` (B, n, 3)."""
    offsets = pos_i[:, :, None] - pos[:, None]  # B, n, N, 3
    square = offsets.square().sum(3)
    scores = query.permute(0, 2, 3, 1, 4) @ key.permute(0, 2, 3, 4, 1)  # B, H, C, n, N
    each = scores.split([kernel.count for kernel in interaction.kernels], 2)
    parts = [(own * radial).sum(3) for own, radial in zip(each, real_space(interaction.kernels, square), strict=True)]
    weights = sum(parts[1:], parts[0])  # L, B, H, n, N
    harmonics = solid_harmonics(offsets, interaction.lmax).movedim(3, 1)[:, None]  # B, 1, harmonics, n, N
    value = value.movedim(2, 1)[:, :, None]  # B, H, 1, N, V
    out = []
    for degree, weight in enumerate(weights):
        sums = (weight[:, :, None] * harmonics[:, :, degree**2 : (degree + 1) ** 2]) @ value  # B, H, 2 l + 1, n, V
        unit = torch.eye(sums.shape[2], dtype=sums.dtype, device=sums.device)[:, None]
        out.append(interaction.product(sums.permute(0, 3, 2, 1, 4), unit, degree).sum(2))
    return sum(out[1:], out[0])
