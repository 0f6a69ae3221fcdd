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
from .feature_chunks import in_chunks
from .feature_formulas import Tensors
from .plane_wave_formulas import (
    plain_reading,
    plain_table,
    reading_gradient,
    reading_of_chunk,
    second_gradient,
    table_gradient,
    table_of_chunk,
)

_Some = Tensor | None


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
    ctx.set_materialize_grads(False)


def _second_gradient(ctx, nodes: Tensors, groups: Tensors, *cotangents: _Some) -> tuple[Tensor, ...]:
    """:func:`second_gradient`, chunk by chunk; it can be differentiated in turn where gradients are being recorded."""
    to_pos, to_key, to_value, to_waves, to_table = cotangents
    to_pos, to_waves = (to_pos, to_waves) if ctx.moving else (None, None)
    of_nodes, of_groups = (to_pos, to_key, to_value), (to_waves, to_table)

    def run(some: Tensors, others: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
        left, right = iter(some[3:]), iter(others[2:])
        to_nodes = [None if x is None else next(left) for x in of_nodes]
        to_groups = [None if x is None else next(right) for x in of_groups]
        return second_gradient(some[:3], others[:2], to_nodes, to_groups)

    nodes, groups = (
        [*nodes, *(x for x in of_nodes if x is not None)],
        [*groups, *(x for x in of_groups if x is not None)],
    )
    with full_precision(nodes[0].device):
        return in_chunks(run, nodes, groups, None, _count(groups[0], nodes[1]))


def _table_second_gradient(ctx, of_pos: _Some, of_key: _Some, of_value: _Some, of_waves: _Some):
    pos, key, value, waves, grad = ctx.saved_tensors
    return *_second_gradient(ctx, (pos, key, value), (waves, grad), of_pos, of_key, of_value, of_waves, None), None


def _reading_second_gradient(ctx, of_pos: _Some, of_query: _Some, of_waves: _Some, of_table: _Some):
    pos, query, waves, table, grad = ctx.saved_tensors
    to_pos, to_query, to_grad, to_waves, to_table = _second_gradient(
        ctx, (pos, query, grad), (waves, table), of_pos, of_query, None, of_waves, of_table
    )
    return to_pos, to_query, to_waves, to_table, to_grad, None


chunked_table.register_autograd(_table_gradient, setup_context=_save)
chunked_reading.register_autograd(_reading_gradient, setup_context=_save)
chunked_table_backward.register_autograd(_table_second_gradient, setup_context=_save_backward)
chunked_reading_backward.register_autograd(_reading_second_gradient, setup_context=_save_backward)
