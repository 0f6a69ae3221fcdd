"""Group self-attention as a plain composition of torch's operations, which every transform understands.

The formula as written: in each tile of queries every score is formed, normalised and multiplied with the values
(:func:`.factorised.direct`). What is differentiated three times goes through it too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ...precision import full_precision
from ..backend import transformed
from . import factorised
from .plan import AttentionPlan
from .tiles import from_lanes


class _Tile:
    """One tile as a function of its queries, slabs of keys and values, and both encodings."""

    def __init__(self, plan: AttentionPlan, lane: int, tile: slice) -> None:
        self.plan, self.lane, self.tile = plan, lane, tile

    def operands(self, query: Any, key: Any, value: Any) -> list[Tensor]:
        """What belongs to the tile of three tensors in lanes, as views."""
        tiling, lane, tile = self.plan.tiling, self.lane, self.tile
        return [tiling.query(query[lane], tile), tiling.slab(key[lane], tile), tiling.slab(value[lane], tile)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor, rho_group: Tensor) -> Tensor:
        """(H, C, p) of queries (T, C, p), the slabs, rho_space (D, H, [U,] C) and rho_group (U, C)."""
        plan, tile = self.plan, self.tile
        key, value = (plan.tiling.gather(x, tile) for x in (key, value))
        bias = plan.tiling.mask(tile)
        out = []
        for block in plan.blocks:
            q = query[block.query]
            position = plan.tiling.position(rho_space[:, block.output].flatten(1, -2), q, tile)
            logits = factorised.full_logits(position, None if plan.full else torch.matmul(rho_group, q), block.table)
            keep = plan.keep(self.lane, tile, block, key.dtype)
            out.append(factorised.direct(q, key, value, logits, bias, keep))
        return torch.cat(out)


def _tiles(plan: AttentionPlan) -> list[_Tile]:
    return [_Tile(plan, lane, tile) for lane in range(plan.query.shape[0]) for tile in plan.tiling]


def plain_group_attention(
    query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout
) -> Tensor:
    """As :func:`.tiled_attention.group_attention_op`; backward computes the tiles again where nothing is transformed.

    Under torch.compile and torch.export, and where it is traced, there is one tile, for images of all sizes.
    """
    whole = torch.compiler.is_compiling() or torch.jit.is_tracing()
    with full_precision(query.device):
        plan = AttentionPlan(
            query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout,
            "whole" if whole else "plain",
        )  # fmt: skip
        again = torch.is_grad_enabled() and not whole and not transformed()
        out = []
        for tile in _tiles(plan):
            operands = *tile.operands(plan.query, plan.key, plan.value), plan.rho_space, rho_group
            if again:
                out.append(torch.utils.checkpoint.checkpoint(tile.attend, *operands, use_reentrant=False))
            else:
                out.append(tile.attend(*operands))
        per_lane = len(out) // plan.query.shape[0]
        lanes = [plan.tiling.join(out[n : n + per_lane]) for n in range(0, len(out), per_lane)]
        return from_lanes(torch.stack(lanes))
