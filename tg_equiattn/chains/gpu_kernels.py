"""Triton kernels of vector attention: a second body of the operator of :mod:`.attention`, on GPUs.

A program holds a few rows and goes through all columns; a warp has 32 columns at a time. Threads have sums of their own
until the end. There are no atomic additions and no shared memory, so results are the same in every run. Features of
queries and keys (groups, 6, tokens) and values (groups, 9, tokens) have tokens last, so that a warp loads neighbors.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows(start, count, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of the rows of a program, row by row; zero after the last token."""
    out = ()
    for r in tl.static_range(ROWS):
        for c in tl.static_range(WIDTH):
            out = out + (tl.load(start + c * count + first + r, mask=first + r < count, other=0.0),)
    return out


@triton.jit
def _store_rows(start, count, first, x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store sums over columns."""
    for r in tl.static_range(ROWS):
        for c in tl.static_range(WIDTH):
            tl.store(start + c * count + first + r, tl.sum(x[r * WIDTH + c], 0), mask=first + r < count)


@triton.jit
def _columns(start, count, at, WIDTH: tl.constexpr):
    out = ()
    for c in tl.static_range(WIDTH):
        out = out + (tl.load(start + c * count + at, mask=at < count, other=0.0),)
    return out


@triton.jit
def _filled(x, WIDTH: tl.constexpr):
    out = ()
    for _ in tl.static_range(WIDTH):
        out = out + (x,)
    return out


@triton.jit
def _dot(x, y, zero, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """Product of a row of x, whose rows are joined, with columns y."""
    for c in tl.static_range(WIDTH):
        zero += x[ROW * WIDTH + c] * y[c]
    return zero


@triton.jit
def _program(count, ROWS: tl.constexpr):
    """The first row of a program, and its group."""
    blocks = tl.cdiv(count, ROWS)
    return tl.program_id(0) % blocks * ROWS, (tl.program_id(0) // blocks).to(tl.int64)


@triton.jit
def _penalty(bias, at, count, zero, BIASED: tl.constexpr):
    """A number added to the scores of keys: minus infinity after the last one."""
    penalty = zero
    if BIASED:
        penalty = tl.load(bias + at, mask=at < count, other=0.0)
    return tl.where(at < count, penalty, -float("inf"))


@triton.jit
def _score(square, penalty, SMALLEST: tl.constexpr):
    """Scores from squares of cross products, and their derivatives."""
    inverse = tl.rsqrt(tl.maximum(square, SMALLEST))
    return tl.maximum(square, SMALLEST) * inverse + penalty, tl.where(square >= SMALLEST, 0.5 * inverse, 0.0)


@triton.jit
def _forward(
    queries, keys, values, bias, out, count, BIASED: tl.constexpr, SMALLEST: tl.constexpr, LOWEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Averages of values, for rows of queries."""
    first, group = _program(count, ROWS)
    q = _rows(queries + group * 6 * count, count, first, ROWS, 6)
    zero = tl.zeros((COLUMNS,), queries.dtype.element_ty)
    top, mass, sums = _filled(zero + LOWEST, ROWS), _filled(zero, ROWS), _filled(zero, ROWS * 9)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        k = _columns(keys + group * 6 * count, count, j, 6)
        v = _columns(values + group * 9 * count, count, j, 9)
        penalty = _penalty(bias + group * count, j, count, zero, BIASED)
        new_top, new_mass, new_sums = (), (), ()
        for r in tl.static_range(ROWS):
            score, _ = _score(_dot(q, k, zero, r, 6), penalty, SMALLEST)
            less = tl.exp(-tl.abs(score - top[r]))  # the smaller of two exponentials; the other one is 1
            weight, rest = tl.where(score > top[r], 1.0, less), tl.where(score > top[r], less, 1.0)
            new_top = new_top + (tl.maximum(top[r], score),)
            new_mass = new_mass + (mass[r] * rest + weight,)
            for c in tl.static_range(9):
                new_sums = new_sums + (sums[r * 9 + c] * rest + weight * v[c],)
        top, mass, sums = new_top, new_mass, new_sums
    averages = ()
    for r in tl.static_range(ROWS):
        rest = tl.exp(top[r] - tl.max(top[r], 0))
        scale = rest / tl.sum(mass[r] * rest, 0)
        for c in tl.static_range(9):
            averages = averages + (sums[r * 9 + c] * scale,)
    _store_rows(out + group * 9 * count, count, first, averages, ROWS, 9)


@triton.jit
def _backward_of_queries(
    queries, keys, values, bias, out, grad, lse, means, to_queries, count, BIASED: tl.constexpr,
    SMALLEST: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows of queries; log-sum-exps of their scores, and the mean gradients of their weights."""
    first, group = _program(count, ROWS)
    q = _rows(queries + group * 6 * count, count, first, ROWS, 6)
    zero = tl.zeros((COLUMNS,), queries.dtype.element_ty)
    top, mass = _filled(zero + LOWEST, ROWS), _filled(zero, ROWS)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        k = _columns(keys + group * 6 * count, count, j, 6)
        penalty = _penalty(bias + group * count, j, count, zero, BIASED)
        new_top, new_mass = (), ()
        for r in tl.static_range(ROWS):
            score, _ = _score(_dot(q, k, zero, r, 6), penalty, SMALLEST)
            less = tl.exp(-tl.abs(score - top[r]))
            new_top = new_top + (tl.maximum(top[r], score),)
            new_mass = new_mass + (tl.where(score > top[r], mass[r] * less + 1.0, mass[r] + less),)
        top, mass = new_top, new_mass
    g = _rows(grad + group * 9 * count, count, first, ROWS, 9)
    averages = _rows(out + group * 9 * count, count, first, ROWS, 9)
    row_lse, mean = (), ()
    for r in tl.static_range(ROWS):
        peak = tl.max(top[r], 0)
        row_lse = row_lse + (peak + tl.log(tl.sum(mass[r] * tl.exp(top[r] - peak), 0)),)
        product = g[r * 9] * averages[r * 9]
        for c in tl.static_range(1, 9):
            product += g[r * 9 + c] * averages[r * 9 + c]
        mean = mean + (product,)
        tl.store(lse + group * count + first + r, row_lse[r], mask=first + r < count)
        tl.store(means + group * count + first + r, product, mask=first + r < count)
    total = _filled(zero, ROWS * 6)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        k = _columns(keys + group * 6 * count, count, j, 6)
        v = _columns(values + group * 9 * count, count, j, 9)
        penalty = _penalty(bias + group * count, j, count, zero, BIASED)
        new = ()
        for r in tl.static_range(ROWS):
            score, slope = _score(_dot(q, k, zero, r, 6), penalty, SMALLEST)
            slope *= tl.exp(score - row_lse[r]) * (_dot(g, v, zero, r, 9) - mean[r])
            for c in tl.static_range(6):
                new = new + (total[r * 6 + c] + slope * k[c],)
        total = new
    _store_rows(to_queries + group * 6 * count, count, first, total, ROWS, 6)


@triton.jit
def _backward_of_keys(
    queries, keys, values, bias, grad, lse, means, to_keys, to_values, count, BIASED: tl.constexpr,
    SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows of keys and values; columns are queries."""
    first, group = _program(count, ROWS)
    k = _rows(keys + group * 6 * count, count, first, ROWS, 6)
    v = _rows(values + group * 9 * count, count, first, ROWS, 9)
    penalty = _rows(bias + group * count, count, first, ROWS, 1) if BIASED else _filled(0.0, ROWS)
    zero = tl.zeros((COLUMNS,), queries.dtype.element_ty)
    of_keys, of_values = _filled(zero, ROWS * 6), _filled(zero, ROWS * 9)
    for start in range(0, count, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        q = _columns(queries + group * 6 * count, count, i, 6)
        g = _columns(grad + group * 9 * count, count, i, 9)
        row_lse = tl.load(lse + group * count + i, mask=i < count, other=float("inf"))  # no weights elsewhere
        mean = tl.load(means + group * count + i, mask=i < count, other=0.0)
        new_keys, new_values = (), ()
        for r in tl.static_range(ROWS):
            score, slope = _score(_dot(k, q, zero, r, 6), penalty[r], SMALLEST)
            weight = tl.exp(score - row_lse)
            slope *= weight * (_dot(v, g, zero, r, 9) - mean)
            for c in tl.static_range(6):
                new_keys = new_keys + (of_keys[r * 6 + c] + slope * q[c],)
            for c in tl.static_range(9):
                new_values = new_values + (of_values[r * 9 + c] + weight * g[c],)
        of_keys, of_values = new_keys, new_values
    _store_rows(to_keys + group * 6 * count, count, first, of_keys, ROWS, 6)
    _store_rows(to_values + group * 9 * count, count, first, of_values, ROWS, 9)


_ROWS = 4
# Triton 3.10 does not fuse by default
_OPTIONS: dict[str, Any] = {"ROWS": _ROWS, "COLUMNS": 32, "num_warps": 1, "enable_fp_fusion": True}


def forward(of_queries: Tensor, of_keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    """Averages of values, in one launch."""
    tensors, grid, constants = _launch(of_queries, of_keys, values, bias)
    out = torch.empty_like(tensors[2])
    _forward[grid](*tensors, out, out.shape[2], **constants, LOWEST=torch.finfo(out.dtype).min, **_OPTIONS)
    return (out.mT.contiguous(),)


def backward(
    grad: Tensor, out: Tensor, of_queries: Tensor, of_keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of the three first operands, in two launches."""
    tensors, grid, constants = _launch(of_queries, of_keys, values, bias)
    grad, out, count, lowest = grad.mT.contiguous(), out.mT.contiguous(), out.shape[1], torch.finfo(out.dtype).min
    to_queries, to_keys, to_values = (torch.empty_like(x) for x in tensors[:3])
    lse, means = (out.new_empty(len(out), count) for _ in range(2))
    _backward_of_queries[grid](
        *tensors, out, grad, lse, means, to_queries, count, **constants, LOWEST=lowest, **_OPTIONS
    )
    _backward_of_keys[grid](*tensors, grad, lse, means, to_keys, to_values, count, **constants, **_OPTIONS)
    return tuple(x.mT.contiguous() for x in (to_queries, to_keys, to_values))


def _launch(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[list[Tensor], tuple[int], dict[str, Any]]:
    """Tensors, grid and constants of the kernels."""
    tensors = [x.mT.contiguous() for x in (queries, keys, values)]
    tensors.append(queries if bias is None else bias.contiguous())  # kernels do not read operands that are None
    grid = (triton.cdiv(queries.shape[1], _ROWS) * len(queries),)
    return tensors, grid, {"BIASED": bias is not None, "SMALLEST": torch.finfo(queries.dtype).tiny ** 0.5}
