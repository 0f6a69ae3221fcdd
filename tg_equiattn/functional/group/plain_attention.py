"""Group self-attention as a plain composition of torch's operations, which every transform understands.

The formula as written: in each tile of queries every score is formed, normalised and multiplied with the values
(:func:`.factorised.direct`). What is differentiated three times goes through it too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...precision import full_precision
from ...transforms import transformed
from . import factorised
from .plan import AttentionPlan
from .tiles import from_lanes


def _attend(plan: AttentionPlan, lane: int, tile: slice, query, key, value, rho_space, rho_group):
    """The output (H, C, p), and with the pointwise relation its level (H, 1, p), of a tile's queries (T, C, p), slabs
    of keys and values, rho_space (D, H, [U,] C), rho_group (U, C)."""
    key, value = (plan.tiling.gather(x, tile) for x in (key, value))
    bias = plan.bias(lane, tile)
    out, levels = [], []
    for block in plan.blocks:
        q = query[block.query]
        headed = plan.with_head(q, lane)
        position = plan.tiling.position(rho_space[:, block.output].flatten(1, -2), headed, tile)
        logits = factorised.full_logits(position, None if plan.full else torch.matmul(rho_group, headed), block.table)
        keep = plan.keep(lane, tile, block, key.dtype)
        score = factorised.direct_scores(q, key, logits, bias)
        out.append(factorised.direct(score, value, keep))
        if plan.paired:
            levels.append(score.flatten(2, 3).logsumexp(2))
    return torch.cat(out), torch.cat(levels) if levels else query[:0, :1]


def plain_group_attention(
    query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout
) -> tuple[Tensor, Tensor]:
    """As :func:`.tiled_attention.group_attention_op`; backward computes the tiles again where nothing is transformed.

    Under torch.compile and torch.export, and where it is traced, there is one tile, for images of all sizes.
    """
    whole = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not whole and not query.shape[0]:
        shape = 0, value.shape[1], index.shape[0], *query.shape[3:]
        out = query.new_zeros(shape) + 0 * sum(x.sum() for x in (query, key, value, rho_space, rho_group))
        return out, out[:, 0] if index.ndim == 2 else out.flatten()
    with full_precision(query.device):
        plan = AttentionPlan(
            query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout,
            "whole" if whole else "plain",
        )  # fmt: skip
        again = torch.is_grad_enabled() and not whole and not transformed()
        lanes, levels, tiling = [], [], plan.tiling
        for lane in range(plan.query.shape[0]):
            slabs, done = (plan.key[lane], plan.value[lane]), []
            for tile in tiling:
                run = functools.partial(_attend, plan, lane, tile)
                operands = tiling.query(plan.query[lane], tile), *(tiling.slab(x, tile) for x in slabs)
                operands = *operands, plan.rho_space, rho_group
                done.append(checkpoint(run, *operands, use_reentrant=False) if again else run(*operands))
            lanes.append(tiling.join([out for out, _ in done]))
            if plan.paired:
                levels.append(tiling.join([level for _, level in done]))
        level = from_lanes(torch.stack(levels)).squeeze(1) if levels else query.new_zeros(0)
        return from_lanes(torch.stack(lanes)), level
