"""Triton kernels of group attention within windows: a second body of the operator of :mod:`.windowed`, on GPUs.

A program computes a block of pixels of one head, with scores in registers. There are no atomic additions: programs
write sums over their pixels, for gradients of tables, and torch adds these. So results are the same in every run. With
one warp and without shared memory there are no barriers.

Sizes are those of :mod:`.definition`; ``Q`` and ``K`` are the numbers of query and key elements. Tensors are
contiguous: ``queries`` (b, e, Q, C + 1, pixels), ``keys`` (b, e, C, K, padded), ``values`` (b, e, Cv, K, padded).
``shifts`` (D, 2) are the planes and the pixels from a query to its keys. Channels are tuples, since sizes of tiles are
powers of two.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import hashed_dropout
from ..modes import cached
from .windows import FlatImages, flat_images, key_elements, query_elements

if TYPE_CHECKING:
    from jaxtyping import Int


@triton.jit
def _program(count, BLOCK: tl.constexpr, heads, ELEMENTS: tl.constexpr):
    """The pixels of a program, a mask of the pixels that exist, and its block, element, head and image.

    Shifted pixels are not aligned, so a warp loads them one by one from adjacent addresses: a thread loads every 32nd.
    """
    blocks, number = tl.cdiv(count, BLOCK), tl.program_id(0)
    block, rest = number % blocks, number // blocks
    pixel = tl.max_contiguous(block * BLOCK + tl.arange(0, BLOCK), 1)
    head, image = rest // ELEMENTS % heads, rest // (ELEMENTS * heads)
    return pixel, pixel < count, block, rest % ELEMENTS, head, image.to(tl.int64)


@triton.jit
def _channels(start, stride, pixel, inside, C: tl.constexpr):
    """Channels of pixels; zero where not inside."""
    out = ()
    for c in tl.static_range(C):
        out = out + (tl.load(start + (c * stride + pixel), mask=inside, other=0.0),)
    return out


@triton.jit
def _numbers(start, C: tl.constexpr):
    out = ()
    for c in tl.static_range(C):
        out = out + (tl.load(start + c),)
    return out


@triton.jit
def _zeros(zero, C: tl.constexpr):
    out = ()
    for _ in tl.static_range(C):
        out = out + (zero,)
    return out


@triton.jit
def _add(total, factor, x, C: tl.constexpr):
    """total + factor x."""
    out = ()
    for c in tl.static_range(C):
        out = out + (total[c] + factor * x[c],)
    return out


@triton.jit
def _dot(total, x, y, C: tl.constexpr):
    """total + sum_c x_c y_c."""
    for c in tl.static_range(C):
        total += x[c] * y[c]
    return total


@triton.jit
def _store(start, stride, pixel, inside, x, C: tl.constexpr):
    for c in tl.static_range(C):
        tl.store(start + (c * stride + pixel), x[c], mask=inside)


@triton.jit
def _keep(row, column, RATE: tl.constexpr, THRESHOLD: tl.constexpr, zero):
    """:func:`.hashed_dropout.keep`."""
    x = (row ^ column).to(tl.uint32, bitcast=True) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return tl.where(x.to(tl.int32, bitcast=True) >= THRESHOLD, zero + 1.0 / (1.0 - RATE), zero)


@triton.jit
def _element(elements, index, e, line, C: tl.constexpr, U: tl.constexpr):
    """Encoding and bias of the argument u of a line (h, t, s) of the index."""
    return _numbers(elements + (e * U + tl.load(index + line).to(tl.int32)) * (C + 1), C + 1)


@triton.jit
def _forward(
    queries, keys, values, table, elements, index, penalty, row, column, shifts, out, lse, heads, pixels, area, padded,
    plane, offsets, masks, C: tl.constexpr, CV: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, U: tl.constexpr, MASKED: tl.constexpr, RATE: tl.constexpr,
    THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of the pixels of an output element."""
    p, live, _, h, e, b = _program(pixels, BLOCK, heads, H)
    head, near = b * heads + e, p // area * plane + p % area
    queries += head * Q * (C + 1) * pixels
    keys += head * C * K * padded
    values += head * CV * K * padded
    zero = tl.zeros((BLOCK,), queries.dtype.element_ty)
    hashes = tl.load(row + head * pixels + p, mask=live, other=0) if RATE > 0 else 0
    total = _zeros(zero, CV)
    for t in range(T):
        element = t if T > 1 else (h if Q > 1 else 0)
        q = _channels(queries + element * (C + 1) * pixels, pixels, p, live, C + 1)
        top, mass, sums = zero - float("inf"), zero, _zeros(zero, CV)
        for s in range(S):
            of_key = s if S > 1 else (h if K > 1 else 0)
            start = zero
            if U > 0:
                start = _dot(zero, q, _element(elements, index, e, (h * T + t) * S + s, C, U), C + 1)
            for d in range(offsets):
                n = near + tl.load(shifts + 2 * d) * plane + tl.load(shifts + 2 * d + 1)
                k = _channels(keys + of_key * padded, K * padded, n, live, C)
                v = _channels(values + of_key * padded, K * padded, n, live, CV)
                rho = _numbers(table + ((e * H + h) * offsets + d) * (C + 1), C + 1)
                score = _dot(start + q[C] * rho[C], q, _add(k, 1.0, rho, C), C)
                if MASKED:
                    score += tl.load(penalty + b * masks + n, mask=live, other=0.0)
                less = tl.exp(-tl.abs(score - top))  # the smaller of two exponentials; the other one is 1
                weight, rest = tl.where(score > top, 1.0, less), tl.where(score > top, less, 1.0)
                top = tl.maximum(top, score)
                mass = mass * rest + weight
                if RATE > 0:
                    weight *= _keep(hashes, tl.load(column + (h * S + s) * offsets + d), RATE, THRESHOLD, zero)
                new = ()
                for c in tl.static_range(CV):
                    new = new + (sums[c] * rest + weight * v[c],)
                sums = new
        total = _add(total, 1.0 / mass, sums, CV)
        tl.store(lse + ((head * H + h) * T + t) * pixels + p, top + tl.log(mass), mask=live)
    _store(out + (head * CV * H + h) * pixels, H * pixels, p, live, total, CV)


@triton.jit
def _weight(q, k, rho, start, lse, g, v, keep, zero, C: tl.constexpr, CV: tl.constexpr):
    """The weights of keys, and the gradients of these weights. ``start`` is a part of scores."""
    score = _dot(start + q[C] * rho[C], q, _add(k, 1.0, rho, C), C)
    return tl.exp(score - lse), _dot(zero, g, v, CV) * keep


@triton.jit
def _pairs(
    keys, values, stride, n, live, rho, elements, index, e, line, hashes, column, zero, C: tl.constexpr,
    CV: tl.constexpr, U: tl.constexpr, RATE: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """Keys, values, encodings with biases, and factors of dropout, for pairs of queries and keys at an offset."""
    keep = 1.0
    if U > 0:
        rho = _add(rho, 1.0, _element(elements, index, e, line, C, U), C + 1)
    if RATE > 0:
        keep = _keep(hashes, tl.load(column), RATE, THRESHOLD, zero)
    return _channels(keys, stride, n, live, C), _channels(values, stride, n, live, CV), rho, keep


@triton.jit
def _backward_of_queries(
    queries, keys, values, table, elements, index, penalty, row, column, shifts, out, lse, grad, grad_lse, to_queries,
    means, partial, heads, pixels, area, padded, plane, offsets, masks, C: tl.constexpr, CV: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
    MASKED: tl.constexpr, RATE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a query element, sums over pixels for the gradient of the table, and the mean gradient of the
    weights of each softmax, which the other kernel reads."""
    p, live, block, element, e, b = _program(pixels, BLOCK, heads, Q)
    head, near = b * heads + e, p // area * plane + p % area
    keys += head * C * K * padded
    values += head * CV * K * padded
    zero = tl.zeros((BLOCK,), queries.dtype.element_ty)
    hashes = tl.load(row + head * pixels + p, mask=live, other=0) if RATE > 0 else 0
    q = _channels(queries + (head * Q + element) * (C + 1) * pixels, pixels, p, live, C + 1)
    t = element if T > 1 else 0
    total = _zeros(zero, C + 1)
    for o in range(1 if (T == 1) and (Q > 1) else H):
        h = element if (T == 1) and (Q > 1) else o
        g = _channels(grad + (head * CV * H + h) * pixels, H * pixels, p, live, CV)
        at = ((head * H + h) * T + t) * pixels + p
        row_lse = tl.load(lse + at, mask=live, other=0.0)
        mean = -tl.load(grad_lse + at, mask=live, other=0.0)
        if T == 1:
            mean = _dot(mean, g, _channels(out + (head * CV * H + h) * pixels, H * pixels, p, live, CV), CV)
        else:  # outputs are sums over t: the mean of one t takes a pass of its own
            for d in range(offsets):
                n = near + tl.load(shifts + 2 * d) * plane + tl.load(shifts + 2 * d + 1)
                rho = _numbers(table + ((e * H + h) * offsets + d) * (C + 1), C + 1)
                masked = tl.load(penalty + b * masks + n, mask=live, other=0.0) if MASKED else zero
                for s in range(S):
                    k, v, more, keep = _pairs(
                        keys + s * padded, values + s * padded, K * padded, n, live, rho, elements, index, e,
                        (h * T + t) * S + s, hashes, column + (h * S + s) * offsets + d, zero, C, CV, U, RATE,
                        THRESHOLD,
                    )  # fmt: skip
                    weight, change = _weight(q, k, more, masked, row_lse, g, v, keep, zero, C, CV)
                    mean += weight * change
        tl.store(means + at, mean, mask=live)
        for d in range(offsets):
            n = near + tl.load(shifts + 2 * d) * plane + tl.load(shifts + 2 * d + 1)
            rho = _numbers(table + ((e * H + h) * offsets + d) * (C + 1), C + 1)
            masked = tl.load(penalty + b * masks + n, mask=live, other=0.0) if MASKED else zero
            slopes = zero
            for s in range(S):
                of_key = s if S > 1 else (h if K > 1 else 0)
                k, v, more, keep = _pairs(
                    keys + of_key * padded, values + of_key * padded, K * padded, n, live, rho, elements, index, e,
                    (h * T + t) * S + s, hashes, column + (h * S + s) * offsets + d, zero, C, CV, U, RATE,
                    THRESHOLD,
                )  # fmt: skip
                weight, change = _weight(q, k, more, masked, row_lse, g, v, keep, zero, C, CV)
                slope = tl.where(live, weight * (change - mean), 0.0)
                new = ()
                for c in tl.static_range(C):
                    new = new + (total[c] + slope * (k[c] + more[c]),)
                total = new + (total[C] + slope * more[C],)
                slopes += slope
            line = partial + (((((b * tl.cdiv(pixels, BLOCK) + block) * heads + e) * T + t) * H + h) * offsets + d) * (
                C + 1
            )
            for c in tl.static_range(C + 1):
                tl.store(line + c, tl.sum(slopes * q[c], 0))
    _store(to_queries + (head * Q + element) * (C + 1) * pixels, pixels, p, live, total, C + 1)


@triton.jit
def _backward_of_keys(
    queries, keys, values, table, elements, index, penalty, row, column, shifts, lse, grad, means, to_keys, to_values,
    partial, heads, pixels, area, padded, plane, offsets, masks, C: tl.constexpr, CV: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr, MASKED: tl.constexpr,
    RATE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values of a key element, and sums over pixels for the gradient of the table of elements."""
    p, live, block, s, e, b = _program(padded, BLOCK, heads, K)
    head, z, r = b * heads + e, p // plane, p % plane
    v = _channels(values + (head * CV * K + s) * padded, K * padded, p, live, CV)
    zero = tl.zeros((BLOCK,), queries.dtype.element_ty)
    masked = tl.load(penalty + b * masks + p, mask=live, other=0.0) if MASKED else zero
    sums, of_values = _zeros(zero, C + 1), _zeros(zero, CV)
    for o in range(1 if (S == 1) and (K > 1) else H):
        h = s if (S == 1) and (K > 1) else o
        for t in range(T):
            element = t if T > 1 else (h if Q > 1 else 0)
            line = (h * T + t) * S + (s if S > 1 else 0)
            bias, start = 0.0, masked
            k = _channels(keys + (head * C * K + s) * padded, K * padded, p, live, C)
            if U > 0:
                sums, more = _zeros(zero, C + 1), _element(elements, index, e, line, C, U)
                k, bias = _add(k, 1.0, more, C), more[C]
            for d in range(offsets):
                before, within = z - tl.load(shifts + 2 * d), r - tl.load(shifts + 2 * d + 1)
                inside = live & (before >= 0) & (before * area < pixels) & (within >= 0) & (within < area)
                n = before * area + within
                rho = _numbers(table + ((e * H + h) * offsets + d) * (C + 1), C + 1)
                q = _channels(queries + (head * Q + element) * (C + 1) * pixels, pixels, n, inside, C + 1)
                g = _channels(grad + (head * CV * H + h) * pixels, H * pixels, n, inside, CV)
                at = ((head * H + h) * T + t) * pixels + n
                row_lse = tl.load(lse + at, mask=inside, other=float("inf"))  # no weights elsewhere
                mean = tl.load(means + at, mask=inside, other=0.0)
                keep = 1.0
                if RATE > 0:
                    hashes = tl.load(row + head * pixels + n, mask=inside, other=0)
                    columns = (h * S + (s if S > 1 else 0)) * offsets + d
                    keep = _keep(hashes, tl.load(column + columns), RATE, THRESHOLD, zero)
                if U > 0:
                    start = masked + q[C] * bias
                weight, change = _weight(q, k, rho, start, row_lse, g, v, keep, zero, C, CV)
                sums = _add(sums, weight * (change - mean), q, C + 1)
                of_values = _add(of_values, weight * keep, g, CV)
            if U > 0:  # gradients of keys are added up in memory: they are too many for registers
                before = _channels(to_keys + (head * C * K + s) * padded, K * padded, p, live & (o + t > 0), C)
                _store(to_keys + (head * C * K + s) * padded, K * padded, p, live, _add(before, 1.0, sums, C), C)
                # the index is a permutation along s, so programs of other elements write to other u
                u = tl.load(index + line).to(tl.int32)
                at = partial + ((((b * tl.cdiv(padded, BLOCK) + block) * heads + e) * H * T + h * T + t) * U + u) * (
                    C + 1
                )
                for c in tl.static_range(C + 1):
                    tl.store(at + c, tl.sum(sums[c], 0))
    if U == 0:
        _store(to_keys + (head * C * K + s) * padded, K * padded, p, live, sums, C)
    _store(to_values + (head * CV * K + s) * padded, K * padded, p, live, of_values, CV)


_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}  # Triton 3.10 does not fuse by default


def forward(*operands: Any) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of the operator, in one launch."""
    tensors, sizes, constants = _launch(*operands)
    queries, _, values, table = tensors[:4]
    out = queries.new_empty(*queries.shape[:2], values.shape[2], table.shape[1], *queries.shape[4:])
    lse = queries.new_empty(*queries.shape[:2], table.shape[1], constants["T"], *queries.shape[4:])
    block = _block(constants)
    grid = triton.cdiv(sizes[1], block) * constants["H"] * sizes[0] * len(queries)
    _forward[(grid,)](*tensors, out, lse, *sizes, **constants, BLOCK=block, **_OPTIONS)
    return out, lse


def backward(grad: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    """Gradients of the five first operands, in two launches and a sum over blocks for each table."""
    tensors, sizes, constants = _launch(*operands)
    queries, keys, values, table, elements = tensors[:5]
    grad, grad_lse, out, lse = (x.contiguous() for x in (grad, grad_lse, out, lse))
    to_queries, to_keys, to_values, means = (torch.empty_like(x) for x in (queries, keys, values, lse))
    heads, pixels, _, padded, *_ = sizes
    block, each, each_t = max(32, _block(constants) // 2), len(queries) * heads, constants["H"] * constants["T"]
    blocks, padded_blocks = triton.cdiv(pixels, block), triton.cdiv(padded, block)
    of_table = queries.new_empty(len(queries) * blocks, heads, constants["T"], *table.shape[1:])
    of_elements = queries.new_zeros(len(queries) * padded_blocks, heads, each_t, *elements.shape[1:])
    options = {**constants, "BLOCK": block, **_OPTIONS}
    _backward_of_queries[(blocks * constants["Q"] * each,)](
        *tensors, out, lse, grad, grad_lse, to_queries, means, of_table, *sizes, **options
    )
    _backward_of_keys[(padded_blocks * constants["K"] * each,)](
        *tensors, lse, grad, means, to_keys, to_values, of_elements, *sizes, **options
    )
    return to_queries, to_keys, to_values, of_table.sum((0, 2)), of_elements.sum((0, 2))


def _block(constants: dict[str, Any]) -> int:
    """Pixels of a program of one warp. With few channels, several pixels of a thread share numbers of the tables."""
    channels = constants["C"] + constants["CV"]
    return 128 if channels <= 8 else 64 if channels <= 16 else 32


def _launch(
    queries, keys, values, table, elements, index, penalty, row, column, spatial, sides, selection, circular, step,
    dropout, chunk,
) -> tuple[list[Tensor], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """Tensors, sizes and constants of the kernels, for the operands of the operator."""
    at = flat_images(spatial, sides, selection, circular, step)
    every = queries, keys, values, table, elements, index, penalty, row, column, _shifts(at, queries.device)
    tensors = [queries if x is None else x.contiguous() for x in every]  # kernels do not read operands that are None
    area, plane, pixels, padded = (
        queries.shape[-1],
        keys.shape[-1],
        math.prod(queries.shape[4:]),
        math.prod(keys.shape[5:]),
    )
    masks = 0 if penalty is None or len(penalty) == 1 else padded
    constants = {
        "C": keys.shape[2], "CV": values.shape[2], "Q": queries.shape[2], "K": keys.shape[3] * keys.shape[4],
        "H": table.shape[1], "T": query_elements(index), "S": key_elements(index),
        "U": 0 if index is None else elements.shape[1], "MASKED": penalty is not None, "RATE": float(dropout),
        "THRESHOLD": hashed_dropout.threshold(dropout),
    }  # fmt: skip
    return tensors, (queries.shape[1], pixels, area, padded, plane, table.shape[2], masks), constants


@cached(maxsize=32)
def _shifts(at: FlatImages, device: torch.device) -> Int[Tensor, "D 2"]:
    """The planes, and the pixels of a plane, from a query in flat images to each of its keys in padded images."""
    steps = []
    for block in at.shifts.blocks:
        for more in itertools.product(*map(range, block.counts)):
            *outer, y, x = (at.step * (n + m) for n, m in zip(block.start, more, strict=True))
            steps.append((sum(outer), y * at.width + x))
    return torch.tensor(steps, dtype=torch.int32, device=device)
