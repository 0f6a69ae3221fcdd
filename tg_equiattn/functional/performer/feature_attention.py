r"""The two halves of attention by random features, as PyTorch operators in O(N) memory.

With the logarithms u of the features, linear attention consists of two softmax attentions. The m features attend to the
nodes, and then the nodes attend to the features:

    summary   content_m = sum_j softmax_j(u_m(k_j)) v_j,   key_lse_m = logsumexp_j u_m(k_j)
    readout   out_i = sum_m softmax_m(u_m(q_i) + key_lse_m) content_m,   lse_i = logsumexp_m(u_m(q_i) + key_lse_m)

Operators process nodes in chunks whose (nodes, m) scores stay in the cache, and save their inputs and small outputs;
backward computes scores again. Transforms use the definitions in :mod:`.feature_formulas`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import OPERATOR, choose_form, refuse_forward_mode
from ..second_derivatives import register_derivatives
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

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def feature_summary(
    key: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"], norm: float,
    value: Float[Tensor, "groups nodes e"], mask: Bool[Tensor, "groups nodes"] | None, plain: bool = False,
) -> tuple[Float[Tensor, "groups features e"], Float[Tensor, "groups features"]]:  # fmt: skip
    """The content and the log-sum-exp of each feature over the valid keys of a group.

    Log features are W k - norm |k|^2. A group without keys has content 0 and the smallest finite key_lse.
    """
    if choose_form(key, key[..., 0].numel() * len(projection), plain, few=True) != OPERATOR:
        return plain_summary(key, value, projection, mask, norm)
    return chunked_summary(key, value, projection, mask, norm)


def feature_readout(
    query: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    content: Float[Tensor, "groups features e"], key_lse: Float[Tensor, "groups features"], plain: bool = False,
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes"]]:  # fmt: skip
    """Outputs and log-sum-exps of queries over the features."""
    form = choose_form(query, query[..., 0].numel() * len(projection), plain, few=True)
    readout = chunked_readout if form == OPERATOR else plain_readout
    return readout(query, content, key_lse, projection)


def _cheap(x: Tensor) -> bool:
    """True if exponentials are first computed without a stabiliser. On a CPU, it costs nothing to read whether they
    overflow."""
    return x.device.type == "cpu"


def _comfortable(sums: Tensor) -> bool:
    """True if sums of exponentials are far from under- and overflow, and not NaN."""
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
    key: Float[Tensor, "groups nodes d"], value: Float[Tensor, "groups nodes e"],
    projection: Float[Tensor, "features d"], mask: Bool[Tensor, "groups nodes"] | None, norm: float, stabilise: bool,
) -> tuple[Float[Tensor, "groups features e"], Float[Tensor, "groups 1 m"], Float[Tensor, "groups 1 m"]]:  # fmt: skip
    """Sums over keys of exp(score - top) times the value, sums of exp(score - top), and top: the largest score if
    ``stabilise``, else 0."""
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
    grad_content: Tensor, grad_key_lse: Tensor, content: Tensor, key_lse: Tensor,
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, norm: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(key.device):
        run = functools.partial(summary_gradient, projection, norm)
        groups = grad_content, grad_key_lse, content, key_lse
        grad_key, grad_value = in_chunks(run, (key, value), groups, mask, projection.shape[0])
        return grad_key, grad_value


@chunked_summary_backward.register_fake
def _(
    grad_content: Tensor,
    grad_key_lse: Tensor,
    content: Tensor,
    key_lse: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key), torch.empty_like(value)


@torch.library.custom_op("tg_equiattn::feature_readout", mutates_args=())
def chunked_readout(query: Tensor, content: Tensor, key_lse: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`feature_readout` in O(N) memory."""
    refuse_forward_mode()
    ceiling = key_lse.amax(-1, keepdim=True)

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
        out, lse = in_chunks(run, (query,), (content, key_lse - ceiling, ceiling), None, projection.shape[0])
        return out, lse


@chunked_readout.register_fake
def _(query: Tensor, content: Tensor, key_lse: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], content.shape[-1]), query.new_empty(*query.shape[:2])


@torch.library.custom_op("tg_equiattn::feature_readout_backward", mutates_args=())
def chunked_readout_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor,
    query: Tensor, content: Tensor, key_lse: Tensor, projection: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_forward_mode()
    with full_precision(query.device):
        run = functools.partial(readout_gradient, projection)
        nodes = query, grad_out, grad_lse, out, lse
        grad_query, grad_content, grad_key_lse = in_chunks(run, nodes, (content, key_lse), None, projection.shape[0])
        return grad_query, grad_content, grad_key_lse


@chunked_readout_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, query: Tensor, content: Tensor, key_lse: Tensor,
    projection: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(content), torch.empty_like(key_lse)


def _summary_second(operands, given, cotangents, projection, mask, norm) -> tuple[Tensor, ...]:
    """The same as :func:`.second_derivatives`, chunk by chunk, with gradients of the kept outputs."""
    run = functools.partial(summary_gradient, projection, norm)
    return pullback(run, operands, given, mask, cotangents, (), projection.shape[0])


def _readout_second(operands, given, cotangents, projection) -> tuple[Tensor, ...]:
    """The same as :func:`_summary_second`, for the readout."""
    (query, *groups), (of_query, *of_groups) = operands, cotangents
    run = functools.partial(readout_gradient, projection)
    grads = pullback(run, (query, *given), groups, None, (of_query,), of_groups, projection.shape[0])
    return grads[0], *grads[-2:], *grads[1:-2]


register_derivatives(chunked_summary, chunked_summary_backward, plain_summary, 2, keep=True, second=_summary_second)
register_derivatives(chunked_readout, chunked_readout_backward, plain_readout, 3, keep=True, second=_readout_second)
