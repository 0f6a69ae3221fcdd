"""Products over the pairs of a sparse relation, as PyTorch operators without a tensor of (pairs, channels).

:func:`edge_dot` computes query-key products of the pairs, and :func:`edge_sum` adds weighted values over pairs. The
gradients of each consist of both, so they can be differentiated any number of times. The operators use torch's sparse
CSR products (MKL, cuSPARSE), head by head. Gathers of rows replace them under transforms, on accelerators if the rows
fit in a tile, and on accelerators with deterministic algorithms: ``index_add`` is deterministic, cuSPARSE is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..operators import by_operator, is_small, tile_numbers
from ..shapes import Float, Int
from ..torch_state import full_precision, is_exported, is_traced, is_transformed, refuse_forward_mode
from .edges import CSR
from .neighbors import NeighborList

_PAIRS = 4096  # pairs whose rows are gathered at a time

with warnings.catch_warnings():  # torch says once in a process that CSR tensors are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 1], device="cpu"), torch.tensor([0], device="cpu"), [1.0], device="cpu")


def edge_dot(
    query: Float[Tensor, "heads rows d"], key: Float[Tensor, "heads cols d"], relation: CSR | NeighborList
) -> Float[Tensor, "heads pairs"]:
    """Scalar products of the query and the key of each pair of a relation."""
    if _by_operator(query, relation.row):
        return csr_edge_dot(query.contiguous(), key.contiguous(), *_matrix(relation, query))
    # a compiler fuses the gathers with the products, so tiles save no memory
    return gathered_edge_dot(query, key, relation.row, relation.col, None if is_traced(query) else _PAIRS)


def edge_sum(
    weight: Float[Tensor, "heads pairs"], value: Float[Tensor, "heads cols d"], relation: CSR | NeighborList
) -> Float[Tensor, "heads rows d"]:
    """Sums over the pairs of each row of weights times values."""
    if _by_operator(value, relation.row):
        return csr_edge_sum(weight, value.contiguous(), *_matrix(relation, value))
    return gathered_edge_sum(weight, value, relation.row, relation.col, relation.num_rows)


def _by_operator(x: Tensor, row: Tensor) -> bool:
    """True if an operator runs. Small calls on a CPU use gathers. Exported programs have torch's own operations, to run
    without this library."""
    numbers = x.shape[0] * row.shape[0]
    return not is_small(x, numbers) and not is_exported() and by_operator(x, numbers)


def _matrix(relation: CSR | NeighborList, x: Tensor) -> CSR:
    """The matrix of a relation. Where rows are gathered, there is no need to sort its transpose."""
    if isinstance(relation, CSR) or is_traced(x) or not _gathers(x, relation.row):
        return relation if isinstance(relation, CSR) else relation.csr
    starts = relation.row.new_empty(relation.num_rows + 1)  # only its size is read
    return CSR(starts, relation.col, relation.row, starts, relation.row, relation.col, None, None)


def gathered_edge_dot(
    query: Float[Tensor, "heads rows d"], key: Float[Tensor, "heads cols d"], row: Int[Tensor, " pairs"],
    col: Int[Tensor, " pairs"], tile: int | None = _PAIRS,
) -> Float[Tensor, "heads pairs"]:  # fmt: skip
    """:func:`edge_dot`, ``tile`` pairs at a time, or all of them."""
    if tile is None or row.shape[0] <= tile:
        return (query.index_select(1, row) * key.index_select(1, col)).sum(-1)
    pairs = zip(row.split(tile), col.split(tile), strict=True)
    return torch.cat([gathered_edge_dot(query, key, *some, None) for some in pairs], -1)


def gathered_edge_sum(
    weight: Float[Tensor, "heads pairs"], value: Float[Tensor, "heads cols d"], row: Int[Tensor, " pairs"],
    col: Int[Tensor, " pairs"], rows: int,
) -> Float[Tensor, "heads rows d"]:  # fmt: skip
    """:func:`edge_sum`, with the values of all pairs in memory."""
    sums = value.new_zeros(value.shape[0], rows, value.shape[-1])
    return sums.index_add(1, row, weight[..., None] * value.index_select(1, col))


def _gathers(x: Tensor, row: Tensor) -> bool:
    """True if an operator gathers rows instead of using sparse products."""
    if x.device.type == "cpu":
        return False
    numbers = x.shape[0] * x.shape[2] * row.shape[0]
    return numbers <= tile_numbers(x.device, 0, 4) or torch.are_deterministic_algorithms_enabled()


def _csr(crow: Tensor, col: Tensor, values: Tensor, columns: int) -> Tensor:
    return torch.sparse_csr_tensor(crow, col, values, (crow.shape[0] - 1, columns), check_invariants=False)


@torch.library.custom_op("tg_equiattn::edge_dot", mutates_args=())
def csr_edge_dot(
    query: Tensor, key: Tensor, crow: Tensor, col: Tensor, row: Tensor,
    back_crow: Tensor, back_col: Tensor, back_row: Tensor, order: Tensor | None, back_order: Tensor | None,
) -> Tensor:  # fmt: skip
    """:func:`edge_dot` by torch's sampled products. The tensors after query and key are the fields of a
    :class:`CSR`."""
    refuse_forward_mode()
    if order is None or _gathers(query, row):
        return gathered_edge_dot(query, key, row, col, None)
    more_than_a_matrix = len(col) > query.shape[1] * key.shape[1]  # repeated pairs, which torch refuses to sample
    if more_than_a_matrix or (query.device.type == "cpu" and not torch.backends.mkl.is_available()):
        return gathered_edge_dot(query, key, row, col)
    out = query.new_zeros(query.shape[0], col.shape[0])
    if not len(col):
        return out
    for head in range(len(query)):
        samples = _csr(crow, col, out[head], key.shape[1])
        out[head] = torch.sparse.sampled_addmm(samples, query[head], key[head].T, beta=0.0).values()
    return out


@csr_edge_dot.register_fake
def _(query: Tensor, key: Tensor, crow: Tensor, col: Tensor, *rest: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], col.shape[0])


@torch.library.custom_op("tg_equiattn::edge_sum", mutates_args=())
def csr_edge_sum(
    weight: Tensor, value: Tensor, crow: Tensor, col: Tensor, row: Tensor,
    back_crow: Tensor, back_col: Tensor, back_row: Tensor, order: Tensor | None, back_order: Tensor | None,
) -> Tensor:  # fmt: skip
    """:func:`edge_sum` by torch's sparse products. The tensors after weight and value are the fields of a
    :class:`CSR`."""
    refuse_forward_mode()
    with full_precision(value.device):
        if not len(col):
            return value.new_zeros(len(value), len(crow) - 1, value.shape[-1])
        if order is None or _gathers(value, row):
            return gathered_edge_sum(weight, value, row, col, len(crow) - 1)
        sums = [_csr(crow, col, w.contiguous(), value.shape[1]) @ v for w, v in zip(weight, value, strict=True)]
        return torch.stack(sums) if len(sums) > 1 else sums[0][None]


@csr_edge_sum.register_fake
def _(weight: Tensor, value: Tensor, crow: Tensor, *rest: Tensor | None) -> Tensor:
    return value.new_empty(value.shape[0], crow.shape[0] - 1, value.shape[-1])


def _register_derivatives(
    operator: Any, gradients: Sequence[Callable[..., Tensor]], definition: Callable[..., Tensor]
) -> None:
    """Register the gradients of the first two inputs, functions of the gradient of the result, these inputs and the
    matrix. They consist of operators again, so second derivatives are those of the gradients."""

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, *fields = ctx.saved_tensors  # torch unpacks saved tensors once where it checkpoints
        matrix = CSR(*fields)
        if is_transformed(grad):  # a transform has begun since the forward pass
            results = torch.func.vjp(lambda *x: definition(*x, matrix), left, right)[1](grad)
        else:
            needed = zip(gradients, ctx.needs_input_grad, strict=False)
            results = [gradient(grad, left, right, matrix) if needs else None for gradient, needs in needed]
        return *results, *[None] * len(fields)

    operator.register_autograd(backward, setup_context=save)


_register_derivatives(
    csr_edge_dot,
    (
        lambda grad, query, key, matrix: edge_sum(grad, key, matrix),
        lambda grad, query, key, matrix: edge_sum(matrix.in_transposed_order(grad), query, matrix.transposed()),
    ),
    lambda query, key, matrix: gathered_edge_dot(query, key, matrix.row, matrix.col),
)
_register_derivatives(
    csr_edge_sum,
    (
        lambda grad, weight, value, matrix: edge_dot(grad.contiguous(), value, matrix),
        lambda grad, weight, value, matrix: edge_sum(
            matrix.in_transposed_order(weight), grad.contiguous(), matrix.transposed()
        ),
    ),
    lambda weight, value, matrix: gathered_edge_sum(weight, value, matrix.row, matrix.col, matrix.num_rows),
)
