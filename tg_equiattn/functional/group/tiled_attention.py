"""Group self-attention as one PyTorch operator, which saves its inputs only: tiles through the core, recomputed in
backward. Inside a compiled graph the core is compiled as well."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import refuse_forward_mode
from ..second_derivatives import register_derivatives, second_derivatives
from . import direct, factorised, pointwise
from .plan import AttentionPlan, plain_group_attention
from .tiles import from_lanes, to_lanes

_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor rho_space, Tensor rho_group, Tensor index, Tensor? mask, "
    "Tensor seed, SymInt kernel_size, SymInt[] selection, bool circular, float dropout, str path"
)


@functools.cache
def _compiled(step: Any, shape: tuple[int, ...]) -> Any:
    """One compiled step per shape, so that layers do not use up each other's recompilations."""
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    return torch.compile(step, dynamic=False, **options)


@functools.cache
def _warn_not_compiled(reason: str) -> None:
    warnings.warn(f"group attention could not be compiled and runs eagerly: {reason}", stacklevel=2)


def _run(step: Any, fused: bool, **operands: Any) -> Any:
    """Call a step of the core, compiled if ``fused`` and a compiler is there."""
    query, key, value = (operands[name] for name in ("query", "key", "value"))
    if not fused or query.shape[-1] == 1:
        return step(**operands)
    for x in operands.values():
        if isinstance(x, Tensor) and x.is_floating_point():
            torch._dynamo.maybe_mark_dynamic(x, x.ndim - 1)
    try:
        return _compiled(step, (*query.shape[:-1], *key.shape[:-1], *value.shape[:-1]))(**operands)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _warn_not_compiled(str(error).strip().replace("\n", " ")[:200])
        return step(**operands)


def _tile(plan: AttentionPlan, steps: Sequence[Callable], operands: dict[str, Any]) -> Sequence[Any]:
    """What one form gives for a tile: the pointwise one; the factorised one, on the CPU, unless its factors lost
    precision; the direct one, there for as many queries as it may hold all scores of."""
    pointwise_step, factorised_step, direct_step = steps
    if plan.paired:
        return _run(pointwise_step, plan.fused, index=plan.table, **operands)
    if not plan.direct:
        *results, smallest = _run(factorised_step, plan.fused, index=plan.table, **operands)
        if smallest >= factorised.SMALLEST_NORMALISER[smallest.dtype]:
            return results
    if operands["query"].device.type != "cpu":
        return _run(direct_step, plan.fused, index=plan.table, **operands)
    tables = {"index": plan.table} | {n: operands.pop(n) for n in ("inverse",) if n in operands}
    width, pieces = max(1, 4 * plan.budget // (plan.table.numel() * len(operands["key"]))), []
    for first in range(0, operands["query"].shape[-1], width):
        piece = {n: None if x is None else x[..., first : first + width] for n, x in operands.items()}
        pieces.append(direct_step(**piece, **tables))
    return [None if x[0] is None else torch.cat(x, -1) for x in zip(*pieces, strict=True)]


@torch.library.custom_op("tg_equiattn::group_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor)")
def group_attention_op(query, key, value, rho_space, rho_group, index, *rest) -> tuple[Tensor, Tensor]:
    """query (M, C, T, *spatial), key and value (M, C and Cv, S, *spatial) -> out (M, Cv, H, *spatial) and level.

    ``rho_space`` is (H, R, C) with ``rho_group`` (U, C), or (H, R, U, C) with an empty one; R offsets of the window, or
    of all pairs (``kernel_size`` 0). Encodings may have one channel a head more than queries: biases, of image m those
    of head m modulo their number. ``index`` is (H, T, S), or (T, S) for h = t; then level (M, H, *spatial) is the
    logarithm of a query's sum of exponentials, else empty. ``mask`` (M, *spatial) is true where there are keys.
    """
    refuse_forward_mode()
    operands = query, key, value, rho_space, rho_group, index, *rest
    if query.numel() == 0:
        return _outputs(*operands)
    with torch.no_grad(), full_precision(query.device):
        plan = AttentionPlan(*operands)
        lanes = plan.query.shape
        out = query.new_empty(lanes[0], index.shape[0], value.shape[1], *lanes[3:])
        level = query.new_empty(lanes[0], index.shape[0], 1, *lanes[3:]) if plan.paired else None
        for lane, tile in plan:
            x = plan.operands(lane, tile, *plan.slabs(lane, tile), plan.rho_space, rho_group)
            results = _tile(plan, (pointwise.forward, factorised.forward, direct.forward), x)
            plan.tiling.write_(out[lane], tile, results[0])
            if level is not None:
                plan.tiling.write_(level[lane], tile, results[1][:, None])
        return from_lanes(out), query.new_empty(0) if level is None else from_lanes(level).squeeze(1)


def _outputs(query, key, value, rho_space, rho_group, index, *rest) -> tuple[Tensor, Tensor]:
    shape = index.shape[0], *query.shape[3:]
    level = query.new_empty((query.shape[0], *shape) if index.ndim == 2 else 0)
    return query.new_empty(query.shape[0], value.shape[1], *shape), level


@torch.library.custom_op(
    "tg_equiattn::group_attention_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_level, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def group_attention_backward_op(grad, grad_level, query, key, value, rho_space, rho_group, *rest):
    """Gradients of query, key, value, rho_space and rho_group; ``grad_level`` is that of the level."""
    refuse_forward_mode()
    operands = query, key, value, rho_space, rho_group, *rest
    if query.numel() == 0:
        return tuple(x.new_zeros(x.shape) for x in operands[:5])
    with torch.no_grad(), full_precision(query.device):
        plan = AttentionPlan(*operands)
        tiling = plan.tiling
        grads = to_lanes(grad, tiling.lanes)
        levels = to_lanes(grad_level[:, None], tiling.lanes) if plan.paired else None
        grad_query, grad_space, grad_group = (torch.zeros_like(x) for x in (plan.query, plan.rho_space, rho_group))
        grad_key, grad_value = ([torch.zeros_like(x) for x in xs] for xs in (plan.key, plan.value))
        for lane, tile in plan:
            x = plan.operands(lane, tile, *plan.slabs(lane, tile), plan.rho_space, rho_group)
            given = {"inverse": plan.inverse, "grad": tiling.query(grads[lane], tile)}
            if levels is not None:
                given["grad_level"] = tiling.query(levels[lane], tile)[:, 0]
            steps = pointwise.backward, factorised.backward, direct.backward
            dq, dk, dv, position, group = _tile(plan, steps, x | given)
            headed = plan.with_head(x["query"], lane)
            along = tiling.position_backward(plan.rho(plan.rho_space), headed, tile, position, plan.rho(grad_space))
            dq = dq + along[:, : plan.channels]
            if group is not None:
                dq += torch.matmul(rho_group[:, : plan.channels].T, group)
                grad_group += torch.matmul(group, headed.mT).sum(0)
            tiling.write_(grad_query[lane], tile, dq)
            tiling.scatter_(grad_key[lane], tile, dk)
            tiling.scatter_(grad_value[lane], tile, dv)
        restored = [from_lanes(tiling.restore(torch.stack(x))) for x in (grad_key, grad_value)]
        return from_lanes(grad_query), *restored, grad_space.transpose(0, 1).contiguous(), grad_group


@group_attention_backward_op.register_fake
def _(grad, grad_level, *operands):
    return tuple(x.new_empty(x.shape) for x in operands[:5])


def _second_backward(operands, upstream, cotangents, *rest) -> tuple[Tensor, ...]:
    """As :func:`.second_derivatives`: tile by tile, or where its results are to be differentiated in turn at once."""
    if torch.is_grad_enabled() or not operands[0].numel():
        return second_derivatives(lambda *x: plain_group_attention(*x, *rest), operands, upstream, cotangents)
    with full_precision(operands[0].device):
        plan, along = (AttentionPlan(*x, *rest[:-1], "plain") for x in (operands, cotangents))  # type: ignore[call-arg]
        tiling, encodings = plan.tiling, [plan.rho_space, plan.rho_group]
        grads = [to_lanes(x if n == 0 else x[:, None], tiling.lanes) for n, x in enumerate(upstream[: 1 + plan.paired])]
        to_grads, to_query = [torch.zeros_like(x) for x in grads], torch.zeros_like(plan.query)
        to_keys = [[torch.zeros_like(x) for x in xs] for xs in (plan.key, plan.value)]
        to_encodings = [torch.zeros_like(x) for x in encodings]
        for lane, tile in plan:
            given = [tiling.query(x[lane], tile) for x in grads]
            given[1:] = [given[1][:, 0] if plan.paired else upstream[1]]
            parts = second_derivatives(
                functools.partial(plan.attend, lane, tile), (*plan.slabs(lane, tile), *encodings), given,
                (*along.slabs(lane, tile), along.rho_space, along.rho_group),
            )  # fmt: skip
            tiling.write_(to_query[lane], tile, parts[0])
            for total, part in zip(
                [*(tiling.slab(x[lane], tile) for x in to_keys), *to_encodings], parts[1:5], strict=True
            ):
                total += part
            for total, part in zip(to_grads, parts[5:], strict=False):
                tiling.write_(total[lane], tile, part.view(len(part), -1, part.shape[-1]))
        images = [from_lanes(tiling.restore(torch.stack(x))) for x in to_keys]
        to_grads = [from_lanes(x) for x in to_grads]
        to_level = to_grads[1].squeeze(1) if plan.paired else torch.zeros_like(upstream[1])
        to_space = to_encodings[0].transpose(0, 1).contiguous()
        return from_lanes(to_query), *images, to_space, to_encodings[1], to_grads[0], to_level


group_attention_op.register_fake(_outputs)
register_derivatives(group_attention_op, group_attention_backward_op, plain_group_attention, 5, second=_second_backward)
