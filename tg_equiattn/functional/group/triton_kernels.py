r"""Local group self-attention with nothing of size |H|^2 K^2 N in memory: every score lives in registers.

One program attends from one pixel of one head of one image (a site), for a block of elements, with all scores of that
block in a tile (rows, D, S), D neighbors and S key elements:

    rows h, loop over t    W(h, D, s) = sum_t softmax_(D,s) <q(t), k(D,s) + rho(h^-1 D, u)>,
                           then out = W v, or in backward dv = W dout
    rows t, loop over h    the gradient of the scores, p (dW - sum p dW), summed over h for q and k

The softmax is the plain one of complete rows, so any score is safe. A site takes |H|^3 D exponentials and about
10 |H|^3 D other operations beside 2 C |H|^2 D each for scores, positions and values: at |H| = 8, 25 neighbors and 28 x
28 pixels in 9 heads, 90 million exponentials an image, where a GPU's special function units do some 10^12 a second.
Memory traffic is that of query, key, value and output.

Gradients of keys and values are added up atomically, so their last bits depend on the order of programs. Gradients with
respect to positions leave the kernel as sums over s and over D for a run of sites at a time, from which two matrix
products make those of the encodings.

With ``PAIRED`` (relation "relative") t = h and neither kernel loops; with ``FULL`` the encoding has an axis for u.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import hashed_dropout
from .plan import HIDDEN

_FIRST = tl.constexpr(hashed_dropout.MULTIPLIERS[0])
_SECOND = tl.constexpr(hashed_dropout.MULTIPLIERS[1])
_LOWEST = tl.constexpr(HIDDEN)


@triton.jit
def _neighbors(offsets, mask, pixel, depth, height, width, D: tl.constexpr, DP: tl.constexpr, CIRCULAR: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Flat pixels of the neighbors, and which of them are there: inside the image (or around it), and in the mask."""
    d = tl.arange(0, DP)
    there = d < D
    dz = tl.load(offsets + d, mask=there, other=0)
    dy = tl.load(offsets + D + d, mask=there, other=0)
    dx = tl.load(offsets + 2 * D + d, mask=there, other=0)
    z, y, x = pixel // (height * width) + dz, pixel // width % height + dy, pixel % width + dx
    if CIRCULAR:
        z, y, x = (z + depth) % depth, (y + height) % height, (x + width) % width
        inside = there
    else:
        inside = there & (z >= 0) & (z < depth) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    flat = (z * height + y) * width + x
    if MASKED:
        inside = inside & (tl.load(mask + flat, mask=inside, other=0) != 0)
    return flat, inside


@triton.jit
def _content(q, k, element, rows, place, mask, stride, C: tl.constexpr, R: tl.constexpr, DP: tl.constexpr,
             SP: tl.constexpr):  # fmt: skip
    """<q(t), k(D,s)> for the query elements of the rows (R, D, S); channel by channel, which keeps keys out of
    registers."""
    total = tl.zeros([R, DP, SP], dtype=q.dtype.element_ty)
    for c in range(C):
        query = tl.load(q + element * C + c, mask=rows, other=0.0)
        key = tl.load(k + c * stride + place, mask=mask, other=0.0)
        total += query[:, None, None] * key[None]
    return total


@triton.jit
def _position(q, rho, rho_group, index, head, element, output, rows, C: tl.constexpr, T: tl.constexpr,
              H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, R: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr,
              HEADS: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr):  # fmt: skip
    """<q(t), rho(h^-1 D, u)> and the head's bias for the rows' elements t and outputs h, (R, D, S)."""
    d, s = tl.arange(0, DP), tl.arange(0, SP)
    group_mask = rows[:, None] & (s < S)[None]
    space_mask = rows[:, None] & (d < D)[None]
    line = element if PAIRED else output * T + element
    u = tl.load(index + line[:, None] * S + s[None], mask=group_mask, other=0)
    space = tl.zeros([R, DP], dtype=q.dtype.element_ty)
    group = tl.zeros([R, SP], dtype=q.dtype.element_ty)
    both = tl.zeros([R, DP, SP], dtype=q.dtype.element_ty)
    for channel in range(C + 1 if HEADS > 0 else C):
        biased = channel == C  # the bias, behind the channels
        query = tl.load(q + element * C + channel, mask=rows & (channel < C), other=0.0)
        query = tl.where(biased, 1.0, query).to(q.dtype.element_ty)
        c = tl.where(biased, C + head, channel)
        where = (c * H + output)[:, None] * D + d[None]
        if FULL:
            full_mask = space_mask[:, :, None] & (s < S)[None, None]
            both += query[:, None, None] * tl.load(rho + where[:, :, None] * S + u[:, None], mask=full_mask, other=0.0)
        else:
            space += query[:, None] * tl.load(rho + where, mask=space_mask, other=0.0)
            group += query[:, None] * tl.load(rho_group + c * S + u, mask=group_mask, other=0.0)
    return both + space[:, :, None] + group[:, None]


@triton.jit
def _softmax(score, mask):
    """Over neighbors and key elements, the last two axes, and the logarithm of the sum of exponentials. A row without
    keys has weights of zero and the lowest logarithm."""
    score = tl.where(mask[None], score, float("-inf"))
    top = tl.maximum(tl.max(tl.max(score, 2), 1), _LOWEST)
    p = tl.exp(score - top[:, None, None])
    total = tl.sum(tl.sum(p, 2), 1)
    total = tl.where(total > 0, total, 1.0)
    return p / total[:, None, None], top + tl.log(total)


@triton.jit
def _keep(row_hash, column_hash, output, rows, mask, cut, D: tl.constexpr, S: tl.constexpr, DP: tl.constexpr,
          SP: tl.constexpr):  # fmt: skip
    """Which weights (R, D, S) dropout leaves; see tg_equiattn.functional.hashed_dropout."""
    d, s = tl.arange(0, DP), tl.arange(0, SP)
    column = (output[:, None, None] * S + s[None, None]) * D + d[None, :, None]
    x = tl.load(column_hash + column, mask=mask[None] & rows[:, None, None], other=0) ^ tl.load(row_hash)
    x = x * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x >= cut


@triton.jit
def weigh(q, k, v, rho, rho_group, index, offsets, pixel_mask, row_hash, column_hash, out, level, grad, grad_v, pixels,
          depth, height, width, cut, C: tl.constexpr, CV: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
          D: tl.constexpr, S: tl.constexpr, R: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr, HEADS: tl.constexpr,
          FULL: tl.constexpr, PAIRED: tl.constexpr, CIRCULAR: tl.constexpr, MASKED: tl.constexpr,
          DROPOUT: tl.constexpr, BACKWARD: tl.constexpr):  # fmt: skip
    """The summed weights W of a site and a block of outputs; then out = W v, or in backward dv += W dout.

    q (sites, T, C); k, v (M, channels, pixels, S); rho (C + HEADS, H, D[, U]); rho_group (C + HEADS, U);
    index (H, T, S) or (T, S); pixel_mask (M, pixels); out, grad (sites, H, CV); level (sites, H) where PAIRED.
    """
    site = tl.program_id(0).to(tl.int64)
    image, pixel = site // pixels, (site % pixels).to(tl.int32)
    head = (image % HEADS).to(tl.int32) if HEADS > 0 else 0
    stride = tl.cast(pixels, tl.int64) * S
    neighbour, inside = _neighbors(offsets, pixel_mask + image * pixels, pixel, depth, height, width, D, DP, CIRCULAR,
                                    MASKED)  # fmt: skip
    s = tl.arange(0, SP)
    place = neighbour[:, None] * S + s[None]
    mask = inside[:, None] & (s < S)[None]
    q, k, v, grad_v = q + site * T * C, k + image * C * stride, v + image * CV * stride, grad_v + image * CV * stride
    output = tl.program_id(1) * R + tl.arange(0, R)
    rows = output < H

    weight = tl.zeros([R, DP, SP], dtype=q.dtype.element_ty)
    for t in range(1 if PAIRED else T):
        element = output if PAIRED else tl.full([R], t, tl.int32)
        if PAIRED:
            score = _content(q, k, element, rows, place, mask, stride, C, R, DP, SP)
        else:
            one = tl.full([1], t, tl.int32)
            score = _content(q, k, one, one < T, place, mask, stride, C, 1, DP, SP)
        score += _position(q, rho, rho_group, index, head, element, output, rows, C, T, H, D, S, R, DP, SP, HEADS, FULL,
                           PAIRED)  # fmt: skip
        p, logarithm = _softmax(score, mask)
        weight += p
        if PAIRED and not BACKWARD:
            tl.store(level + site * H + output, logarithm, mask=rows)
    if DROPOUT:
        there = _keep(row_hash + site, column_hash, output, rows, mask, cut, D, S, DP, SP)
        weight = tl.where(there, weight, 0.0)
    weight = tl.where(rows[:, None, None], weight, 0.0)

    line = (site * H + output) * CV
    for c in range(CV):
        if BACKWARD:
            g = tl.load(grad + line + c, mask=rows, other=0.0)
            tl.atomic_add(grad_v + c * stride + place, tl.sum(weight * g[:, None, None], 0), mask=mask)
        else:
            value = tl.load(v + c * stride + place, mask=mask, other=0.0)
            tl.store(out + line + c, tl.sum(tl.sum(weight * value[None], 2), 1), mask=rows)


@triton.jit
def differentiate(q, k, v, rho, rho_group, index, offsets, pixel_mask, row_hash, column_hash, grad, grad_level, grad_q,
                  grad_k, to_space, to_group, start, pixels, depth, height, width, cut, C: tl.constexpr,
                  CV: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
                  DP: tl.constexpr, SP: tl.constexpr, HEADS: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr,
                  CIRCULAR: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr):  # fmt: skip
    """Gradients of the scores of a site and a block of query elements, from site ``start`` on.

    Writes grad_q (sites, T, C) without the positions' part, adds to grad_k (M, C, pixels, S), and leaves the sums over
    s and over D of the scores' gradients in to_space (run, T, H, D) and to_group (run, T, H, S), H = 1 where paired;
    with a full encoding the gradients themselves in to_space (run, T, H, D, S).
    """
    run = tl.program_id(0).to(tl.int64)
    site = run + start
    image, pixel = site // pixels, (site % pixels).to(tl.int32)
    head = (image % HEADS).to(tl.int32) if HEADS > 0 else 0
    stride = tl.cast(pixels, tl.int64) * S
    neighbour, inside = _neighbors(offsets, pixel_mask + image * pixels, pixel, depth, height, width, D, DP, CIRCULAR,
                                    MASKED)  # fmt: skip
    d, s = tl.arange(0, DP), tl.arange(0, SP)
    place = neighbour[:, None] * S + s[None]
    mask = inside[:, None] & (s < S)[None]
    q, k, v, grad_k = q + site * T * C, k + image * C * stride, v + image * CV * stride, grad_k + image * C * stride
    element = tl.program_id(1) * R + tl.arange(0, R)
    rows = element < T

    content = _content(q, k, element, rows, place, mask, stride, C, R, DP, SP)
    total = tl.zeros([R, DP, SP], dtype=q.dtype.element_ty)
    for h in range(1 if PAIRED else H):
        output = element if PAIRED else tl.full([R], h, tl.int32)
        one = tl.full([1], h, tl.int32)
        position = _position(q, rho, rho_group, index, head, element, output, rows, C, T, H, D, S, R, DP, SP, HEADS,
                             FULL, PAIRED)  # fmt: skip
        p, _ = _softmax(content + position, mask)
        if PAIRED:
            slope = _content(grad + site * H * CV, v, element, rows, place, mask, stride, CV, R, DP, SP)
            if DROPOUT:
                there = _keep(row_hash + site, column_hash, output, rows, mask, cut, D, S, DP, SP)
                slope = tl.where(there, slope, 0.0)
        else:
            slope = _content(grad + site * H * CV, v, one, one < H, place, mask, stride, CV, 1, DP, SP)
            if DROPOUT:
                there = _keep(row_hash + site, column_hash, one, one < H, mask, cut, D, S, DP, SP)
                slope = tl.where(there, slope, 0.0)
        slope = p * slope
        mean = tl.sum(tl.sum(slope, 2), 1)
        if PAIRED:
            mean -= tl.load(grad_level + site * H + output, mask=rows, other=0.0)
        logit = slope - p * mean[:, None, None]
        logit = tl.where(rows[:, None, None], logit, 0.0)
        total += logit
        line = run * T + element if PAIRED else (run * T + element) * H + h
        space_mask = rows[:, None] & (d < D)[None]
        if FULL:
            where = (line[:, None, None] * D + d[None, :, None]) * S + s[None, None]
            tl.store(to_space + where, logit, mask=space_mask[:, :, None] & (s < S)[None, None])
        else:
            tl.store(to_space + line[:, None] * D + d[None], tl.sum(logit, 2), mask=space_mask)
            tl.store(to_group + line[:, None] * S + s[None], tl.sum(logit, 1), mask=rows[:, None] & (s < S)[None])

    for c in range(C):
        query = tl.load(q + element * C + c, mask=rows, other=0.0)
        key = tl.load(k + c * stride + place, mask=mask, other=0.0)
        tl.store(grad_q + (site * T + element) * C + c, tl.sum(tl.sum(total * key[None], 2), 1), mask=rows)
        tl.atomic_add(grad_k + c * stride + place, tl.sum(total * query[:, None, None], 0), mask=mask)
