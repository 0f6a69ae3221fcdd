r"""The arithmetic of group self-attention with the pointwise relation (h = t) on one tile of queries.

Each query element t has one softmax over all (D, s): every score is formed and the largest subtracted. Layout and names
as in :mod:`.factorised`, but

    position  (T, D, 1, p)  logits <q(i,t), rho_space(t^-1 D)>
    group     (T, U, p)     logits <q(i,t), rho_group(u)>, or None where position is (T, D, U, p), of both
    index     (1, T, S)     the argument u = t^-1 s, and its inverse along s
    keep      (D, T, S, p)  dropout factors of the weights, or None

In eager execution one element t is worked on at a time, in place: its scores (D, S, p) are to stay in the cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .direct import blocks, dot, sums


def _by_element(position: Tensor, group: Tensor | None, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits (T, D, 1, p) and (T, U, p), or (T, D, U, p) and None, with s in place of u by a table (T, S) of u; by its
    inverse (T, U) their gradients with u in place of s."""
    if group is None:
        return position.take_along_dim(table[:, None, :, None], 2), None
    return position, group.take_along_dim(table[:, :, None], 1)


def exponentials_(score: Tensor, top: Tensor) -> Tensor:
    """exp(score - top) of scores (t, D, S, p) and their maxima (t, 1, 1, p), in place, at least 5e-26 (float32) or
    8e-206: adding that to a sum of 1 and more changes nothing, and numbers below the smallest normal one take a CPU ten
    times as long."""
    score -= top
    return score.clamp_(min=2 / 3 * math.log(torch.finfo(score.dtype).tiny)).exp_()


def _exponentials(query: Tensor, key: Tensor, logits: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max) (t, D, S, p) of some query elements (t, C, p), its sum and the maximum (t, 1, 1, p)."""
    score = dot(query[:, None, None], key[None])
    for part in logits:
        score += part
    top = score.amax((1, 2), keepdim=True)
    score = exponentials_(score, top)
    return score, score.sum((1, 2), keepdim=True), top


def _add_products_(total: Tensor, weight: Tensor, x: Tensor) -> None:
    """Add the sum over t of weight (t, D, S, p) times x (t, C, p) to a total (D, S, C, p)."""
    if torch.compiler.is_compiling():
        total += sums(weight, x[:, None, None], (0,))
        return
    for c in range(total.shape[2]):
        total[:, :, c].addcmul_(weight[0], x[0, c])


def _logits(position: Tensor, group: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    """Summands of the scores beside the content, which broadcast to (T, D, S, p)."""
    if bias is not None:
        position = position + bias[:, None]
    return [position] if group is None else [position, group[:, None]]


def forward(query, key, value, position, group, index, bias, keep) -> tuple[Tensor, Tensor]:
    """The output (T, C, p), and the logarithm (T, p) of the sum of exponentials of a query's scores."""
    logits, out, levels = _logits(*_by_element(position, group, index[0]), bias), [], []
    for t in blocks(len(query)):
        weight, total, top = _exponentials(query[t], key, [x[t] for x in logits])
        if keep is not None:
            weight *= keep[:, t].transpose(0, 1)
        out.append(sums(weight, value, (1, 2)) / total[:, 0])
        levels.append((top + total.log())[:, 0, 0])
    return torch.cat(out), torch.cat(levels)


def backward(query, key, value, position, group, index, inverse, bias, keep, grad, grad_level):
    """Gradients of query, key, value, position and group; ``grad_level`` (T, p) is that of the logarithm."""
    logits = _logits(*_by_element(position, group, index[0]), bias)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    to_query, to_position, to_group = [], [], []
    for t in blocks(len(query)):
        weight, total, _ = _exponentials(query[t], key, [x[t] for x in logits])
        factor = total.reciprocal_()
        scaled = grad[t] * factor[:, 0]
        slope = dot(scaled[:, None, None], value[None])
        if keep is None:
            _add_products_(grad_value, weight, scaled)
        else:
            kept = keep[:, t].transpose(0, 1)
            _add_products_(grad_value, weight * kept, scaled)
            slope *= kept
        slope *= weight
        mean = slope.sum((1, 2), keepdim=True) - grad_level[t, None, None]
        slope.addcmul_(weight, mean * factor, value=-1)
        _add_products_(grad_key, slope, query[t])
        to_query.append(sums(slope, key, (1, 2)))
        to_position.append(slope if group is None else slope.sum(2, keepdim=True))
        if group is not None:
            to_group.append(slope.sum(1))
    logit = _by_element(torch.cat(to_position), torch.cat(to_group) if to_group else None, inverse[0])
    return torch.cat(to_query), grad_key, grad_value, *logit
