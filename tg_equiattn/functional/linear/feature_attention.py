r"""The two halves of attention by random features, as PyTorch operators in O(N) memory.

Written with logarithms u of the features, linear attention is two softmax attentions in which the m directions w play
the keys' part and the queries' part:

    summary   content_m = sum_j softmax_j(u_m(k_j)) v_j,   level_m = logsumexp_j u_m(k_j)
    readout   out_i = sum_m softmax_m(u_m(q_i) + level_m) content_m,   lse_i = logsumexp_m of the same

Nodes are worked through in chunks whose (nodes, m) scores stay in the cache, and backward computes them again: an
operator saves its inputs and small outputs. They are registered with ``torch.library``, so that torch.compile sees
single nodes, and switch autocast off, which may be on where backward is called. Second derivatives are not
implemented.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...precision import full_precision

_BUDGET = {"cpu": 1 << 18, "other": 1 << 26}  # scores of one chunk: a core's cache, or enough work for a GPU


def _chunks(nodes: Tensor, features: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of groups, each with slices of nodes (G, L, d), of at most the budget's scores if that leaves 256."""
    groups, length = nodes.shape[:2]
    budget = _BUDGET.get(nodes.device.type, _BUDGET["other"])
    width = max(1, min(groups, budget // (features * max(1, min(length, 256)))))
    step = max(256, budget // (width * features))
    parts = [slice(a, min(a + step, length)) for a in range(0, length, step)]
    for a in range(0, groups, width):
        yield slice(a, min(a + width, groups)), parts


def _key_scores(key: Tensor, projection: Tensor, mask: Tensor | None, norm: float) -> Tensor:
    """log features of keys (G, n, m), minus infinity where masked."""
    bias = key.square().sum(-1, keepdim=True).mul_(-norm)
    if mask is not None:
        bias.masked_fill_(~mask[..., None], -math.inf)
    return torch.baddbmm(bias, key, projection.T.expand(len(key), -1, -1))


def _query_scores(query: Tensor, projection: Tensor, level: Tensor) -> Tensor:
    """log features of queries (G, n, m), but for a part of each query alone, plus the level of each feature."""
    return torch.baddbmm(level[:, None], query, projection.T.expand(len(query), -1, -1))


@torch.library.custom_op("tg_equiattn::feature_summary", mutates_args=())
def feature_summary(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float
) -> tuple[Tensor, Tensor]:
    """content (G, m, e) and level (G, m) of keys (G, L, d), values (G, L, e), a mask (G, L).

    Log features are W k - norm |k|^2.
    """
    with full_precision(key.device):
        for stabilise in (False, True):
            if stabilise or _cheap(key):
                content, sums, top = _sums(key, value, projection, mask, norm, stabilise)
                if stabilise or _comfortable(sums if mask is None else sums[mask.any(1)]):
                    break
        limits, empty = torch.finfo(key.dtype), sums == 0  # a group without keys
        sums.clamp_(min=limits.tiny)
        return content.div_(sums.mT), sums.log_().add_(top).masked_fill_(empty, limits.min).squeeze(1)


def _cheap(x: Tensor) -> bool:
    """Whether exponentials are first tried without a stabiliser: where seeing how that went costs nothing."""
    return x.device.type == "cpu"


def _comfortable(sums: Tensor) -> bool:
    """Whether sums of exponentials are far from under- and overflow; NaN is not."""
    if not sums.numel():
        return True
    low, high = sums.aminmax()
    return float(low) > 1e-25 and float(high) < 1e25


def _sums(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float, stabilise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over keys of exp(score - top), times the value (G, m, e) and alone (G, 1, m), and top, the largest or 0."""
    content = value.new_zeros(len(key), len(projection), value.shape[-1])
    sums = value.new_zeros(len(key), 1, len(projection))
    top = torch.full_like(sums, torch.finfo(key.dtype).min) if stabilise else torch.zeros_like(sums)
    for group, parts in _chunks(key, len(projection)):
        for n, part in enumerate(parts):
            scores = _key_scores(key[group, part], projection, None if mask is None else mask[group, part], norm)
            if stabilise:
                highest = torch.maximum(top[group], scores.amax(1, keepdim=True))
                scores.sub_(highest)
                if n:
                    fade = (top[group] - highest).exp_()
                    sums[group] *= fade
                    content[group] *= fade.mT
                top[group] = highest
            scores.exp_()
            sums[group] += scores.sum(1, keepdim=True)
            content[group].baddbmm_(scores.mT, value[group, part])
    return content, sums, top


@feature_summary.register_fake
def _(key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float) -> tuple[Tensor, Tensor]:
    features = len(projection)
    return value.new_empty(len(key), features, value.shape[-1]), value.new_empty(len(key), features)


@torch.library.custom_op("tg_equiattn::feature_summary_backward", mutates_args=())
def feature_summary_backward(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float,
    content: Tensor, level: Tensor, grad_content: Tensor, grad_level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with full_precision(key.device):
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        shift = (grad_level - (content * grad_content).sum(-1))[:, None]
        for group, parts in _chunks(key, len(projection)):
            for part in parts:
                k = key[group, part]
                weights = _key_scores(k, projection, None if mask is None else mask[group, part], norm)
                weights.sub_(level[group, None]).exp_()
                grad = torch.baddbmm(shift[group], value[group, part], grad_content[group].mT).mul_(weights)
                grad_value[group, part] = weights @ grad_content[group]
                grad_key[group, part] = torch.addcmul(grad @ projection, k, grad.sum(-1, keepdim=True), value=-2 * norm)
        return grad_key, grad_value


@feature_summary_backward.register_fake
def _(key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key), torch.empty_like(value)


@torch.library.custom_op("tg_equiattn::feature_readout", mutates_args=())
def feature_readout(query: Tensor, projection: Tensor, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """out (G, L, e) and lse (G, L) of queries (G, L, d), content (G, m, e), level (G, m)."""
    with full_precision(query.device):
        out = query.new_empty(*query.shape[:2], content.shape[-1])
        lse = query.new_empty(*query.shape[:2], 1)
        ceiling = level.amax(-1, keepdim=True)
        lowered = level - ceiling
        for group, parts in _chunks(query, len(projection)):
            for part in parts:
                for stabilise in (False, True):
                    if stabilise or _cheap(query):
                        weights = _query_scores(query[group, part], projection, lowered[group])
                        peak = weights.amax(-1, keepdim=True) if stabilise else torch.zeros_like(weights[..., :1])
                        weights = weights.sub_(peak) if stabilise else weights
                        total = weights.exp_().sum(-1, keepdim=True)
                        if stabilise or _comfortable(total):
                            break
                out[group, part] = torch.bmm(weights, content[group]).div_(total)
                lse[group, part] = total.log_().add_(peak).add_(ceiling[group, None])
        return out, lse.squeeze(-1)


@feature_readout.register_fake
def _(query: Tensor, projection: Tensor, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], content.shape[-1]), query.new_empty(*query.shape[:2])


@torch.library.custom_op("tg_equiattn::feature_readout_backward", mutates_args=())
def feature_readout_backward(
    query: Tensor, projection: Tensor, content: Tensor, level: Tensor,
    out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with full_precision(query.device):
        grad_query = torch.empty_like(query)
        grad_content, grad_level = torch.zeros_like(content), torch.zeros_like(level)
        shift = (grad_lse - (grad_out * out).sum(-1))[..., None]
        for group, parts in _chunks(query, len(projection)):
            for part in parts:
                weights = _query_scores(query[group, part], projection, level[group])
                weights.sub_(lse[group, part, None]).exp_()
                grad = torch.baddbmm(shift[group, part], grad_out[group, part], content[group].mT).mul_(weights)
                grad_content[group].baddbmm_(weights.mT, grad_out[group, part])
                grad_level[group] += grad.sum(1)
                grad_query[group, part] = grad @ projection
        return grad_query, grad_content, grad_level


@feature_readout_backward.register_fake
def _(query: Tensor, projection: Tensor, content: Tensor, level: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(content), torch.empty_like(level)


def _save_summary(ctx, inputs, output) -> None:
    key, value, projection, mask, ctx.norm = inputs
    ctx.save_for_backward(key, value, projection, mask, *output)


def _summary_gradient(ctx, grad_content: Tensor, grad_level: Tensor):
    key, value, projection, mask, content, level = ctx.saved_tensors
    inputs = key, value, projection, mask, ctx.norm, content, level
    grads = feature_summary_backward(*inputs, grad_content.contiguous(), grad_level.contiguous())
    return *grads, None, None, None


def _save_readout(ctx, inputs, output) -> None:
    query, projection, content, level = inputs
    ctx.save_for_backward(query, projection, content, level, *output)


def _readout_gradient(ctx, grad_out: Tensor, grad_lse: Tensor):
    query, projection, content, level, out, lse = ctx.saved_tensors
    grad_query, grad_content, grad_level = feature_readout_backward(
        query, projection, content, level, out, lse, grad_out.contiguous(), grad_lse.contiguous()
    )
    return grad_query, None, grad_content, grad_level


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("second derivatives of attention through random features are not implemented")


feature_summary_backward.register_autograd(_no_second_derivative)
feature_readout_backward.register_autograd(_no_second_derivative)
feature_summary.register_autograd(_summary_gradient, setup_context=_save_summary)
feature_readout.register_autograd(_readout_gradient, setup_context=_save_readout)
