r"""The geometric product of Cl(3,0), channel by channel, with nothing in memory between its factors and the product.

A program takes a block of tokens of one channel: it loads the eight rows of each factor and the twenty path weights
once, forms the 64 signed products in registers, and writes eight rows. Numbers moved, and instructions, a token and
channel:

    forward     24 = 8 + 8 read, 8 written                        128: 64 products, and 64 multiply-adds with weights
    backward    40 = 8 + 8 + 8 read, 8 + 8 written                384: as many for each of x, y and the weights

That is the least there is to move. At 1.3 and 2.4 instructions a byte of float32, memory is what limits both, on a GPU
that does some ten of them a byte. The torch path gathers, weighs, multiplies and sums one output component after the
other, every step through memory: 520 numbers forward, 1312 backward.

A weight's gradient is the sum over tokens: each program writes the sum over its block, torch adds these up, and results
are the same in every run. At 20 numbers a block they are a thousandth of what is moved.

Any strides do. With tokens along memory, loads and stores are those of whole rows; with components along memory a
token's eight numbers fill a sector of 32 bytes, which stays in the cache from the first component to the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .clifford import PATH_OF, PATHS, RIGHT, SIGNS

_BLOCK = 512  # float32 tokens of a program, half as many of float64: four or two a thread
_TABLES = (
    tuple(k for row in RIGHT for k in row),
    tuple(sign for row in SIGNS for sign in row),
    tuple(path for row in PATH_OF for path in row),
)


@triton.jit
def _load(x, s_component, place, mask, WIDE: tl.constexpr):
    """The eight components of a block of tokens."""
    rows = ()
    for n in tl.static_range(8):
        row = tl.load(x + n * tl.cast(s_component, tl.int64) + place, mask=mask, other=0.0)
        rows += (row.to(WIDE),)  # type: ignore[assignment]
    return rows


@triton.jit
def _load_weights(weight, s_path, s_channel, channel, WIDE: tl.constexpr, WEIGHTED: tl.constexpr):
    """The weights of a channel by path, as many as there are."""
    weights = ()
    if WEIGHTED:
        for path in tl.static_range(20):
            one = tl.load(weight + path * tl.cast(s_path, tl.int64) + channel * s_channel)
            weights += (one.to(WIDE),)  # type: ignore[assignment]
    return weights


@triton.jit
def _add(total, a, b, weights, sign: tl.constexpr, path: tl.constexpr, WEIGHTED: tl.constexpr):
    """total + sign * weight * a * b."""
    term = a * b
    if WEIGHTED:
        term = term * weights[path]
    if sign > 0:
        total += term
    else:
        total -= term
    return total


@triton.jit
def _product(out, x, y, weight, tokens, blocks, so_component, so_channel, so_token, sx_component, sx_channel, sx_token,
             sy_component, sy_channel, sy_token, sw_path, sw_channel, RIGHT: tl.constexpr, SIGNS: tl.constexpr,
             PATH_OF: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One block of tokens of one channel."""
    channel = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    left = _load(x + channel * sx_channel, sx_component, token * sx_token, inside, WIDE)
    right = _load(y + channel * sy_channel, sy_component, token * sy_token, inside, WIDE)
    weights = _load_weights(weight, sw_path, sw_channel, channel, WIDE, WEIGHTED)
    out += channel * so_channel
    for j in tl.static_range(8):
        total = tl.zeros([BLOCK], WIDE)
        for i in tl.static_range(8):
            total = _add(total, left[i], right[RIGHT[8 * j + i]], weights, SIGNS[8 * j + i], PATH_OF[8 * j + i],
                         WEIGHTED)  # fmt: skip
        place = j * tl.cast(so_component, tl.int64) + token * so_token
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(grad_x, grad_y, grad_weight, grad, x, y, weight, tokens, blocks, channels, sgx_component, sgx_channel,
               sgx_token, sgy_component, sgy_channel, sgy_token, sg_component, sg_channel, sg_token, sx_component,
               sx_channel, sx_token, sy_component, sy_channel, sy_token, sw_path, sw_channel, RIGHT: tl.constexpr,
               SIGNS: tl.constexpr, PATH_OF: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Of one block of tokens of one channel; no two gradients share products, which there are no registers to keep."""
    channel, block = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    left = _load(x + channel * sx_channel, sx_component, token * sx_token, inside, WIDE)
    right = _load(y + channel * sy_channel, sy_component, token * sy_token, inside, WIDE)
    outer = _load(grad + channel * sg_channel, sg_component, token * sg_token, inside, WIDE)
    weights = _load_weights(weight, sw_path, sw_channel, channel, WIDE, WEIGHTED)
    grad_x += channel * sgx_channel
    for i in tl.static_range(8):
        total = tl.zeros([BLOCK], WIDE)
        for j in tl.static_range(8):
            total = _add(total, right[RIGHT[8 * j + i]], outer[j], weights, SIGNS[8 * j + i], PATH_OF[8 * j + i],
                         WEIGHTED)  # fmt: skip
        place = i * tl.cast(sgx_component, tl.int64) + token * sgx_token
        tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), mask=inside)
    grad_y += channel * sgy_channel
    for k in tl.static_range(8):
        total = tl.zeros([BLOCK], WIDE)
        for j in tl.static_range(8):
            for i in tl.static_range(8):
                if RIGHT[8 * j + i] == k:
                    total = _add(total, left[i], outer[j], weights, SIGNS[8 * j + i], PATH_OF[8 * j + i], WEIGHTED)
        place = k * tl.cast(sgy_component, tl.int64) + token * sgy_token
        tl.store(grad_y + place, total.to(grad_y.dtype.element_ty), mask=inside)
    if WEIGHTED:
        grad_weight += block * 20 * channels + channel
        for path in tl.static_range(20):
            total = tl.zeros([BLOCK], WIDE)
            for j in tl.static_range(8):
                for i in tl.static_range(8):
                    if PATH_OF[8 * j + i] == path:
                        total = _add(total, left[i] * right[RIGHT[8 * j + i]], outer[j], weights, SIGNS[8 * j + i],
                                     path, False)  # fmt: skip
            tl.store(grad_weight + path * channels, tl.sum(total, 0).to(grad_weight.dtype.element_ty))


def _launch(x: Tensor) -> tuple[int, int, torch.dtype, int]:
    """Channels and blocks of tokens of x (8, C, T), and how a program computes one."""
    wide = torch.promote_types(x.dtype, torch.float32)
    block = _BLOCK // 2 if wide == torch.float64 else _BLOCK
    return x.shape[1], triton.cdiv(x.shape[2], block), tl.float64 if wide == torch.float64 else tl.float32, block


def product(x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Products of multivectors (8, C, T) with weights by grade path (20, C), or none; laid out as x."""
    out = torch.empty_like(x)
    channels, blocks, wide, block = _launch(x)
    if not out.numel():
        return out
    with torch.cuda.device_of(x):
        _product[(channels * blocks,)](
            out, x, y, weight, x.shape[2], blocks, *out.stride(), *x.stride(), *y.stride(),
            *(weight.stride() if weight is not None else (0, 0)), *_TABLES, wide, weight is not None, block,
        )  # fmt: skip
    return out


def gradients(grad: Tensor, x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Those of x and y, laid out as they are, and of the weights, (20, C) or without any of no size."""
    grad_x, grad_y = torch.empty_like(x), torch.empty_like(y)
    channels, blocks, wide, block = _launch(x)
    sums = x.new_empty(blocks, len(PATHS), channels, dtype=torch.promote_types(x.dtype, torch.float32))
    if x.numel():
        with torch.cuda.device_of(x):
            _gradients[(channels * blocks,)](
                grad_x, grad_y, sums, grad, x, y, weight, x.shape[2], blocks, channels, *grad_x.stride(),
                *grad_y.stride(), *grad.stride(), *x.stride(), *y.stride(),
                *(weight.stride() if weight is not None else (0, 0)), *_TABLES, wide, weight is not None, block,
            )  # fmt: skip
    return grad_x, grad_y, x.new_empty(0) if weight is None else sums.sum(0).to(weight.dtype)
