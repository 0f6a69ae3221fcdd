r"""Softmax over the lengths of cross products in O(N) memory, tile by tile.

    T_i = sum_j p_ij w_j,    p_ij = softmax_j( scale |q_i x k_j| ),    |q x k|^2 = |q|^2 |k|^2 - (q.k)^2

The square is a product of six quadratic features of q and six of k. Its terms cancel if vectors are nearly parallel, so
rounded factors would give wrong scores. If matrix products may round their factors (TF32, bfloat16 on a CPU), factors
are therefore sums of parts that are exact in these formats. Only weights (p, and slopes of scores) may be rounded. The
derivative of a score that is zero is taken as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import tile_numbers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_TILE_SCORES = 1 << 17  # scores of a chunk on a CPU
_TILE_KEYS = 512  # largest number of keys of a chunk on a CPU
_SAFE = 60.0  # scores up to here need no stabiliser: exp(60) times many millions is finite in float32


def _next(x: Tensor) -> Tensor:
    """(y, z, x) of (x, y, z). Indexing by a list would copy the list to the device."""
    return x.roll(-1, -1)


def _last(x: Tensor) -> Tensor:
    """(z, x, y)."""
    return x.roll(1, -1)


def _query_features(q: Float[Tensor, "groups tokens 3"]) -> Float[Tensor, "groups tokens 6"]:
    return torch.cat([q.square(), _next(q) * _last(q)], -1)


def _key_features(k: Float[Tensor, "groups tokens 3"]) -> Float[Tensor, "groups tokens 6"]:
    square = k.square()
    return torch.cat([_next(square) + _last(square), -2 * _next(k) * _last(k)], -1)


def _products_round(x: Tensor) -> bool:
    """True if matrix products of float32 may round their factors. On a GPU this is assumed, since splitting into parts
    costs little there."""
    if x.dtype == torch.float64 or x.device.type != "cpu":
        return x.dtype != torch.float64
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the precision was set by torch's newer settings
        return True


def _bfloat16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 as a sum of three numbers of 8 significant bits each."""
    high = x.bfloat16().to(x.dtype)
    middle = (x - high).bfloat16().to(x.dtype)
    return high, middle, x - high - middle


def _exact_factors(
    a: Float[Tensor, "*batch n width"], b: Float[Tensor, "*batch m width"]
) -> tuple[Float[Tensor, "*batch n rank"], Float[Tensor, "*batch m rank"]]:
    """Factors whose product is a b^T, also if matrix products round their factors."""
    if not _products_round(a):
        return a, b
    (a1, a2, a3), (b1, b2, b3) = _bfloat16_parts(a), _bfloat16_parts(b)
    return torch.cat([a1, a1, a2, a1, a3, a2], -1), torch.cat([b1, b2, b1, b3, b1, b2], -1)


def _parts_in_turn(x: Tensor) -> Tensor:
    """x (..., r), or its three parts side by side if products may round. :func:`_summed_parts` adds their products."""
    return torch.cat(_bfloat16_parts(x), -1) if _products_round(x) else x


def _summed_parts(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).sum(-2)


def _query_chain(q: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the query, from the gradient of its features."""
    square, mixed = grad.split(3, -1)
    return 2 * q * square + _last(q) * _next(mixed) + _next(q) * _last(mixed)


def _key_chain(k: Tensor, grad: Tensor) -> Tensor:
    square, mixed = grad.split(3, -1)
    out = k * (_next(square) + _last(square))
    return 2 * (out - _last(k) * _next(mixed) - _next(k) * _last(mixed))


def _tiles(groups: int, length: int, device: torch.device) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Slices of groups and of queries, with slices of keys."""
    budget = tile_numbers(device, _TILE_SCORES, 4)
    if not length:
        return
    keys = min(length, _TILE_KEYS if device.type == "cpu" else max(_TILE_KEYS, math.isqrt(budget)))
    queries = max(1, min(length, budget // keys))
    together = max(1, budget // (queries * keys))
    parts = [slice(a, min(a + keys, length)) for a in range(0, length, keys)]
    for g in range(0, groups, together):
        for a in range(0, length, queries):
            yield slice(g, min(g + together, groups)), slice(a, min(a + queries, length)), parts


def cross_product_attention(
    q: Float[Tensor, "groups tokens 3"],
    k: Float[Tensor, "groups tokens 3"],
    w: Float[Tensor, "groups tokens width"],
    mask: Bool[Tensor, "groups tokens"] | None,
    scale: Float[Tensor, " groups"],
) -> tuple[Float[Tensor, "groups tokens width"], Float[Tensor, "groups tokens"]]:
    """The sums sum_j p_ij w_j and the log-sum-exps of scores; ``mask`` is true for valid keys."""
    groups, length, width = w.shape
    a, b = _exact_factors(_query_features(q), _key_features(k) * scale[:, None, None].square())
    ones = _parts_in_turn(torch.cat([w, torch.ones_like(w[..., :1])], -1))
    sums = torch.zeros_like(ones)
    top = w.new_full((groups, length, 1), torch.finfo(w.dtype).min)
    stabilise = True
    if q.device.type == "cpu" and w.numel():  # reading a bound of the scores costs nothing there
        bound = q.square().sum(-1).amax(-1) * k.square().sum(-1).amax(-1)
        stabilise = not bool((bound.sqrt() * scale < _SAFE).all())
    if not stabilise:
        top.zero_()
    for group, query, parts in _tiles(groups, length, q.device):
        total, highest = sums[group, query], top[group, query]
        for n, key in enumerate(parts):
            p = (a[group, query] @ b[group, key].mT).clamp_(min=0).sqrt_()
            if mask is not None:
                p.masked_fill_(~mask[group, None, key], -math.inf)
            if stabilise:
                peak = torch.maximum(highest, p.amax(-1, keepdim=True))
                p.sub_(peak)
                if n:
                    total.mul_((highest - peak).exp_())
                highest.copy_(peak)
            total.baddbmm_(p.exp_(), ones[group, key])
    sums = _summed_parts(sums, width + 1)
    normaliser = sums[..., width:].clamp(min=torch.finfo(w.dtype).tiny)
    return sums[..., :width] / normaliser, normaliser.log().add_(top).squeeze(-1)


def cross_product_attention_backward(
    q: Float[Tensor, "groups tokens 3"],
    k: Float[Tensor, "groups tokens 3"],
    w: Float[Tensor, "groups tokens width"],
    mask: Bool[Tensor, "groups tokens"] | None,
    scale: Float[Tensor, " groups"],
    shift: Float[Tensor, "groups tokens 1"],
    lse: Float[Tensor, "groups tokens"],
    grad: Float[Tensor, "groups tokens width"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w from the gradient ``grad`` of the sums. ``shift`` is the scalar product of ``grad`` and
    the sums, and ``lse`` the log-sum-exps."""
    groups, length, width = w.shape
    factor = scale[:, None, None].square()
    a, b = _query_features(q), _key_features(k) * factor
    (left, right), (grads, values) = _exact_factors(a, b), _exact_factors(grad, w)
    a, b, grad = _parts_in_turn(a), _parts_in_turn(b), _parts_in_turn(grad)
    grad_a, grad_b, grad_w = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(grad)
    for group, query, parts in _tiles(groups, length, q.device):
        for key in parts:
            score = (left[group, query] @ right[group, key].mT).clamp_(min=0).sqrt_()
            p = (score - lse[group, query, None]).exp_()
            if mask is not None:
                p.masked_fill_(~mask[group, None, key], 0)
            grad_w[group, key].baddbmm_(p.mT, grad[group, query])
            slope = torch.baddbmm(shift[group, query], grads[group, query], values[group, key].mT, beta=-1)
            slope.mul_(p).mul_(0.5)
            slope.div_(score).masked_fill_(score == 0, 0)
            grad_a[group, query].baddbmm_(slope, b[group, key])
            grad_b[group, key].baddbmm_(slope.mT, a[group, query])
    grad_a, grad_b, grad_w = _summed_parts(grad_a, 6), _summed_parts(grad_b, 6), _summed_parts(grad_w, width)
    return _query_chain(q, grad_a), _key_chain(k, grad_b * factor), grad_w
