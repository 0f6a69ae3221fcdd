r"""The backward of the backward of group self-attention, tile by tile, on the layout of :mod:`.factorised`.

The gradients of the operator, paired with cotangents, are a sum over tiles of

.. math:: L = \sum_{h,t,D,s} P \big( \partial W (\ell' - \bar\ell') + W' + g\, \ell' \big)

P the softmax, dW = <dout, v>, W' = <dout, v'> with v' the cotangent of the value's gradient, l' the derivative of the
score along the cotangents of query, key and encodings, g the gradient of the level where there is one, and a bar the
mean under P. With r the mean of dW, its derivatives are

.. math:: \frac{\partial L}{\partial \ell'} = P (\partial W - r + g) = \delta, \qquad
    \frac{\partial L}{\partial \ell} = P (F - \bar F) = \varepsilon, \quad
    F = (\partial W - r + g)(\ell' - \bar\ell') + W',

that of g is the mean of l', and that of dW is the derivative of P along the cotangents. Everything else is linear, as
in the first backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...precision import full_precision
from .factorised import dot, dropped, full_logits, full_logits_backward, weighted
from .plan import AttentionPlan
from .pointwise import exponentials_
from .tiles import from_lanes, to_lanes


class _Operands(NamedTuple):
    """Of a tile, or what their gradients are paired with: positions and group are logits."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    group: Tensor | None

    def positions(self, t: int, table: Tensor) -> Tensor:
        """Logits (H, D, S, p) of one query element."""
        part = slice(t, t + 1)
        return full_logits(self.position[part], None if self.group is None else self.group[part], table[:, part])[0]


def _mean(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x).sum((1, 2), keepdim=True)


def _tile(x: _Operands, along: _Operands, table, inverse, bias, keep, grad, grad_level) -> tuple[Any, ...]:
    """Gradients of query, key, value by content, of ``grad`` and ``grad_level`` (T, p) or None, and those of both kinds
    of logits: ``x``'s and ``along``'s."""
    keep = None if keep is None else keep.transpose(0, 1)
    grad_weight = dropped(dot(grad[:, None, None], x.value[None]), keep)  # (H, D, S, p)
    along_weight = dropped(dot(grad[:, None, None], along.value[None]), keep)
    weight, turned = torch.zeros_like(grad_weight), torch.zeros_like(grad_weight)
    contents, slopes, logits, logit_slopes, to_level = [], [], [], [], []
    for t in range(x.query.shape[0]):
        score = dot(x.query[t], x.key)
        score = x.positions(t, table) + (score if bias is None else score.add_(bias[:, None]))
        p = exponentials_(score, score.amax((1, 2), keepdim=True))
        p.div_(p.sum((1, 2), keepdim=True))
        tangent = dot(along.query[t], x.key).add_(dot(x.query[t], along.key)) + along.positions(t, table)
        mean = _mean(p, tangent)
        to_level.append(mean[:, 0, 0])
        tangent.sub_(mean)
        slope = grad_weight - _mean(p, grad_weight)
        if grad_level is not None:
            slope += grad_level[t]
        second = torch.addcmul(along_weight, slope, tangent)
        weight.add_(p)
        turned.addcmul_(p, tangent)
        slope.mul_(p)
        second = second.sub_(_mean(p, second)).mul_(p)
        contents.append(second.sum(0))
        slopes.append(slope.sum(0))
        factored = x.group is not None
        logits.append(full_logits_backward(second[None], factored, inverse[:, t : t + 1]))
        logit_slopes.append(full_logits_backward(slope[None], factored, inverse[:, t : t + 1]))
    content, content_slope = torch.stack(contents), torch.stack(slopes)  # (T, D, S, p)
    query = weighted(content, x.key, (1, 2)) + weighted(content_slope, along.key, (1, 2))
    key = weighted(content, x.query[:, None, None], (0,)) + weighted(content_slope, along.query[:, None, None], (0,))
    weight, turned = dropped(weight, keep), dropped(turned, keep)
    value = weighted(turned, grad[:, None, None], (0,))
    to_grad = weighted(turned, x.value, (1, 2)) + weighted(weight, along.value, (1, 2))
    joined = [
        [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
        for parts in (logits, logit_slopes)
    ]
    return query, key, value, to_grad, torch.cat(to_level), *joined


def second_backward(
    cotangents: Sequence[Tensor | None],
    grad: Tensor,
    grad_level: Tensor | None,
    operands: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    """Gradients of grad and of grad_level, and of the five ``operands`` (query, key, value, rho_space, rho_group),
    given ``cotangents`` of the operands' gradients; ``settings`` as the operator's. Where there is no ``grad_level``,
    its gradient means nothing."""
    with torch.no_grad(), full_precision(grad.device):
        along: list[Any] = [torch.zeros_like(x) if c is None else c for c, x in zip(cotangents, operands, strict=True)]
        primal: list[Any] = [*operands, *settings, "second"]
        a, b = AttentionPlan(*primal), AttentionPlan(*along, *primal[5:])
        tiling = a.tiling
        grads = to_lanes(grad, tiling.lanes)
        levels = None if grad_level is None else to_lanes(grad_level[:, None], tiling.lanes)
        out_level = torch.zeros_like(grads[:, :, :1])
        out_grad, out_query = torch.empty_like(grads), torch.empty_like(a.query)
        out_key, out_value = ([torch.zeros_like(x) for x in xs] for xs in (a.key, a.value))
        out_space, out_group = torch.zeros_like(a.rho_space), torch.zeros_like(a.rho_group)
        for (lane, tile, key, value, bias), (_, _, along_key, along_value, _) in zip(a.tiles(), b.tiles(), strict=True):
            queries, along_queries = (tiling.query(plan.query[lane], tile) for plan in (a, b))
            tile_level = None if levels is None else tiling.query(levels[lane], tile)[:, 0]
            to_query, to_grad, to_level = [], [], []
            for block in a.blocks:
                q, aq = queries[block.query], along_queries[block.query]
                rho, along_rho = a.rho(block, a.rho_space), b.rho(block, b.rho_space)
                headed = a.with_head(q, lane)
                along_headed = F.pad(aq, (0, 0, 0, headed.shape[1] - aq.shape[1]))
                group, along_group = (None, None) if a.full else (a.group_logits(headed), a.group_logits(along_headed))
                if along_group is not None:
                    along_group = along_group + b.group_logits(headed)
                x = _Operands(q, key, value, tiling.position(rho, headed, tile), group)
                position = tiling.position(rho, along_headed, tile) + tiling.position(along_rho, headed, tile)
                tangents = _Operands(aq, along_key, along_value, position, along_group)
                keep = a.keep(lane, tile, block, q.dtype)
                dq, dk, dv, dg, dl, *logits = _tile(
                    x, tangents, block.table, block.inverse, bias, keep, tiling.query(grads[lane], tile)[block.output],
                    None if tile_level is None else tile_level[block.output],
                )  # fmt: skip
                tiling.scatter_(out_key[lane], tile, dk)
                tiling.scatter_(out_value[lane], tile, dv)
                rho_grad = torch.zeros_like(rho)
                for plan, encoding, other, (space, group) in (
                    (a, rho, headed, logits[0]),
                    (b, along_rho, along_headed, logits[1]),
                ):
                    dq = dq + tiling.position_backward(encoding, other, tile, space, rho_grad)[:, : a.channels]
                    if group is not None:
                        dq = dq + torch.matmul(plan.rho_group[:, : a.channels].T, group)
                        out_group += torch.matmul(group, other.mT).sum(0)
                out_space[:, block.output] += rho_grad.view_as(out_space[:, block.output])
                to_query.append(dq)
                to_grad.append(dg)
                to_level.append(dl)
            tiling.write_(out_query[lane], tile, torch.cat(to_query))
            tiling.write_(out_grad[lane], tile, torch.cat(to_grad))
            if a.paired:
                tiling.write_(out_level[lane], tile, torch.cat(to_level)[:, None])
        restored = [from_lanes(tiling.restore(torch.stack(x))) for x in (out_key, out_value)]
        out_space = out_space.transpose(0, 1).contiguous()
        out_levels = from_lanes(out_level).squeeze(1)
        return [from_lanes(out_grad), out_levels, from_lanes(out_query), *restored, out_space, out_group]
