"""Formulas of attention by random features with all scores in memory, and functions that apply them to chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import tile_numbers
from ..tiles import joined

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_BUDGET = 1 << 18  # scores of a chunk on a CPU, which fit into the cache of a core

Tensors = Sequence[Tensor]
# A function of tensors of nodes, tensors of groups, and a mask, which returns tensors of nodes and tensors of groups.
OfChunk = Callable[[Tensors, Tensors, Tensor | None], tuple[Tensors, Tensors]]


def plain_summary(
    key: Float[Tensor, "groups nodes d"], value: Float[Tensor, "groups nodes e"],
    projection: Float[Tensor, "features d"], mask: Bool[Tensor, "groups nodes"] | None, norm: float,
) -> tuple[Float[Tensor, "groups features e"], Float[Tensor, "groups features"]]:  # fmt: skip
    """:func:`feature_summary` with all scores in memory."""
    scores, lowest = key_scores(key, projection, mask, norm), torch.finfo(key.dtype).min
    top = scores.detach().amax(1, keepdim=True).clamp(min=lowest)
    weights = (scores - top).exp()
    sums = weights.sum(1)
    empty = sums == 0
    sums = torch.where(empty, 1.0, sums)
    return weights.mT @ value / sums[..., None], torch.where(empty, lowest, sums.log() + top.squeeze(1))


def plain_readout(
    query: Float[Tensor, "groups nodes d"], content: Float[Tensor, "groups features e"],
    key_lse: Float[Tensor, "groups features"], projection: Float[Tensor, "features d"],
) -> tuple[Float[Tensor, "groups nodes e"], Float[Tensor, "groups nodes"]]:  # fmt: skip
    """:func:`feature_readout` with all scores in memory."""
    scores = query_scores(query, projection, key_lse)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    sums = weights.sum(-1, keepdim=True)
    return weights @ content / sums, (sums.log() + top).squeeze(-1)


def key_scores(
    key: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    mask: Bool[Tensor, "groups nodes"] | None, norm: float,
) -> Float[Tensor, "groups nodes features"]:  # fmt: skip
    """Log features of keys, minus infinity where masked."""
    bias = -norm * key.square().sum(-1, keepdim=True)
    if mask is not None:
        bias = bias.masked_fill(~mask[..., None], -math.inf)
    return torch.baddbmm(bias, key, projection.T.expand(key.shape[0], -1, -1))


def query_scores(
    query: Float[Tensor, "groups nodes d"], projection: Float[Tensor, "features d"],
    key_lse: Float[Tensor, "groups features"],
) -> Float[Tensor, "groups nodes features"]:  # fmt: skip
    """Log features of queries, without the term that is the same for all features of a query, plus the log-sum-exp of
    each feature."""
    return torch.baddbmm(key_lse[:, None], query, projection.T.expand(query.shape[0], -1, -1))


def summary_gradient(
    projection: Tensor, norm: float, nodes: Tensors, groups: Tensors, mask: Tensor | None
) -> tuple[Tensors, Tensors]:
    """Gradients of keys and values."""
    (key, value), (grad_content, grad_key_lse, content, key_lse) = nodes, groups
    weights = key_scores(key, projection, mask, norm).sub_(key_lse[:, None]).exp_()
    shift = (grad_key_lse - (content * grad_content).sum(-1))[:, None]
    grad = torch.baddbmm(shift, value, grad_content.mT).mul_(weights)
    grad_key = torch.addcmul(grad @ projection, key, grad.sum(-1, keepdim=True), value=-2 * norm)
    return (grad_key, weights @ grad_content), ()


def readout_gradient(projection: Tensor, nodes: Tensors, groups: Tensors, _: Tensor | None) -> tuple[Tensors, Tensors]:
    """Gradients of queries, and of content and key_lse."""
    (query, grad_out, grad_lse, out, lse), (content, key_lse) = nodes, groups
    weights = query_scores(query, projection, key_lse).sub_(lse[..., None]).exp_()
    shift = (grad_lse - (grad_out * out).sum(-1))[..., None]
    grad = torch.baddbmm(shift, grad_out, content.mT).mul_(weights)
    return (grad @ projection,), (weights.mT @ grad_out, grad.sum(1))


def chunks(nodes: Float[Tensor, "groups nodes d"], features: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of groups, each with slices of nodes. A chunk has at most the budget's scores, but at least 256 nodes."""
    groups, length = nodes.shape[:2]
    budget = tile_numbers(nodes.device, _BUDGET, 4)
    width = max(1, min(groups, budget // (features * max(1, min(length, 256)))))
    step = max(256, budget // (width * features))
    parts = [slice(a, min(a + step, length)) for a in range(0, length, step)]
    for a in range(0, max(1, groups), width):
        yield slice(a, min(a + width, groups)), parts


def in_chunks(run: OfChunk, nodes: Tensors, groups: Tensors, mask: Tensor | None, features: int) -> tuple[Tensor, ...]:
    """Apply ``run`` to tensors of nodes (G, L, ...) and of groups (G, ...), chunk by chunk. Its results for nodes are
    concatenated, and its results for groups are summed."""
    done = []
    for group, parts in chunks(nodes[0], features):
        of_group, beside, total = [x[group] for x in groups], [], None
        for part in parts:
            of_mask = None if mask is None else mask[group, part]
            of_nodes, of_groups = run([x[group, part] for x in nodes], of_group, of_mask)
            beside.append(of_nodes)
            total = of_groups if total is None else [a + b for a, b in zip(total, of_groups, strict=True)]
        done.append([*(joined(x, 1) for x in zip(*beside, strict=True)), *(total or ())])
    return tuple(joined(x) for x in zip(*done, strict=True))


def pullback(
    run: OfChunk,
    nodes: Tensors,
    groups: Tensors,
    mask: Tensor | None,
    of_nodes: Tensors,
    of_groups: Tensors,
    features: int,
) -> tuple[Tensor, ...]:
    """Gradients of the arguments of ``run``, nodes and groups, from gradients of its results, chunk by chunk.

    Args:
        run: the function.
        nodes: its tensors of nodes.
        groups: its tensors of groups.
        mask: its mask.
        of_nodes: gradients of its results for nodes.
        of_groups: gradients of its results for groups.
        features: number of random features.

    Returns:
        Gradients of all ``nodes``, then of all ``groups``. They can be differentiated if gradients are being recorded.
    """

    def pull(nodes: Tensors, groups: Tensors, mask: Tensor | None) -> tuple[Tensors, Tensors]:
        own_nodes, own_groups = len(nodes) - len(of_nodes), len(groups) - len(of_groups)
        inputs = list(nodes[:own_nodes]), list(groups[:own_groups])
        _, back = torch.func.vjp(lambda nodes, groups: run(nodes, groups, mask), *inputs)[:2]
        return back((tuple(nodes[own_nodes:]), tuple(groups[own_groups:])))

    with full_precision(nodes[0].device):
        return in_chunks(pull, (*nodes, *of_nodes), (*groups, *of_groups), mask, features)
