r"""Softmax over the lengths of cross products, as a PyTorch operator in O(N) memory.

    T_i = sum_j p_ij w_j,    p_ij = softmax_j( scale |q_i x k_j| )

|q x k|^2 = |q|^2 |k|^2 - (q.k)^2 is a product of six quadratic features of q and six of k, so scores are the square
root of a matrix product. Tiles of (queries, keys) stay in the cache; backward computes them again from the inputs and
the saved log-sum-exps. Where a score is zero its derivative is taken as zero, as torch does for a norm. Second
derivatives are not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._precision import full_precision

_TILE = {"cpu": 1 << 17, "other": 1 << 26}  # scores of one tile
_KEYS = 512  # of one tile, at most, on the CPU
_SAFE = 60.0  # scores up to here need no stabiliser: exp(60) times many millions is finite in float32


def _query_features(q: Tensor) -> Tensor:
    return torch.cat([q.square(), q[..., [1, 2, 0]] * q[..., [2, 0, 1]]], -1)


def _key_features(k: Tensor) -> Tensor:
    square = k.square()
    return torch.cat([square[..., [1, 2, 0]] + square[..., [2, 0, 1]], -2 * k[..., [1, 2, 0]] * k[..., [2, 0, 1]]], -1)


def _query_chain(q: Tensor, grad: Tensor) -> Tensor:
    """The derivative of the query's features, applied."""
    square, mixed = grad.split(3, -1)
    return 2 * q * square + q[..., [2, 0, 1]] * mixed[..., [1, 2, 0]] + q[..., [1, 2, 0]] * mixed[..., [2, 0, 1]]


def _key_chain(k: Tensor, grad: Tensor) -> Tensor:
    square, mixed = grad.split(3, -1)
    out = k * (square[..., [1, 2, 0]] + square[..., [2, 0, 1]])
    return 2 * (out - k[..., [2, 0, 1]] * mixed[..., [1, 2, 0]] - k[..., [1, 2, 0]] * mixed[..., [2, 0, 1]])


def _tiles(groups: int, length: int, device: torch.device) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Slices of groups and of queries, with slices of keys."""
    budget = _TILE.get(device.type, _TILE["other"])
    if not length:
        return
    keys = min(length, _KEYS if device.type == "cpu" else max(_KEYS, math.isqrt(budget)))
    queries = max(1, min(length, budget // keys))
    together = max(1, budget // (queries * keys))
    parts = [slice(a, min(a + keys, length)) for a in range(0, length, keys)]
    for g in range(0, groups, together):
        for a in range(0, length, queries):
            yield slice(g, min(g + together, groups)), slice(a, min(a + queries, length)), parts


@torch.library.custom_op("tg_equiattn::cross_attention", mutates_args=())
def cross_attention(q: Tensor, k: Tensor, w: Tensor, there: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """T (G, N, e) and log-sum-exps (G, N) of q, k (G, N, 3), w (G, N, e), keys that exist (G, N), scale (G,)."""
    with full_precision(q.device):
        groups, length, width = w.shape
        a, b = _query_features(q), (_key_features(k) * scale[:, None, None].square()).mT
        ones = torch.cat([w, torch.ones_like(w[..., :1])], -1)
        sums = w.new_zeros(groups, length, width + 1)
        top = w.new_full((groups, length, 1), torch.finfo(w.dtype).min)
        stabilise = True
        if q.device.type == "cpu" and w.numel():  # where looking is free
            bound = q.square().sum(-1).amax(-1) * k.square().sum(-1).amax(-1)
            stabilise = not bool((bound.sqrt() * scale < _SAFE).all())
        if not stabilise:
            top.zero_()
        for group, query, parts in _tiles(groups, length, q.device):
            total, highest = sums[group, query], top[group, query]
            for n, key in enumerate(parts):
                p = (a[group, query] @ b[group, :, key]).clamp_(min=0).sqrt_()
                if there is not None:
                    p.masked_fill_(~there[group, None, key], -math.inf)
                if stabilise:
                    peak = torch.maximum(highest, p.amax(-1, keepdim=True))
                    p.sub_(peak)
                    if n:
                        total.mul_((highest - peak).exp_())
                    highest.copy_(peak)
                total.baddbmm_(p.exp_(), ones[group, key])
        normaliser = sums[..., width:].clamp(min=torch.finfo(w.dtype).tiny)
        return sums[..., :width] / normaliser, normaliser.log().add_(top).squeeze(-1)


@cross_attention.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, there: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape), w.new_empty(w.shape[:2])


@torch.library.custom_op("tg_equiattn::cross_attention_backward", mutates_args=())
def cross_attention_backward(
    q: Tensor, k: Tensor, w: Tensor, there: Tensor | None, scale: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with full_precision(q.device):
        groups, length, _ = w.shape
        factor = scale[:, None, None].square()
        a, b = _query_features(q), _key_features(k) * factor
        shift = (grad * out).sum(-1, keepdim=True)
        grad_a, grad_b, grad_w = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(w)
        for group, query, parts in _tiles(groups, length, q.device):
            for key in parts:
                score = (a[group, query] @ b[group, key].mT).clamp_(min=0).sqrt_()
                p = (score - lse[group, query, None]).exp_()
                if there is not None:
                    p.masked_fill_(~there[group, None, key], 0)
                grad_w[group, key].baddbmm_(p.mT, grad[group, query])
                slope = torch.baddbmm(shift[group, query], grad[group, query], w[group, key].mT, beta=-1)
                slope.mul_(p).mul_(0.5)
                slope.div_(score).masked_fill_(score == 0, 0)
                grad_a[group, query].baddbmm_(slope, b[group, key])
                grad_b[group, key].baddbmm_(slope.mT, a[group, query])
        return _query_chain(q, grad_a), _key_chain(k, grad_b * factor), grad_w


@cross_attention_backward.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), w.new_empty(w.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad: Tensor | None, _: Tensor | None):
    if grad is None:
        return None, None, None, None, None
    return *cross_attention_backward(*ctx.saved_tensors, grad.contiguous()), None, None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("second derivatives of vector attention are not implemented")


cross_attention_backward.register_autograd(_no_second_derivative)
cross_attention.register_autograd(_gradient, setup_context=_save)
