"""Group self-attention as one PyTorch operator: tiles through the core, recomputed in backward.

Registered with ``torch.library`` so that torch.compile and torch.export see a single node with known output shapes
and gradients; it saves its inputs only. Inside a compiled graph the core is compiled as well, once for each layer:
for all image sizes where windows are local, for each where attention is global. On the path "triton" one fused kernel
takes the place of tiles and core.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...precision import full_precision
from . import factorised as core
from . import hashed_dropout
from .tiles import GlobalTiling, LocalTiling, from_lanes, tiling, to_lanes

# Floats of the largest temporary of one tile. Compiled steps fuse their loops and gain from tiles that stay in a
# core's second-level cache; eager steps call many small operators and gain from longer ones.
# A GPU needs millions of elements a launch.
_TILE_BUDGET = {"compiled": 1 << 18, "eager": 1 << 20, "other": 1 << 24}


class _Part(NamedTuple):
    """The query elements, output elements and (H, T, S) index of one call of the core."""

    query: slice
    output: slice
    table: Tensor


def _parts(index: Tensor) -> list[_Part]:
    if index.ndim == 3:
        return [_Part(slice(None), slice(None), index)]
    return [_Part(slice(t, t + 1), slice(t, t + 1), index[t][None, None]) for t in range(len(index))]


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
        return _compiled(step, (*query.shape[:-1], *key.shape[:-1], len(rest[3])))(*operands)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _warn_not_compiled(str(error).strip().replace("\n", " ")[:200])
        return step(*operands)


class _Plan:
    """Everything both directions share: operands in lanes, tiles, parts and dropout draws."""

    def __init__(self, query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout, path):
        spatial = query.shape[3:]
        self.parts = _parts(index)
        self.full = rho_space.ndim == 4
        self.fused, self.dropout = path == "compiled" and not self.full, dropout
        outputs = index.shape[0] if index.ndim == 3 else 1
        neighbours = query[0, 0, 0].numel() if kernel_size == 0 else rho_space.shape[1]
        temporary = outputs * index.shape[-1] * neighbours * (query.shape[2] if self.full and index.ndim == 3 else 1)
        self.budget = _TILE_BUDGET["other" if query.device.type != "cpu" else "compiled" if self.fused else "eager"]
        width = max(16 if self.full else 64, self.budget // temporary)
        self.tiling: LocalTiling | GlobalTiling = tiling(spatial, kernel_size, selection, len(query), width, query)
        lanes = self.tiling.lanes
        self.query = to_lanes(query, lanes)
        self.key = [self.tiling.prepare(x) for x in to_lanes(key, lanes)]
        self.value = [self.tiling.prepare(x) for x in to_lanes(value, lanes)]
        self.rho_space = rho_space.transpose(0, 1).contiguous()  # (D, H, [U,] C)
        self.rho_group = rho_group
        self.hashes: tuple[Tensor, Tensor] | None = None
        if dropout:
            columns = len(index) * index.shape[-1] * neighbours
            row, column = hashed_dropout.places(len(query) * math.prod(spatial), columns, seed)
            column = column.view(-1, index.shape[-1], neighbours).permute(2, 0, 1)[..., None]  # (D, H, S, 1)
            self.hashes = to_lanes(row.view(len(query), 1, 1, *spatial), lanes), column

    def rho(self, part: _Part) -> Tensor:
        """(D, E, C) with E the output elements, or with the full encoding output elements times U."""
        rho = self.rho_space[:, part.output]
        return rho.flatten(1, -2)

    def tiles(self) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor | None]]:
        for lane in range(len(self.query)):
            for tile in self.tiling:
                key = self.tiling.gather(self.key[lane], tile)
                value = self.tiling.gather(self.value[lane], tile)
                yield lane, tile, key, value, self.tiling.mask(tile)

    def keep(self, lane: int, tile: slice, part: _Part, dtype: torch.dtype) -> Tensor | None:
        """Dropout factors (D, H, S, p)."""
        if self.hashes is None:
            return None
        row = self.tiling.query(self.hashes[0][lane], tile)[0, 0]
        return hashed_dropout.keep(row, self.hashes[1][:, part.output], self.dropout, dtype)

    def group_logits(self, query: Tensor) -> Tensor:
        return torch.matmul(self.rho_group, query)

    def safe(self, smallest: Tensor) -> bool:
        """Whether the factors kept their precision; only the CPU is asked (elsewhere factors are double)."""
        return smallest.device.type != "cpu" or bool(smallest >= core.SMALLEST_NORMALISER[smallest.dtype])

    def full_logits(self, position: Tensor, group: Tensor | None, part: _Part) -> Tensor:
        """(T, D, H, U, p)."""
        if group is None:
            return position.unflatten(2, (len(part.table), -1))
        return position[:, :, :, None] + group[:, None, None]

    def pieces(self, part: _Part, key: Tensor) -> list[slice]:
        """Runs of queries of a tile for which the direct formula may hold every score at once."""
        scores = part.table.numel() * key.shape[0]
        width = max(1, 4 * self.budget // scores)
        return [slice(p, p + width) for p in range(0, key.shape[-1], width)]


def _piece(x: Tensor | None, piece: slice) -> Tensor | None:
    return None if x is None else x[..., piece]


@torch.library.custom_op("tg_equiattn::group_attention", mutates_args=())
def group_attention_op(
    query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor, rho_group: Tensor, index: Tensor, seed: Tensor,
    kernel_size: int, selection: Sequence[int], dropout: float, path: str,
) -> Tensor:  # fmt: skip
    """query, key (M, C, T, *spatial), value (M, Cv, S, *spatial) -> (M, Cv, H, *spatial).

    ``rho_space`` is (H, R, C) with ``rho_group`` (U, C), or (H, R, U, C) with an empty ``rho_group``; R counts the
    offsets of the window, or with ``kernel_size`` 0 (global) those of all pairs. ``index`` is (H, T, S), or (T, S)
    for the pointwise relation h = t.
    """
    if query.numel() == 0:
        return query.new_zeros(len(query), value.shape[1], index.shape[0], *query.shape[3:])
    with torch.no_grad(), full_precision(query.device):
        if path == "triton":
            from . import triton_attention as kernels

            return kernels.forward(
                query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout
            )
        plan = _Plan(query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout, path)
        lanes = plan.query.shape
        out = query.new_empty(lanes[0], index.shape[0], value.shape[1], *lanes[3:])
        for lane, tile, k, v, bias in plan.tiles():
            tile_query = plan.tiling.query(plan.query[lane], tile)
            result = []
            for part in plan.parts:
                q = tile_query[part.query]
                position = plan.tiling.position(plan.rho(part), q, tile)
                keep = plan.keep(lane, tile, part, k.dtype)
                group = None if plan.full else plan.group_logits(q)
                result.append(_tile_forward(plan, part, q, k, v, position, group, bias, keep))
            plan.tiling.write_(out[lane], tile, torch.cat(result))
        return from_lanes(out)


def _tile_forward(plan, part, q, k, v, position, group, bias, keep):
    """The output of one part of a tile; direct where the core lost precision or the encoding is full."""
    if group is not None:
        answer, smallest = _run(core.forward, plan.fused, q, k, v, position, group, part.table, bias, keep)
        if plan.safe(smallest):
            return answer
    pieces = []
    for piece in plan.pieces(part, k):
        operands = [_piece(x, piece) for x in (q, k, v, position, group, bias, keep)]
        logits = plan.full_logits(operands[3], operands[4], part)
        pieces.append(core.direct(*operands[:3], logits, part.table, *operands[5:]))
    return torch.cat(pieces, -1)


@group_attention_op.register_fake
def _(query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout, path):
    return query.new_empty(len(query), value.shape[1], index.shape[0], *query.shape[3:])


@torch.library.custom_op("tg_equiattn::group_attention_backward", mutates_args=())
def group_attention_backward_op(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, rho_space: Tensor, rho_group: Tensor, index: Tensor,
    seed: Tensor, kernel_size: int, selection: Sequence[int], dropout: float, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, rho_space and rho_group."""
    if query.numel() == 0:
        empty = [x.new_zeros(x.shape) for x in (query, key, value, rho_space, rho_group)]
        return empty[0], empty[1], empty[2], empty[3], empty[4]
    with torch.no_grad(), full_precision(query.device):
        if path == "triton":
            from . import triton_attention as kernels

            return kernels.backward(
                grad, query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout
            )
        plan = _Plan(query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout, path)
        grad_lanes = to_lanes(grad, plan.tiling.lanes)
        grad_query = torch.zeros_like(plan.query)
        grad_key = [torch.zeros_like(x) for x in plan.key]
        grad_value = [torch.zeros_like(x) for x in plan.value]
        grad_space = torch.zeros_like(plan.rho_space)
        grad_group = rho_group.new_zeros(rho_group.shape)
        for lane, tile, k, v, bias in plan.tiles():
            tile_query = plan.tiling.query(plan.query[lane], tile)
            tile_grad = plan.tiling.query(grad_lanes[lane], tile)
            sums: list[Tensor] = []
            dq = []
            for part in plan.parts:
                q, rho = tile_query[part.query], plan.rho(part)
                position = plan.tiling.position(rho, q, tile)
                keep = plan.keep(lane, tile, part, k.dtype)
                group = None if plan.full else plan.group_logits(q)
                grads = _tile_backward(plan, part, q, k, v, position, group, bias, keep, tile_grad[part.output])
                rho_grad = torch.zeros_like(rho)
                from_position = plan.tiling.position_backward(rho, q, tile, grads[3], rho_grad)
                grad_space[:, part.output] += rho_grad.view_as(grad_space[:, part.output])
                dq.append(grads[0] + from_position)
                if group is not None:
                    dq[-1] += torch.matmul(rho_group.T, grads[4])
                    grad_group += torch.matmul(grads[4], q.mT).sum(0)
                sums = list(grads[1:3]) if not sums else [a.add_(b) for a, b in zip(sums, grads[1:3], strict=True)]
            plan.tiling.write_(grad_query[lane], tile, torch.cat(dq))
            plan.tiling.scatter_(grad_key[lane], tile, sums[0])
            plan.tiling.scatter_(grad_value[lane], tile, sums[1])
        restored = [plan.tiling.restore(torch.stack(x)) for x in (grad_key, grad_value)]
        grad_key_value = from_lanes(restored[0]), from_lanes(restored[1])
        return from_lanes(grad_query), *grad_key_value, grad_space.transpose(0, 1).contiguous(), grad_group


def _tile_backward(plan, part, q, k, v, position, group, bias, keep, grad):
    """Gradients of q, k, v, the space logits and the group logits; direct where the core lost precision."""
    if group is not None:
        *grads, smallest = _run(core.backward, plan.fused, q, k, v, position, group, part.table, bias, keep, grad)
        if plan.safe(smallest):
            return grads
    pieces = []
    for piece in plan.pieces(part, k):
        operands = [_piece(x, piece) for x in (q, k, v, position, group, bias, keep, grad)]
        logits = plan.full_logits(operands[3], operands[4], part)
        pieces.append(core.direct_backward(*operands[:3], logits, part.table, *operands[5:]))
    dq, dk, dv, logits = (torch.cat(x, -1) for x in zip(*pieces, strict=True))
    if group is None:
        return dq, dk, dv, logits.flatten(2, 3), None
    return dq, dk, dv, logits.sum(3), logits.sum((1, 2))


@group_attention_backward_op.register_fake
def _(grad, query, key, value, rho_space, rho_group, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, rho_space, rho_group))


def _setup_context(ctx, inputs, output):
    query, key, value, rho_space, rho_group, index, seed, kernel_size, selection, dropout, path = inputs
    ctx.save_for_backward(query, key, value, rho_space, rho_group, index, seed)
    ctx.settings = (kernel_size, selection, dropout, path)


def _backward(ctx, grad):
    grads = group_attention_backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, None, None, None


group_attention_op.register_autograd(_backward, setup_context=_setup_context)
