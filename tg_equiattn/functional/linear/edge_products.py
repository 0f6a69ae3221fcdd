"""Products over the pairs of a sparse relation, as PyTorch operators: no tensor of (pairs, channels) ever exists.

``edge_dot`` samples query-key products at the pairs, ``edge_sum`` adds weighted values over them; each is in the
other's gradient. Both run on torch's sparse CSR products (MKL, cuSPARSE), head by head. Second derivatives are not
implemented.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ...precision import full_precision

with warnings.catch_warnings():  # torch says once in a process that CSR tensors are in beta
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 1], device="cpu"), torch.tensor([0], device="cpu"), [1.0], device="cpu")


def _csr(crow: Tensor, col: Tensor, values: Tensor, columns: int) -> Tensor:
    return torch.sparse_csr_tensor(crow, col, values, (len(crow) - 1, columns), check_invariants=False)


def gathered_edge_dot(query: Tensor, key: Tensor, row: Tensor, col: Tensor, chunk: int = 4096) -> Tensor:
    """:func:`edge_dot` where torch has no sampled product, so many pairs at a time; not differentiable."""
    out = query.new_empty(len(query), len(col))
    for a in range(0, len(col), chunk):
        part = slice(a, a + chunk)
        out[:, part] = torch.linalg.vecdot(query[:, row[part]], key[:, col[part]])
    return out


@torch.library.custom_op("tg_equiattn::edge_dot", mutates_args=())
def edge_dot(query: Tensor, key: Tensor, crow: Tensor, col: Tensor, back: list[Tensor]) -> Tensor:
    """(heads, N, d) queries times (heads, M, d) keys at the pairs of a CSR pattern, (heads, E).

    ``back`` holds what only backward and the fallback read: each pair's row, and the transposed pattern's crow, col
    and order of the pairs.
    """
    out = query.new_zeros(len(query), len(col))
    if not len(col):
        return out
    if query.device.type == "cpu" and not torch.backends.mkl.is_available():
        return gathered_edge_dot(query, key, back[0], col)
    for head in range(len(query)):
        pattern = _csr(crow, col, out[head], key.shape[1])
        out[head] = torch.sparse.sampled_addmm(pattern, query[head], key[head].T, beta=0.0).values()
    return out


@edge_dot.register_fake
def _(query: Tensor, key: Tensor, crow: Tensor, col: Tensor, back: list[Tensor]) -> Tensor:
    return query.new_empty(len(query), len(col))


@torch.library.custom_op("tg_equiattn::edge_sum", mutates_args=())
def edge_sum(weight: Tensor, value: Tensor, crow: Tensor, col: Tensor, back: list[Tensor]) -> Tensor:
    """Sum over each row's pairs of (heads, E) weights times (heads, M, d) values, (heads, N, d); ``back`` as above."""
    with full_precision(value.device):
        if not len(col):
            return value.new_zeros(len(value), len(crow) - 1, value.shape[-1])
        patterns = (_csr(crow, col, w.contiguous(), value.shape[1]) for w in weight)
        sums = [pattern @ v for pattern, v in zip(patterns, value, strict=True)]
        return torch.stack(sums) if len(sums) > 1 else sums[0][None]


@edge_sum.register_fake
def _(weight: Tensor, value: Tensor, crow: Tensor, col: Tensor, back: list[Tensor]) -> Tensor:
    return value.new_empty(len(value), len(crow) - 1, value.shape[-1])


def _save(ctx, inputs, output) -> None:
    first, second, crow, col, back = inputs
    ctx.save_for_backward(first, second, crow, col, *back)


def _pattern(ctx) -> list[Tensor]:
    first, second, crow, col, *back = ctx.saved_tensors
    if not back:
        raise NotImplementedError("second derivatives of attention over pairs are not implemented")
    return [first, second, crow, col, *back]


def _dot_gradient(ctx, grad: Tensor):
    query, key, crow, col, _, back_crow, back_col, order = _pattern(ctx)
    grad_query = edge_sum(grad, key, crow, col, []) if ctx.needs_input_grad[0] else None
    grad_key = edge_sum(grad[:, order], query, back_crow, back_col, []) if ctx.needs_input_grad[1] else None
    return grad_query, grad_key, None, None, [None] * 4


def _sum_gradient(ctx, grad: Tensor):
    weight, value, crow, col, row, back_crow, back_col, order = _pattern(ctx)
    grad = grad.contiguous()
    grad_weight = edge_dot(grad, value, crow, col, [row]) if ctx.needs_input_grad[0] else None
    grad_value = edge_sum(weight[:, order], grad, back_crow, back_col, []) if ctx.needs_input_grad[1] else None
    return grad_weight, grad_value, None, None, [None] * 4


edge_dot.register_autograd(_dot_gradient, setup_context=_save)
edge_sum.register_autograd(_sum_gradient, setup_context=_save)
