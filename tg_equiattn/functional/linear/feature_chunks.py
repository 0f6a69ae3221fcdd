"""Functions of nodes in chunks whose scores stay in the cache, and the derivatives of such functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...precision import full_precision
from .feature_formulas import Tensors

_BUDGET = {"cpu": 1 << 18, "other": 1 << 26}  # scores of one chunk: a core's cache, or enough work for a GPU

OfChunk = Callable[[Tensors, Tensors, Tensor | None], tuple[Tensors, Tensors]]  # of nodes, groups, mask: of both


def chunks(nodes: Tensor, features: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of groups, each with slices of nodes (G, L, d), of at most the budget's scores if that leaves 256."""
    groups, length = nodes.shape[:2]
    budget = _BUDGET.get(nodes.device.type, _BUDGET["other"])
    width = max(1, min(groups, budget // (features * max(1, min(length, 256)))))
    step = max(256, budget // (width * features))
    parts = [slice(a, min(a + step, length)) for a in range(0, length, step)]
    for a in range(0, max(1, groups), width):
        yield slice(a, min(a + width, groups)), parts


def in_chunks(run: OfChunk, nodes: Tensors, groups: Tensors, mask: Tensor | None, features: int) -> tuple[Tensor, ...]:
    """``run`` of tensors of nodes (G, L, ...) and of groups (G, ...), chunk by chunk: what it returns for nodes lies
    side by side, what it returns for groups is added up."""
    done = []
    for group, parts in chunks(nodes[0], features):
        of_group, beside, total = [x[group] for x in groups], [], None
        for part in parts:
            of_mask = None if mask is None else mask[group, part]
            of_nodes, of_groups = run([x[group, part] for x in nodes], of_group, of_mask)
            beside.append(of_nodes)
            total = of_groups if total is None else [a + b for a, b in zip(total, of_groups, strict=True)]
        done.append([*(_cat(x, 1) for x in zip(*beside, strict=True)), *(total or ())])
    return tuple(_cat(x, 0) for x in zip(*done, strict=True))


def _cat(parts: Tensors, axis: int) -> Tensor:
    return torch.cat(list(parts), axis) if len(parts) > 1 else parts[0]


def pullback(
    run: OfChunk,
    nodes: Tensors,
    groups: Tensors,
    mask: Tensor | None,
    of_nodes: Tensors,
    of_groups: Tensors,
    features: int,
) -> tuple[Tensor, ...]:
    """Gradients of the nodes and groups that ``run`` takes, from those of what it returns, chunk by chunk.

    They can be differentiated in turn where gradients are being recorded.
    """

    def pull(nodes: Tensors, groups: Tensors, mask: Tensor | None) -> tuple[Tensors, Tensors]:
        own_nodes, own_groups = len(nodes) - len(of_nodes), len(groups) - len(of_groups)
        inputs = list(nodes[:own_nodes]), list(groups[:own_groups])
        _, back = torch.func.vjp(lambda nodes, groups: run(nodes, groups, mask), *inputs)[:2]
        return back((tuple(nodes[own_nodes:]), tuple(groups[own_groups:])))

    with full_precision(nodes[0].device):
        return in_chunks(pull, (*nodes, *of_nodes), (*groups, *of_groups), mask, features)
