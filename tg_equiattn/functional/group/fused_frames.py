"""Attention of group elements in their own frames within windows, as compilers for accelerators fuse it.

Every tensor has the axes of queries (B, e, H, *spatial) and behind them those of the window, and channels are written
out one by one: a compiler makes one kernel of all that is summed over the same axes, and scores stay in registers.
Backward makes scores again, from the queries' side and from the keys': nothing is added up where several threads write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...modes import full_precision
from . import hashed_dropout
from .plan import HIDDEN
from .window import Window, in_square, window


def fused_frame_attention(
    query, key, value, table, mask, seed, kernel_size, selection, circular, dropout
) -> tuple[Tensor, Tensor]:
    """As :func:`.frame_windows.frame_attention_op`, once differentiable."""
    spatial, (heads, elements, count) = query.shape[4:], table.shape[:3]
    places, square = window(kernel_size, selection, len(spatial)), window(kernel_size, (), len(spatial))
    column = row = None
    if dropout:
        row, column = hashed_dropout.places(query.shape[0] * heads * spatial.numel(), elements * count, seed)
        row, column = row.view(-1, heads, 1, *spatial), _square(column.view(1, elements, count), places, kernel_size)
    table = _square(table.movedim(-1, 0), places, kernel_size)  # (C + 1, e, H, 1, .., 1, *window)
    value = value.view_as(value)  # a compiler takes no tensor twice
    missing = _missing(query, mask, places, kernel_size, count)
    return _Frames.apply(query, key, value, table, *missing, row, column, square, kernel_size, circular, dropout)


def _missing(query: Tensor, mask: Tensor | None, places: Window, side: int, count: int) -> tuple[Tensor, Tensor]:
    """1 where there are pixels, else 0; the score of what is outside of the window, else 0."""
    there = query.new_ones(1, *query.shape[4:]) if mask is None else mask.to(query.dtype)
    return there, (1 - _square(query.new_ones(1, 1, count), places, side)) * HIDDEN


def fused_relative_attention(
    query, key, value, rho_space, rho_group, index, space_bias, group_bias, mask, kernel_size, selection, circular
) -> tuple[Tensor, Tensor]:
    """:func:`.attention.checked_group_attention` with an ``index`` (H, H) of u = h^-1 s, without dropout: frames of
    each u in turn, with keys of the elements s = h u, merged by the sums of their exponentials."""
    dim, count = query.ndim - 4, rho_space.shape[1]
    places, square = window(kernel_size, selection, dim), window(kernel_size, (), dim)
    missing = _missing(query, mask, places, kernel_size, count)
    members = index.argsort(-1)  # s of each (h, u)
    queries, outs, levels = members.argsort(0), [], []  # h of each (s, u)
    for u in range(len(index)):
        rho = rho_space[:, :, u] if rho_group is None else rho_space + rho_group[u]
        bias = rho.new_zeros(query.shape[1], *rho.shape[:2])
        if space_bias is not None:
            bias = bias + space_bias
        if group_bias is not None:
            bias = bias + group_bias[:, u, None, None]
        table = torch.cat([rho.movedim(-1, 0)[:, None].expand(-1, len(bias), -1, -1), bias[None]])
        table = _square(table, places, kernel_size)
        k, v = (_Permuted.apply(x, members[:, u], queries[:, u]) for x in (key, value))
        out, level = _Frames.apply(query, k, v, table, *missing, None, None, square, kernel_size, circular, 0.0)
        outs.append(out)
        levels.append(level)
    total = torch.stack(levels).logsumexp(0)
    shares = [(level - total).exp().unsqueeze(2) for level in levels]
    return torch.stack([share * out for share, out in zip(shares, outs, strict=True)]).sum(0), total


class _Permuted(torch.autograd.Function):
    """Elements in another order, whose inverse is ``back``."""

    @staticmethod
    def forward(x, order, back):
        return x.index_select(3, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(3, ctx.saved_tensors[1]), None, None


def _square(x: Tensor, places: Window, side: int) -> Tensor:
    """What belongs to the places of a window (..., D) in the square around it: (..., 1, .., 1, *window)."""
    return in_square(x, places, side).reshape(*x.shape[:-1], *[1] * places.dim, *[side] * places.dim)


class _Windows:
    """What windows around every pixel hold; with ``back``, what the pixels in whose windows it stands do. In backward
    it is written the other way round (``again``): compilers keep from forward what looks alike, all scores' size."""

    def __init__(
        self, spatial: torch.Size, places: Window, side: int, circular: bool, device: torch.device, again: bool = False
    ) -> None:
        self.places, self.circular, self.dim = places, circular, len(spatial)
        self.indices: list[Tensor] = []
        for back in (False, True):
            flat: Tensor | int = 0
            for axis, n in enumerate(spatial):
                step, pixel = torch.arange(side, device=device), torch.arange(n, device=device)[:, None]
                step = 2 * places.radius - step if back else step
                along, width = step + pixel if again else pixel + step, n + 2 * places.radius
                if circular:
                    along, width = (along - places.radius) % n, n
                shape = [1] * (2 * self.dim)
                shape[axis], shape[self.dim + axis] = n, side
                flat = flat * width + along.view(shape)
            self.indices.append(torch.as_tensor(flat))

    def _flat(self, x: Tensor) -> Tensor:
        """What indices are of: pixels and, unless they go round, zeros about them."""
        return (x if self.circular else self.places.pad(x)).flatten(-self.dim)

    def __call__(self, x: Tensor, back: bool = False) -> Tensor:
        """(..., *spatial) to (..., *spatial, *window)."""
        return self._flat(x)[..., self.indices[back]]

    def channels(self, x: Tensor, back: bool = False) -> list[Tensor]:
        return [channel[..., self.indices[back]] for channel in self._flat(x).unbind(2)]

    def pixels(self, x: Tensor) -> Tensor:
        """(..., *spatial) to (..., *spatial, 1, .., 1)."""
        return x[(...,) + (None,) * self.dim]


class _Frames(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, table, there, absent, row, column, places, side, circular, dropout):
        at = _Windows(query.shape[4:], places, side, circular, query.device)
        window_axes = tuple(range(-at.dim, 0))
        scores = table[-1] + absent + ((1 - at(there)) * HIDDEN)[:, None, None]
        for one, other, rho in zip(query.unbind(2), at.channels(key), table[:-1].unbind(), strict=True):
            scores = scores + at.pixels(one) * (other + rho)
        top = scores.amax(window_axes, keepdim=True)
        weight = (scores - top).exp()
        total = weight.sum(window_axes)
        if dropout:
            weight = weight * hashed_dropout.keep(at.pixels(row), column, dropout, weight.dtype)
        out = torch.stack([(weight * other).sum(window_axes) / total for other in at.channels(value)], 2)
        return out, total.log() + top.flatten(-at.dim).squeeze(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:8], *output)
        ctx.settings = inputs[8:]

    @staticmethod
    def backward(ctx, grad, grad_level):
        query, key, value, table, there, absent, row, column, out, level = ctx.saved_tensors
        places, side, circular, dropout = ctx.settings
        at = _Windows(query.shape[4:], places, side, circular, query.device, again=True)
        elements, window_axes = table.shape[2], tuple(range(-at.dim, 0))
        over = window_axes if query.shape[3] == elements else (2, *window_axes)  # lifting: of all output elements
        mean = (grad * out).sum(2) - grad_level
        rho = table[:-1].unbind()

        def summed(terms: list[Tensor]) -> Tensor:
            found = [x.sum(over, keepdim=True).flatten(-at.dim).squeeze(-1) for x in terms]
            return torch.stack(found, 2)

        # From the queries' side.
        keys = [other + r for other, r in zip(at.channels(key), rho, strict=True)]
        scores = table[-1] + absent + ((1 - at(there)) * HIDDEN)[:, None, None] - at.pixels(level)
        for one, other in zip(query.unbind(2), keys, strict=True):
            scores = scores + at.pixels(one) * other
        slope: Tensor | float = 0.0
        for one, other in zip(grad.unbind(2), at.channels(value), strict=True):
            slope = slope + at.pixels(one) * other
        if dropout:
            slope = slope * hashed_dropout.keep(at.pixels(row), column, dropout, query.dtype)
        slope = (slope - at.pixels(mean)) * scores.exp()
        to_query = summed([slope * other for other in keys])
        with full_precision(query.device):
            logits = slope.flatten(-at.dim).flatten(3, -2)  # (B, e, H, pixels, D)
            queries = query.transpose(2, 3).flatten(4)  # (B, e, T, C, pixels)
            to_rho = torch.matmul(queries, logits).sum(0).permute(2, 0, 1, 3)  # (C, e, H, D)
        to_table = torch.cat([to_rho, logits.sum((0, 3))[None]]).view(table.shape)

        # From the keys' side: a pixel is in the windows of those its offsets lead back to.
        queries, grads = at.channels(query, back=True), at.channels(grad, back=True)
        lost = 2 - at(there.new_ones(1, *query.shape[4:]), back=True) - at.pixels(there)  # outside, or hidden
        scores = table[-1] + absent + (lost * HIDDEN)[:, None, None] - at(level, back=True)
        for one, other, r in zip(queries, key.unbind(2), rho, strict=True):
            scores = scores + one * (at.pixels(other) + r)
        weight, slope = scores.exp(), 0.0
        for one, other in zip(grads, value.unbind(2), strict=True):
            slope = slope + one * at.pixels(other)
        kept = weight
        if dropout:
            keep = hashed_dropout.keep(at(row, back=True), column, dropout, query.dtype)
            slope, kept = slope * keep, weight * keep
        slope = (slope - at(mean, back=True)) * weight
        to_key, to_value = summed([slope * one for one in queries]), summed([kept * one for one in grads])
        return to_query, to_key, to_value, to_table, *[None] * 8
