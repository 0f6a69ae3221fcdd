"""Group self-attention as one PyTorch operator: tiles through the core, recomputed in backward.

Registered with ``torch.library`` so that torch.compile and torch.export see a single node with known output shapes
and gradients; it saves its inputs only. Inside a compiled graph the core is compiled as well, once for each layer:
for all image sizes where windows are local, for each where attention is global. On the path "triton" one fused kernel
takes the place of tiles and factorised. Second derivatives are those of :mod:`.second_backward`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...precision import full_precision
from ...transforms import transformed
from ..backend import refuse_forward_mode
from ..second_derivatives import second_derivatives
from . import factorised, pointwise
from .plain_attention import plain_group_attention
from .plan import AttentionPlan
from .second_backward import second_backward
from .tiles import from_lanes, to_lanes


@functools.cache
def _compiled(step: Any, shape: tuple[int, ...]) -> Any:
    """One compiled step per shape, so that layers do not use up each other's recompilations."""
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    return torch.compile(step, dynamic=False, **options)


@functools.cache
def _warn_not_compiled(reason: str) -> None:
    warnings.warn(f"group attention could not be compiled and runs eagerly: {reason}", stacklevel=2)


def _run(step: Any, fused: bool, query: Tensor, key: Tensor, *rest: Any) -> Any:
    """Call a step of the core, compiled if ``fused`` and a compiler is there."""
    operands = (query, key, *rest)
    if not fused or query.shape[-1] == 1:
        return step(*operands)
    for x in operands:
        if isinstance(x, Tensor) and x.is_floating_point():
            torch._dynamo.maybe_mark_dynamic(x, x.ndim - 1)
    try:
        return _compiled(step, (*query.shape[:-1], *key.shape[:-1], *rest[1].shape[:-1]))(*operands)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _warn_not_compiled(str(error).strip().replace("\n", " ")[:200])
        return step(*operands)


def _piece(x: Tensor | None, piece: slice) -> Tensor | None:
    return None if x is None else x[..., piece]


@torch.library.custom_op("tg_equiattn::group_attention", mutates_args=())
def group_attention_op(
    query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor, rho_group: Tensor, index: Tensor,
    mask: Tensor | None, seed: Tensor, kernel_size: int, selection: Sequence[int], circular: bool, dropout: float,
    path: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query (M, C, T, *spatial), key and value (M, C and Cv, S, *spatial) -> out (M, Cv, H, *spatial) and level.

    ``rho_space`` is (H, R, C) with ``rho_group`` (U, C), or (H, R, U, C) with an empty ``rho_group``; R counts the
    offsets of the window, or with ``kernel_size`` 0 (global) those of all pairs. Encodings may have one channel a head
    more than queries: biases, of image m those of head m modulo their number. ``index`` is (H, T, S), or (T, S) for the
    pointwise relation h = t; then level (M, H, *spatial) is the logarithm of the sum of exponentials of a query's
    scores, else it is empty. ``mask`` (M, *spatial) is true where there are keys.
    """
    refuse_forward_mode()
    if query.numel() == 0:
        return query.new_zeros(query.shape[0], value.shape[1], index.shape[0], *query.shape[3:]), _level(query, index)
    with torch.no_grad(), full_precision(query.device):
        if path == "triton":
            from . import triton_attention as kernels

            return kernels.forward(
                query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout
            )
        plan = AttentionPlan(
            query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout, path
        )
        lanes = plan.query.shape
        out = query.new_empty(lanes[0], index.shape[0], value.shape[1], *lanes[3:])
        level = query.new_empty(lanes[0], index.shape[0], 1, *lanes[3:]) if plan.paired else None
        for lane, tile, k, v, bias in plan.tiles():
            tile_query = plan.tiling.query(plan.query[lane], tile)
            result, levels = [], []
            for block in plan.blocks:
                q = tile_query[block.query]
                headed = plan.with_head(q, lane)
                position = plan.tiling.position(plan.rho(block, plan.rho_space), headed, tile)
                keep = plan.keep(lane, tile, block, k.dtype)
                group = None if plan.full else plan.group_logits(headed)
                answer, block_level = _tile_forward(plan, block, q, k, v, position, group, bias, keep)
                result.append(answer)
                levels.append(block_level)
            plan.tiling.write_(out[lane], tile, torch.cat(result))
            if level is not None:
                plan.tiling.write_(level[lane], tile, torch.cat(levels)[:, None])
        return from_lanes(out), _level(query, index) if level is None else from_lanes(level).squeeze(1)


def _level(query: Tensor, index: Tensor) -> Tensor:
    """Memory for the logarithms of normalisers, of the pointwise relation alone."""
    return query.new_empty((query.shape[0], index.shape[0], *query.shape[3:]) if index.ndim == 2 else 0)


def _tile_forward(plan, block, q, k, v, position, group, bias, keep):
    """The output of one block of a tile and its level or None; direct where the core lost precision or the encoding is
    full."""
    if plan.pointwise:
        return _run(pointwise.forward, plan.fused, q, k, v, position, group, block.table, bias, keep)
    if group is not None:
        answer, smallest = _run(factorised.forward, plan.fused, q, k, v, position, group, block.table, bias, keep)
        if plan.safe(smallest):
            return answer, None
    pieces = []
    for piece in plan.pieces(block, k):
        operands = [_piece(x, piece) for x in (q, k, v, position, group, bias, keep)]
        logits = factorised.full_logits(operands[3], operands[4], block.table)
        score = factorised.direct_scores(*operands[:2], logits, operands[5])
        pieces.append(factorised.direct(score, operands[2], operands[6]))
    return torch.cat(pieces, -1), None


@group_attention_op.register_fake
def _(query, key, value, rho_space, rho_group, index, *rest):
    return query.new_empty(query.shape[0], value.shape[1], index.shape[0], *query.shape[3:]), _level(query, index)


@torch.library.custom_op("tg_equiattn::group_attention_backward", mutates_args=())
def group_attention_backward_op(
    grad: Tensor, grad_level: Tensor | None, query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor,
    rho_group: Tensor, index: Tensor, mask: Tensor | None, seed: Tensor, kernel_size: int, selection: Sequence[int],
    circular: bool, dropout: float, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, rho_space and rho_group; ``grad_level`` is that of the level."""
    refuse_forward_mode()
    if query.numel() == 0:
        empty = [x.new_zeros(x.shape) for x in (query, key, value, rho_space, rho_group)]
        return empty[0], empty[1], empty[2], empty[3], empty[4]
    with torch.no_grad(), full_precision(query.device):
        if path == "triton":
            from . import triton_attention as kernels

            return kernels.backward(
                grad, grad_level, query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection,
                circular, dropout,
            )  # fmt: skip
        plan = AttentionPlan(
            query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout, path
        )
        grad_lanes = to_lanes(grad, plan.tiling.lanes)
        level_lanes = None if grad_level is None else to_lanes(grad_level[:, None], plan.tiling.lanes)
        grad_query = torch.zeros_like(plan.query)
        grad_key = [torch.zeros_like(x) for x in plan.key]
        grad_value = [torch.zeros_like(x) for x in plan.value]
        grad_space = torch.zeros_like(plan.rho_space)
        grad_group = rho_group.new_zeros(rho_group.shape)
        for lane, tile, k, v, bias in plan.tiles():
            tile_query = plan.tiling.query(plan.query[lane], tile)
            tile_grad = plan.tiling.query(grad_lanes[lane], tile)
            tile_level = None if level_lanes is None else plan.tiling.query(level_lanes[lane], tile)[:, 0]
            sums: list[Tensor] = []
            dq = []
            for block in plan.blocks:
                q, rho = tile_query[block.query], plan.rho(block, plan.rho_space)
                headed = plan.with_head(q, lane)
                position = plan.tiling.position(rho, headed, tile)
                keep = plan.keep(lane, tile, block, k.dtype)
                group = None if plan.full else plan.group_logits(headed)
                grads = _tile_backward(
                    plan, block, q, k, v, position, group, bias, keep, tile_grad[block.output], tile_level
                )
                from_position = plan.tiling.position_backward(rho, headed, tile, grads[3], plan.rho(block, grad_space))
                dq.append(grads[0] + from_position[:, : plan.channels])
                if group is not None:
                    dq[-1] += torch.matmul(rho_group[:, : plan.channels].T, grads[4])
                    grad_group += torch.matmul(grads[4], headed.mT).sum(0)
                sums = list(grads[1:3]) if not sums else [a.add_(b) for a, b in zip(sums, grads[1:3], strict=True)]
            plan.tiling.write_(grad_query[lane], tile, torch.cat(dq))
            plan.tiling.scatter_(grad_key[lane], tile, sums[0])
            plan.tiling.scatter_(grad_value[lane], tile, sums[1])
        restored = [plan.tiling.restore(torch.stack(x)) for x in (grad_key, grad_value)]
        grad_key_value = from_lanes(restored[0]), from_lanes(restored[1])
        return from_lanes(grad_query), *grad_key_value, grad_space.transpose(0, 1).contiguous(), grad_group


def _tile_backward(plan, block, q, k, v, position, group, bias, keep, grad, grad_level):
    """Gradients of q, k, v, the space logits and the group logits; direct where the core lost precision."""
    if plan.pointwise:
        return _run(
            pointwise.backward, plan.fused, q, k, v, position, group, block.table, block.inverse, bias, keep, grad,
            grad_level,
        )  # fmt: skip
    if group is not None:
        *grads, smallest = _run(
            factorised.backward, plan.fused, q, k, v, position, group, block.table, block.inverse, bias, keep, grad
        )
        if plan.safe(smallest):
            return grads
    pieces = []
    for piece in plan.pieces(block, k):
        operands = [_piece(x, piece) for x in (q, k, v, position, group, bias, keep, grad)]
        logits = factorised.full_logits(operands[3], operands[4], block.table)
        *grads, logit = factorised.direct_backward(*operands[:3], logits, *operands[5:])
        pieces.append((*grads, *factorised.full_logits_backward(logit, group is not None, block.inverse)))
    return [None if x[0] is None else torch.cat(x, -1) for x in zip(*pieces, strict=True)]


@group_attention_backward_op.register_fake
def _(grad, grad_level, query, key, value, rho_space, rho_group, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, rho_space, rho_group))


def _setup_context(ctx, inputs, output):
    query, key, value, rho_space, rho_group, index, mask, seed, kernel_size, selection, circular, dropout, path = inputs
    ctx.save_for_backward(query, key, value, rho_space, rho_group, index, mask, seed)
    ctx.settings = (kernel_size, selection, circular, dropout, path)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_level):
    *operands, index, mask, seed = ctx.saved_tensors
    grad_level = grad_level if index.ndim == 2 else None
    if grad is None and grad_level is None:
        return (None,) * 13
    if grad is None:
        query, value = operands[0], operands[2]
        grad = query.new_zeros(query.shape[0], value.shape[1], index.shape[0], *query.shape[3:])
    if transformed():  # since the forward pass
        settings = (index, mask, seed, *ctx.settings[:-1])
        out, pullback = torch.func.vjp(lambda *x: plain_group_attention(*x, *settings), *operands)
        grads = pullback((grad, torch.zeros_like(out[1]) if grad_level is None else grad_level))
    else:
        grads = group_attention_backward_op(grad, grad_level, *operands, index, mask, seed, *ctx.settings)
    return *grads, *[None] * 8


def _save_backward(ctx, inputs, output):
    *tensors, kernel_size, selection, circular, dropout, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = (kernel_size, selection, circular, dropout)
    ctx.set_materialize_grads(False)


def _second_backward(ctx, *cotangents):
    grad, grad_level, *operands, index, mask, seed = ctx.saved_tensors
    if all(c is None for c in cotangents) or not operands[0].numel():
        return (None,) * 15
    settings = (index, mask, seed, *ctx.settings)
    if torch.is_grad_enabled():  # to be differentiated in turn
        upstream = [grad] if grad_level is None else [grad, grad_level]
        results = second_derivatives(
            lambda *x: plain_group_attention(*x, *settings)[: len(upstream)], operands, upstream, cotangents
        )
        grads, (to_grad, *levels) = results[: len(operands)], results[len(operands) :]
        to_level = levels[0] if levels else None
    else:
        to_grad, to_level, *grads = second_backward(cotangents, grad, grad_level, operands, *settings)
    return to_grad, None if grad_level is None else to_level, *grads, *[None] * 8


group_attention_op.register_autograd(_backward, setup_context=_setup_context)
group_attention_backward_op.register_autograd(_second_backward, setup_context=_save_backward)
