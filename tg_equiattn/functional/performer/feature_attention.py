r"""The two halves of attention by random features, as PyTorch operators in O(N) memory.

Written with logarithms u of the features, linear attention is two softmax attentions in which the m directions w play
the keys' part and the queries' part:

    summary   content_m = sum_j softmax_j(u_m(k_j)) v_j,   level_m = logsumexp_j u_m(k_j)
    readout   out_i = sum_m softmax_m(u_m(q_i) + level_m) content_m,   lse_i = logsumexp_m of the same

Operators work through nodes in chunks whose (nodes, m) scores stay in the cache, and save their inputs and small
outputs; backward computes scores again. Transforms see the plain formulas.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...modes import full_precision, transformed
from ..backend import compiler_fuses, refuse_forward_mode, use_plain
from .feature_formulas import (
    Tensors,
    chunks,
    in_chunks,
    key_scores,
    plain_readout,
    plain_summary,
    pullback,
    query_scores,
    readout_gradient,
    summary_gradient,
)


def feature_summary(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """content (G, m, e) and level (G, m) of keys (G, L, d), values (G, L, e), a mask (G, L).

    Log features are W k - norm |k|^2. A group without keys has content 0 and the lowest level there is.
    """
    plain = use_plain(plain) or compiler_fuses(key, key[..., 0].numel() * len(projection))
    summary = plain_summary if plain else chunked_summary
    return summary(key, value, projection, mask, norm)


def feature_readout(
    query: Tensor, projection: Tensor, content: Tensor, level: Tensor, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """out (G, L, e) and lse (G, L) of queries (G, L, d), content (G, m, e), level (G, m)."""
    plain = use_plain(plain) or compiler_fuses(query, query[..., 0].numel() * len(projection))
    readout = plain_readout if plain else chunked_readout
    return readout(query, projection, content, level)


def _cheap(x: Tensor) -> bool:
    """Whether exponentials are first tried without a stabiliser: where seeing how that went costs nothing."""
    return x.device.type == "cpu"


def _comfortable(sums: Tensor) -> bool:
    """Whether sums of exponentials are far from under- and overflow; NaN is not."""
    if not sums.numel():
        return True
    low, high = sums.aminmax()
    return float(low) > 1e-25 and float(high) < 1e25


@torch.library.custom_op("tg_equiattn::feature_summary", mutates_args=())
def chunked_summary(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float
) -> tuple[Tensor, Tensor]:
    """:func:`feature_summary` in O(N) memory."""
    refuse_forward_mode()
    with full_precision(key.device):
        for stabilise in (False, True):
            if stabilise or _cheap(key):
                content, sums, top = _sums(key, value, projection, mask, norm, stabilise)
                if stabilise or _comfortable(sums if mask is None else sums[mask.any(1)]):
                    break
        limits, empty = torch.finfo(key.dtype), sums == 0  # a group without keys
        sums.clamp_(min=limits.tiny)
        return content.div_(sums.mT), sums.log_().add_(top).masked_fill_(empty, limits.min).squeeze(1)


def _sums(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float, stabilise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over keys of exp(score - top), times the value (G, m, e) and alone (G, 1, m), and top, the largest or 0."""
    content = value.new_zeros(key.shape[0], len(projection), value.shape[-1])
    sums = value.new_zeros(key.shape[0], 1, len(projection))
    top = torch.full_like(sums, torch.finfo(key.dtype).min) if stabilise else torch.zeros_like(sums)
    for group, parts in chunks(key, len(projection)):
        for n, part in enumerate(parts):
            scores = key_scores(key[group, part], projection, None if mask is None else mask[group, part], norm)
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


@chunked_summary.register_fake
def _(key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float) -> tuple[Tensor, Tensor]:
    groups, features = key.shape[0], projection.shape[0]
    return value.new_empty(groups, features, value.shape[-1]), value.new_empty(groups, features)


@torch.library.custom_op("tg_equiattn::feature_summary_backward", mutates_args=())
def chunked_summary_backward(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float,
    content: Tensor, level: Tensor, grad_content: Tensor, grad_level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(key.device):
        run = functools.partial(summary_gradient, projection, norm)
        groups = content, level, grad_content, grad_level
        grad_key, grad_value = in_chunks(run, (key, value), groups, mask, projection.shape[0])
        return grad_key, grad_value


@chunked_summary_backward.register_fake
def _(key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key), torch.empty_like(value)


@torch.library.custom_op("tg_equiattn::feature_readout", mutates_args=())
def chunked_readout(query: Tensor, projection: Tensor, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`feature_readout` in O(N) memory."""
    refuse_forward_mode()
    ceiling = level.amax(-1, keepdim=True)

    def run(nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
        (query,), (content, lowered, ceiling) = nodes, groups
        for stabilise in (False, True):
            if stabilise or _cheap(query):
                weights = query_scores(query, projection, lowered)
                peak = weights.amax(-1, keepdim=True) if stabilise else torch.zeros_like(weights[..., :1])
                weights = weights.sub_(peak) if stabilise else weights
                total = weights.exp_().sum(-1, keepdim=True)
                if stabilise or _comfortable(total):
                    break
        out = torch.bmm(weights, content).div_(total)
        return (out, total.log_().add_(peak).add_(ceiling[:, None]).squeeze(-1)), ()

    with full_precision(query.device):
        out, lse = in_chunks(run, (query,), (content, level - ceiling, ceiling), None, projection.shape[0])
        return out, lse


@chunked_readout.register_fake
def _(query: Tensor, projection: Tensor, content: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], content.shape[-1]), query.new_empty(*query.shape[:2])


@torch.library.custom_op("tg_equiattn::feature_readout_backward", mutates_args=())
def chunked_readout_backward(
    query: Tensor, projection: Tensor, content: Tensor, level: Tensor,
    out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(query.device):
        run = functools.partial(readout_gradient, projection)
        nodes = query, out, lse, grad_out, grad_lse
        grad_query, grad_content, grad_level = in_chunks(run, nodes, (content, level), None, projection.shape[0])
        return grad_query, grad_content, grad_level


@chunked_readout_backward.register_fake
def _(query: Tensor, projection: Tensor, content: Tensor, level: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(content), torch.empty_like(level)


def _save(ctx, inputs, output) -> None:
    """Inputs and outputs, the number among them apart."""
    ctx.norm = next((x for x in inputs if isinstance(x, float)), 0.0)
    ctx.save_for_backward(*(x for x in inputs if not isinstance(x, float)), *output)


def _summary_gradient(ctx, grad_content: Tensor, grad_level: Tensor):
    key, value, projection, mask, content, level = ctx.saved_tensors
    groups = content, level, grad_content.contiguous(), grad_level.contiguous()
    if transformed():  # entered after the forward pass, as by a vectorised Jacobian
        (grad_key, grad_value), _ = summary_gradient(projection, ctx.norm, (key, value), groups, mask)
    else:
        grad_key, grad_value = chunked_summary_backward(key, value, projection, mask, ctx.norm, *groups)
    return grad_key, grad_value, None, None, None


def _readout_gradient(ctx, grad_out: Tensor, grad_lse: Tensor):
    query, projection, content, level, out, lse = ctx.saved_tensors
    of_nodes = out, lse, grad_out.contiguous(), grad_lse.contiguous()
    if transformed():
        grads, of_groups = readout_gradient(projection, (query, *of_nodes), (content, level), None)
        grad_query, grad_content, grad_level = *grads, *of_groups
    else:
        grad_query, grad_content, grad_level = chunked_readout_backward(query, projection, content, level, *of_nodes)
    return grad_query, None, grad_content, grad_level


def _summary_second_gradient(ctx, of_key: Tensor, of_value: Tensor):
    key, value, projection, mask, *groups = ctx.saved_tensors[:-2]
    run = functools.partial(summary_gradient, projection, ctx.norm)
    grads = pullback(run, (key, value), groups, mask, (of_key, of_value), (), projection.shape[0])
    return *grads[:2], None, None, None, *grads[2:]


def _readout_second_gradient(ctx, of_query: Tensor, of_content: Tensor, of_level: Tensor):
    query, projection, content, level, *rest = ctx.saved_tensors[:-3]
    run = functools.partial(readout_gradient, projection)
    nodes, groups = (query, *rest), (content, level)
    grads = pullback(run, nodes, groups, None, (of_query,), (of_content, of_level), projection.shape[0])
    grad_query, *grad_rest, grad_content, grad_level = grads
    return grad_query, None, grad_content, grad_level, *grad_rest


chunked_summary.register_autograd(_summary_gradient, setup_context=_save)
chunked_readout.register_autograd(_readout_gradient, setup_context=_save)
chunked_summary_backward.register_autograd(_summary_second_gradient, setup_context=_save)
chunked_readout_backward.register_autograd(_readout_second_gradient, setup_context=_save)
