r"""Vector self-attention by cross products in one kernel forward and two backward, on (3, G, N).

    c_ij = q_i x k_j,   p_ij = softmax_j( scale |c_ij| ),   y_i = sum_j p_ij z_ij,   z = c x v_j

Backward, with g the gradient of y, shift_i = g_i . y_i and h_ij = v_j x g_i, so g . z = c . h:

    e_ij = p_ij (h + scale (c . h - shift_i) c / |c|)      the gradient of c_ij
    dq_i = sum_j k_j x e_ij,   dk_j = sum_i e_ij x q_i,   dv_j = sum_i p_ij g_i x c_ij

A program takes a block of queries (of keys, for dk and dv) of one group and walks over the group's keys (queries).
Tiles are (walked, own): every thread owns entries of the last axis, so that sums over what is walked stay in its
registers, no two programs write to one place, and results do not depend on timing. Cross products are formed from
components: their lengths do not cancel as |q|^2 |k|^2 - (q . k)^2 does, nothing is rounded to TF32, and three sums do
where sum_j p_ij k_j v_j^T takes nine.

A pair takes about 29 arithmetic instructions forward, 45 for dq, 59 for dk and dv, two of them on the unit for
special functions, and a program reads 24 bytes of each token it walks over (32 for dk and dv), mostly from the cache:
kernels are bound by arithmetic. To and from memory go inputs, outputs and, for backward, two numbers a query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_OWN = 64  # queries or keys of a program
_WALK = 8  # keys or queries of one step, half as many in float64, which takes twice the registers
_WARPS = 2


@triton.jit
def _place(lengths, groups, length, OWN: tl.constexpr):
    """The program's group and what it owns there, the length of the group's sequence, and how far to walk."""
    blocks = tl.cdiv(length, OWN)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * OWN
    size = tl.load(lengths + group).to(tl.int32)
    return group, first + tl.arange(0, OWN), size, tl.where(first < size, size, 0)


@triton.jit
def _load(x, group, groups, length, at, size):
    """Three components of vectors, zeros beyond the sequence's own length."""
    inside = at < size
    first = tl.load(x + group * length + at, inside, 0)
    second = tl.load(x + (group + groups) * length + at, inside, 0)
    return first, second, tl.load(x + (group + groups + groups) * length + at, inside, 0)


@triton.jit
def _store(x, group, groups, length, at, first, second, third):
    tl.store(x + group * length + at, first, at < length)
    tl.store(x + (group + groups) * length + at, second, at < length)
    tl.store(x + (group + groups + groups) * length + at, third, at < length)


@triton.jit
def _cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def _summed_cross(ax, ay, az, bx, by, bz):
    """Sums over the walked axis; of each product by itself, which makes it a fused multiply-add."""
    return (
        tl.sum(ay * bz, 0) - tl.sum(az * by, 0),
        tl.sum(az * bx, 0) - tl.sum(ax * bz, 0),
        tl.sum(ax * by, 0) - tl.sum(ay * bx, 0),
    )


@triton.jit
def _norm(x, y, z, TINY: tl.constexpr):
    """|c|^2, |c| and 1 / |c|, where TINY keeps the last finite."""
    square = tl.maximum(x * x + y * y + z * z, TINY)
    inverse = tl.rsqrt(square)
    return square, square * inverse, inverse


@triton.jit
def _forward(
    q, k, v, lengths, scales, out, peaks, totals, groups, length,
    TINY: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    group, i, size, bound = _place(lengths, groups, length, OWN)
    scale = tl.load(scales + group) * 1.4426950408889634  # exponentials are powers of two
    qx, qy, qz = _load(q, group, groups, length, i, size)
    zero = tl.zeros_like(qx)
    ox, oy, oz, total = zero, zero, zero, zero
    peak = zero  # of lengths of cross products, none of which is negative
    for start in range(0, bound, WALK):
        j = start + tl.arange(0, WALK)
        kx, ky, kz = _load(k, group, groups, length, j, size)
        cx, cy, cz = _cross(qx[None, :], qy[None, :], qz[None, :], kx[:, None], ky[:, None], kz[:, None])
        _, norm, _ = _norm(cx, cy, cz, TINY)
        higher = tl.maximum(peak, tl.max(norm, 0))
        keep = tl.exp2(scale * (peak - higher))
        p = tl.where((j < size)[:, None], tl.exp2(scale * (norm - higher[None, :])), 0)
        peak, total = higher, total * keep + tl.sum(p, 0)
        vx, vy, vz = _load(v, group, groups, length, j, size)
        sx, sy, sz = _summed_cross(p * cx, p * cy, p * cz, vx[:, None], vy[:, None], vz[:, None])
        ox, oy, oz = ox * keep + sx, oy * keep + sy, oz * keep + sz
    total = tl.where(i < size, total, 1)
    _store(out, group, groups, length, i, ox / total, oy / total, oz / total)
    tl.store(peaks + group * length + i, peak, i < length)
    tl.store(totals + group * length + i, total, i < length)


@triton.jit
def _pull(
    qx, qy, qz, kx, ky, kz, vx, vy, vz, gx, gy, gz, peak, shift, scale,
    TINY: tl.constexpr, PARALLEL: tl.constexpr,
):  # fmt: skip
    """p c and the gradient e of c, for pairs."""
    cx, cy, cz = _cross(qx, qy, qz, kx, ky, kz)
    square, norm, inverse = _norm(cx, cy, cz, TINY)
    p = tl.exp2(scale * 1.4426950408889634 * (norm - peak))
    hx, hy, hz = _cross(vx, vy, vz, gx, gy, gz)
    # Of parallel q and k rounding leaves a c of any direction, which must not become a gradient.
    limit = (qx * qx + qy * qy + qz * qz) * PARALLEL * (kx * kx + ky * ky + kz * kz)
    slope = scale * (cx * hx + cy * hy + cz * hz - shift) * inverse
    slope = tl.where(square > limit, slope, 0)
    return p * cx, p * cy, p * cz, p * (hx + slope * cx), p * (hy + slope * cy), p * (hz + slope * cz)


@triton.jit
def _backward_query(
    q, k, v, lengths, scales, grad, peaks, shifts, grad_q, groups, length,
    TINY: tl.constexpr, PARALLEL: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    group, i, size, bound = _place(lengths, groups, length, OWN)
    scale = tl.load(scales + group)
    qx, qy, qz = _load(q, group, groups, length, i, size)
    gx, gy, gz = _load(grad, group, groups, length, i, size)
    peak = tl.load(peaks + group * length + i, i < size, 0)
    shift = tl.load(shifts + group * length + i, i < size, 0)
    zero = tl.zeros_like(qx)
    ox, oy, oz = zero, zero, zero
    for start in range(0, bound, WALK):
        j = start + tl.arange(0, WALK)
        kx, ky, kz = _load(k, group, groups, length, j, size)
        vx, vy, vz = _load(v, group, groups, length, j, size)
        _, _, _, ex, ey, ez = _pull(
            qx[None, :], qy[None, :], qz[None, :], kx[:, None], ky[:, None], kz[:, None],
            vx[:, None], vy[:, None], vz[:, None], gx[None, :], gy[None, :], gz[None, :],
            peak[None, :], shift[None, :], scale, TINY, PARALLEL,
        )  # fmt: skip
        sx, sy, sz = _summed_cross(kx[:, None], ky[:, None], kz[:, None], ex, ey, ez)
        ox, oy, oz = ox + sx, oy + sy, oz + sz
    _store(grad_q, group, groups, length, i, ox, oy, oz)


@triton.jit
def _backward_key(
    q, k, v, lengths, scales, grad, peaks, shifts, grad_k, grad_v, groups, length,
    TINY: tl.constexpr, PARALLEL: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    group, j, size, bound = _place(lengths, groups, length, OWN)
    scale = tl.load(scales + group)
    kx, ky, kz = _load(k, group, groups, length, j, size)
    vx, vy, vz = _load(v, group, groups, length, j, size)
    zero = tl.zeros_like(kx)
    ox, oy, oz, wx, wy, wz = zero, zero, zero, zero, zero, zero
    for start in range(0, bound, WALK):
        i = start + tl.arange(0, WALK)
        qx, qy, qz = _load(q, group, groups, length, i, size)
        gx, gy, gz = _load(grad, group, groups, length, i, size)
        peak = tl.load(peaks + group * length + i, i < size, 0)
        shift = tl.load(shifts + group * length + i, i < size, 0)
        cx, cy, cz, ex, ey, ez = _pull(
            qx[:, None], qy[:, None], qz[:, None], kx[None, :], ky[None, :], kz[None, :],
            vx[None, :], vy[None, :], vz[None, :], gx[:, None], gy[:, None], gz[:, None],
            peak[:, None], shift[:, None], scale, TINY, PARALLEL,
        )  # fmt: skip
        sx, sy, sz = _summed_cross(ex, ey, ez, qx[:, None], qy[:, None], qz[:, None])
        ox, oy, oz = ox + sx, oy + sy, oz + sz
        sx, sy, sz = _summed_cross(gx[:, None], gy[:, None], gz[:, None], cx, cy, cz)
        wx, wy, wz = wx + sx, wy + sy, wz + sz
    inside = j < size
    _store(grad_k, group, groups, length, j, tl.where(inside, ox, 0), tl.where(inside, oy, 0), tl.where(inside, oz, 0))
    _store(grad_v, group, groups, length, j, wx, wy, wz)


def _launch(kernel, q: Tensor, *tensors: Tensor, **constants: object) -> None:
    _, groups, length = q.shape
    if not groups * length:
        return
    tiny, walk = torch.finfo(q.dtype).tiny, _WALK * 4 // q.itemsize
    with torch.cuda.device_of(q):
        kernel[(groups * triton.cdiv(length, _OWN),)](
            q, *tensors, groups, length, **constants, TINY=tiny, OWN=_OWN, WALK=walk, num_warps=_WARPS
        )


def forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y (3, G, N) of q, k, v (3, G, N); of each query's |c| the largest, and its sum of exponentials relative to that.

    lengths (G,) says how many tokens there are; what lies beyond is not read, and y is zero there.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    peaks, totals = q.new_empty(q.shape[1:]), q.new_empty(q.shape[1:])
    _launch(_forward, q, k, v, lengths, scale, out, peaks, totals)
    return out, peaks, totals


def backward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: Tensor,
    out: Tensor, peaks: Tensor, totals: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    grad = grad / totals  # all is linear in it, so that kernels need not normalise
    shifts = (grad * out).sum(0)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    given = (k, v, lengths, scale, grad.contiguous(), peaks, shifts)
    parallel = (4 * torch.finfo(q.dtype).eps) ** 2
    _launch(_backward_query, q, *given, grad_q, PARALLEL=parallel)
    _launch(_backward_key, q, *given, grad_k, grad_v, PARALLEL=parallel)
    return grad_q, grad_k, grad_v
