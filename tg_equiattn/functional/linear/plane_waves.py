r"""The two sums of Euclidean fast attention over the nodes of a graph, as PyTorch operators in O(N) memory.

    table     T_dfsp,v = sum_j phi_dfsp(x_j, k_j) v_jv
    reading   out_i,v = sum_dfsp phi_dfsp(x_i, q_i) T_dfsp,v

with the features of :mod:`.plane_wave_formulas`. Each is linear and the other's adjoint, so what lies between them (a
tensor product, an output map) acts on tables, one a graph, and not on nodes. :func:`plain_table` and
:func:`plain_reading` say the same with all features in memory, and are what transforms see. The operators work through
nodes in chunks whose features stay in the cache, and backward computes them again; backward's own derivatives are taken
chunk by chunk too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...precision import full_precision
from ...transforms import transformed
from ..backend import refuse_forward_mode, use_plain
from .feature_chunks import in_chunks, pullback
from .plane_wave_formulas import (
    plain_reading,
    plain_table,
    reading_gradient,
    reading_of_chunk,
    table_gradient,
    table_of_chunk,
)


def plane_wave_table(pos: Tensor, key: Tensor, value: Tensor, waves: Tensor, backend: str = "auto") -> Tensor:
    """Tables (G, D, F, 2, P, V) of positions (G, L, 3), keys (G, L, F, P), values (G, L, V), waves (G, D, F, 3)."""
    return (plain_table if use_plain(backend) else chunked_table)(pos, key, value, waves)


def plane_wave_reading(pos: Tensor, query: Tensor, waves: Tensor, table: Tensor, backend: str = "auto") -> Tensor:
    """Outputs (G, L, V) of positions (G, L, 3), queries (G, L, F, P), waves (G, D, F, 3) and tables."""
    return (plain_reading if use_plain(backend) else chunked_reading)(pos, query, waves, table)


def _count(waves: Tensor, key: Tensor) -> int:
    """Features of a node."""
    return 2 * waves.shape[1] * waves.shape[2] * key.shape[3]


@torch.library.custom_op("tg_equiattn::plane_wave_table", mutates_args=())
def chunked_table(pos: Tensor, key: Tensor, value: Tensor, waves: Tensor) -> Tensor:
    """:func:`plane_wave_table` in O(N) memory."""
    refuse_forward_mode()
    with full_precision(pos.device):
        return in_chunks(table_of_chunk, (pos, key, value), (waves,), None, _count(waves, key))[0]


@chunked_table.register_fake
def _(pos: Tensor, key: Tensor, value: Tensor, waves: Tensor) -> Tensor:
    return value.new_empty(*waves.shape[:3], 2, key.shape[3], value.shape[2])


@torch.library.custom_op("tg_equiattn::plane_wave_table_backward", mutates_args=())
def chunked_table_backward(
    pos: Tensor, key: Tensor, value: Tensor, waves: Tensor, grad: Tensor, moving: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_forward_mode()
    with full_precision(pos.device):
        run = functools.partial(table_gradient, moving)
        grads = in_chunks(run, (pos, key, value), (waves, grad), None, _count(waves, key))
        return tuple(x.contiguous() for x in grads)  # type: ignore[return-value]


@chunked_table_backward.register_fake
def _(pos: Tensor, key: Tensor, value: Tensor, waves: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (pos, key, value, waves))


@torch.library.custom_op("tg_equiattn::plane_wave_reading", mutates_args=())
def chunked_reading(pos: Tensor, query: Tensor, waves: Tensor, table: Tensor) -> Tensor:
    """:func:`plane_wave_reading` in O(N) memory."""
    refuse_forward_mode()
    with full_precision(pos.device):
        return in_chunks(reading_of_chunk, (pos, query), (waves, table), None, _count(waves, query))[0].contiguous()


@chunked_reading.register_fake
def _(pos: Tensor, query: Tensor, waves: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(*pos.shape[:2], table.shape[-1])


@torch.library.custom_op("tg_equiattn::plane_wave_reading_backward", mutates_args=())
def chunked_reading_backward(
    pos: Tensor, query: Tensor, waves: Tensor, table: Tensor, grad: Tensor, moving: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_forward_mode()
    with full_precision(pos.device):
        run = functools.partial(reading_gradient, moving)
        grads = in_chunks(run, (pos, query, grad), (waves, table), None, _count(waves, query))
        return tuple(x.contiguous() for x in grads)  # type: ignore[return-value]


@chunked_reading_backward.register_fake
def _(pos: Tensor, query: Tensor, waves: Tensor, table: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (pos, query, waves, table))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _table_gradient(ctx, grad: Tensor):
    pos, key, value, waves = ctx.saved_tensors
    moving = ctx.needs_input_grad[0] or ctx.needs_input_grad[3]
    if transformed():  # entered after the forward pass, as by a vectorised Jacobian
        of_nodes, of_groups = table_gradient(True, (pos, key, value), (waves, grad), None)
        return *of_nodes, *of_groups
    return chunked_table_backward(pos, key, value, waves, grad, moving)


def _reading_gradient(ctx, grad: Tensor):
    pos, query, waves, table = ctx.saved_tensors
    moving = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
    if transformed():
        of_nodes, of_groups = reading_gradient(True, (pos, query, grad), (waves, table), None)
        return *of_nodes, *of_groups
    return chunked_reading_backward(pos, query, waves, table, grad, moving)


def _save_backward(ctx, inputs, output) -> None:
    *tensors, ctx.moving = inputs
    ctx.save_for_backward(*tensors)


def _table_second_gradient(ctx, of_pos: Tensor, of_key: Tensor, of_value: Tensor, of_waves: Tensor):
    pos, key, value, waves, grad = ctx.saved_tensors
    run, count = functools.partial(table_gradient, ctx.moving), _count(waves, key)
    given = (pos, key, value), (waves, grad), None, (of_pos, of_key, of_value), (of_waves,)
    return *pullback(run, *given, count), None


def _reading_second_gradient(ctx, of_pos: Tensor, of_query: Tensor, of_waves: Tensor, of_table: Tensor):
    pos, query, waves, table, grad = ctx.saved_tensors
    run, count = functools.partial(reading_gradient, ctx.moving), _count(waves, query)
    given = (pos, query, grad), (waves, table), None, (of_pos, of_query), (of_waves, of_table)
    to_pos, to_query, to_grad, to_waves, to_table = pullback(run, *given, count)
    return to_pos, to_query, to_waves, to_table, to_grad, None


chunked_table.register_autograd(_table_gradient, setup_context=_save)
chunked_reading.register_autograd(_reading_gradient, setup_context=_save)
chunked_table_backward.register_autograd(_table_second_gradient, setup_context=_save_backward)
chunked_reading_backward.register_autograd(_reading_second_gradient, setup_context=_save_backward)
