"""Ewald attention by direct sums over all pairs of nodes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from ..backend import FUSABLE, choose_form, tile_numbers
from ..chunks import checkpointed, is_whole
from .kernel import Interaction

if TYPE_CHECKING:
    from jaxtyping import Float

_PAIRS = 1 << 21  # pairs times kernels of a chunk on a CPU


def direct_sums(
    pos: Float[Tensor, "graphs nodes 3"], query: Float[Tensor, "graphs nodes heads kernels contracted"],
    key: Float[Tensor, "graphs nodes heads kernels contracted"], value: Float[Tensor, "graphs nodes heads channels"],
    interaction: Interaction,
) -> Float[Tensor, "graphs nodes heads out"]:  # fmt: skip
    """Exact sums, in chunks of graphs or of queries, which backward computes a second time."""
    pos, (graphs, count) = pos.to(value.dtype), pos.shape[:2]
    if is_whole(pos) and choose_form(pos, 0) != FUSABLE:
        return _chunk(interaction, pos, query, pos, key, value)
    limit = tile_numbers(pos.device, _PAIRS, 8)
    row = max(1, count * query.shape[2] * query.shape[3])
    some_graphs, some_nodes = max(1, limit // max(1, row * count)), max(1, limit // row)
    if some_graphs >= graphs and some_nodes >= count:
        return _chunk(interaction, pos, query, pos, key, value)
    out, chunk = [], functools.partial(_chunk, interaction)
    for own in zip(*(x.split(some_graphs) for x in (pos, query, key, value)), strict=True):
        queries = zip(*(x.split(some_nodes, 1) for x in own[:2]), strict=True)
        out.append(torch.cat([checkpointed(chunk, *some, own[0], *own[2:]) for some in queries], 1))
    return torch.cat(out)


def _chunk(interaction: Interaction, pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sums (B, n, heads, E) over all nodes of each graph, for queries at ``pos_i`` (B, n, 3)."""
    offsets = pos_i[:, :, None] - pos[:, None]  # B, n, N, 3
    square = offsets.square().sum(3)
    scores = query.permute(0, 2, 3, 1, 4) @ key.permute(0, 2, 3, 4, 1)  # B, H, C, n, N
    each = scores.split([kernel.count for kernel in interaction.kernels], 2)
    each_sum = [(x * kernel.real_space(square)).sum(3) for kernel, x in zip(interaction.kernels, each, strict=True)]
    weights = sum(each_sum[1:], each_sum[0])  # L, B, H, n, N
    harmonics = solid_harmonics(offsets, interaction.lmax).movedim(3, 1)[:, None]  # B, 1, harmonics, n, N
    value = value.movedim(2, 1)[:, :, None]  # B, H, 1, N, V
    out = []
    for degree, weight in enumerate(weights):
        sums = (weight[:, :, None] * harmonics[:, :, degree**2 : (degree + 1) ** 2]) @ value  # B, H, 2 l + 1, n, V
        unit = torch.eye(sums.shape[2], dtype=sums.dtype, device=sums.device)[:, None]
        out.append(interaction.product(sums.permute(0, 3, 2, 1, 4), unit, degree).sum(2))
    return sum(out[1:], out[0])
