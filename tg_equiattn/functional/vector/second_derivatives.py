r"""Second derivatives of vector self-attention, some queries at a time.

A backward pass maps q, k, v and the gradient g of the output y to gradients of q, k and v. Its own backward pass, given
directions dq, dk, dv, differentiates the change of <g, y> along these directions. With c = q x k, s = scale |c| and
D_ij = <g_i, c_ij x v_j>, and with d in front of a letter for its change,

    d<g, y> = sum_ij p_ij (D ds + dD) - sum_i h_i m_i,     h_i = sum_j p_ij D_ij,    m_i = sum_j p_ij ds_ij

D_ij = <G_i, w_j> is a product of two matrices: of g and q, and of k and v.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import full_precision
from ..backend import tile_numbers
from .matrices import gradient_of_matrix, outer, times, times_without_trace
from .plain_attention import valid_tokens

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_TILE_PAIRS = 1 << 16  # pairs of a tile on a CPU; about 30 numbers are formed for each


def vector_second_derivatives(
    q: Float[Tensor, "groups tokens 3"],
    k: Float[Tensor, "groups tokens 3"],
    v: Float[Tensor, "groups tokens 3"],
    grad: Float[Tensor, "groups tokens 3"],
    lengths: Int[Tensor, " groups"] | None,
    scale: Float[Tensor, " groups"],
    directions: Sequence[Float[Tensor, "groups tokens 3"] | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and g from the directions dq, dk and dv; ``None`` means zero."""
    dq, dk, dv = (torch.zeros_like(q) if x is None else x for x in directions)
    groups, length, _ = q.shape
    valid = valid_tokens(lengths, length)
    with full_precision(q.device):
        queries = torch.cat([_left(dq), _left(q)], -1), _rows(gradient_of_matrix(grad, q), gradient_of_matrix(grad, dq))
        keys = torch.cat([_right(k), _right(dk)], -1), _rows(outer(k, v), outer(dk, v) + outer(k, dv))
        to_left, to_right = torch.zeros_like(queries[0][..., :2]), torch.zeros_like(keys[0][..., :2])
        to_mixed, to_outer = torch.zeros_like(queries[1]), torch.zeros_like(keys[1])
        budget = tile_numbers(q.device, _TILE_PAIRS, 30)
        some = max(1, min(length, budget // max(1, length)))
        together = max(1, budget // max(1, some * length))
        for g, a in itertools.product(range(0, groups, together), range(0, length, some)):
            here, block = slice(g, g + together), slice(a, a + some)
            left, mixed, right, matrices = _tile(
                (queries[0][:, here, block], queries[1][here, block]),
                (keys[0][:, here], keys[1][here]),
                q[here, block].square().sum(-1)[..., None] * k[here].square().sum(-1)[:, None],
                None if valid is None else valid[here, None],
                scale[here, None, None],
            )
            to_left[:, here, block], to_mixed[here, block] = left, mixed
            to_right[:, here] += right
            to_outer[here] += matrices
        to_g, to_dg = (x.unflatten(-1, (3, 3)) for x in to_mixed.split(9, -1))
        to_w, to_dw = (x.unflatten(-1, (3, 3)) for x in to_outer.split(9, -1))
        grad_q = _left_adjoint(to_left) + times_without_trace(to_g.mT, grad)
        grad_grad = times_without_trace(to_g, q) + times_without_trace(to_dg, dq)
        grad_k = _right_adjoint(to_right) + times(to_w, v) + times(to_dw, dv)
        grad_v = times(to_w.mT, k) + times(to_dw.mT, dk)
        return grad_q, grad_k, grad_v, grad_grad


def _tile(
    queries: tuple[Float[Tensor, "3 groups some 4"], Float[Tensor, "groups some 18"]],
    keys: tuple[Float[Tensor, "3 groups tokens 4"], Float[Tensor, "groups tokens 18"]],
    sizes: Float[Tensor, "groups some tokens"],
    valid: Bool[Tensor, "groups 1 tokens"] | None,
    scale: Float[Tensor, "groups 1 1"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the operands of some queries, and the terms of these queries in the gradients of the operands of all
    keys."""
    (left, mixed), (right, outer) = queries, keys
    (left_dq, left_q), (right_k, right_dk) = left.split(2, -1), right.split(2, -1)
    cross, d_cross = left_q @ right_k.mT, left @ right.mT
    square = cross.square().sum(0)
    # The cross product of parallel q and k is rounding, of any direction, and must have no derivative.
    differ = square > (4 * torch.finfo(square.dtype).eps) ** 2 * sizes
    inverse = torch.where(differ, torch.where(differ, square, 1.0).rsqrt(), 0.0)
    score = scale * square * inverse
    if valid is not None:
        score = score.masked_fill(~valid, torch.finfo(score.dtype).min)
    p = score.softmax(-1)
    along = (cross * d_cross).sum(0) * inverse
    d_score = scale * along
    (g, dg), (w, dw) = mixed.split(9, -1), outer.split(9, -1)
    change = g @ w.mT
    spread = change - (p * change).sum(-1, keepdim=True)
    m = (p * d_score).sum(-1, keepdim=True)
    twice = spread * d_score + mixed @ torch.cat([dw, w], -1).mT - m * change
    slope = scale * inverse * p * spread
    slope_twice = scale * inverse * p * (twice - (p * twice).sum(-1, keepdim=True))
    to_d_cross = cross * slope
    to_cross = cross * (slope_twice - slope * inverse * along) + d_cross * slope
    dp = p * (d_score - m)
    return (
        to_cross @ right_k + to_d_cross @ right_dk,
        torch.cat([dp @ w + p @ dw, p @ w], -1),
        to_cross.mT @ left_q + to_d_cross.mT @ left_dq,
        torch.cat([dp.mT @ g + p.mT @ dg, p.mT @ g], -1),
    )


def _left(q: Float[Tensor, "groups tokens 3"]) -> Float[Tensor, "3 groups tokens 2"]:
    """Factors of q in the components of cross products: (q x k)_x = q_y k_z - q_z k_y, and so on."""
    return torch.stack([q.roll(-1, -1), q.roll(1, -1)], -1).movedim(-2, 0)


def _right(k: Float[Tensor, "groups tokens 3"]) -> Float[Tensor, "3 groups tokens 2"]:
    """Factors of k in the components of cross products."""
    return torch.stack([k.roll(1, -1), -k.roll(-1, -1)], -1).movedim(-2, 0)


def _left_adjoint(grad: Float[Tensor, "3 groups tokens 2"]) -> Float[Tensor, "groups tokens 3"]:
    first, second = grad.movedim(0, -2).unbind(-1)
    return first.roll(1, -1) + second.roll(-1, -1)


def _right_adjoint(grad: Float[Tensor, "3 groups tokens 2"]) -> Float[Tensor, "groups tokens 3"]:
    first, second = grad.movedim(0, -2).unbind(-1)
    return first.roll(-1, -1) - second.roll(1, -1)


def _rows(*matrices: Float[Tensor, "groups tokens 3 3"]) -> Float[Tensor, "groups tokens width"]:
    return torch.cat([matrix.flatten(-2) for matrix in matrices], -1)
