"""Group attention within windows in a form that compilers for accelerators fuse; see :mod:`.definition` for the sizes.

Every tensor has the axes of queries, (B, e, H, T, *spatial), followed by the axes that the softmax sums over, (S,
*window). Channels are separate tensors. A compiler fuses all sums over the same axes into one kernel and keeps scores
in registers. Backward recomputes scores twice, for gradients of queries and for gradients of keys, so that it needs no
atomic additions. On CPUs the operator is faster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...modes import full_precision
from . import hashed_dropout
from .elements import Elements
from .masks import MASKED_SCORE
from .shifts import Shifts, shifts

if TYPE_CHECKING:
    from jaxtyping import Float


def windowed_attention_fusable(
    query, key, value, offset_table, element_table, index, mask, seed, kernel_size, selection, circular, dropout
) -> tuple[Tensor, Tensor]:
    """The same as :func:`.operator.windowed_attention`, but with first derivatives only."""
    spatial, elements = query.shape[4:], Elements.of(index, query, offset_table.shape[1])
    dim, (heads, outputs, offsets) = len(spatial), offset_table.shape[:3]
    chosen, square = shifts(kernel_size, selection, dim), shifts(kernel_size, (), dim)

    def on_window(x: Tensor) -> Tensor:
        """Reshape (..., S or 1, D) to (..., 1, .., 1, S or 1, *window)."""
        x = chosen.to_square(x, -1)
        return x.reshape(*x.shape[:-2], *[1] * dim, x.shape[-2], *[kernel_size] * dim)

    queries = range(elements.queries)
    table = on_window(offset_table.movedim(-1, 0)[:, :, :, None, None])  # (C + 1, e, H, 1, 1, .., 1, 1, *window)
    argument = None
    if element_table.shape[1]:
        logits = torch.einsum("euc,becq...->bequ...", element_table[..., :-1], query)
        logits = logits + element_table[..., -1].view(1, heads, 1, -1, *[1] * dim)
        logits = logits if elements.paired else logits.unsqueeze(2)  # (B, e, Q, U, ...), or (B, e, 1, T, U, ...)
        of_t = [elements.by_key(logits if elements.paired else logits[:, :, :, t], t, 2) for t in queries]
        argument = torch.stack(of_t, 3).movedim(4, -1)[(...,) + (None,) * dim]  # (B, e, H, T, *spatial, S, 1, .., 1)
    row = column = None
    if dropout:
        weights = outputs * elements.keys * offsets
        row, column = hashed_dropout.hashes(query.shape[0] * heads * math.prod(spatial), weights, seed)
        row = row.view(-1, heads, 1, 1, *spatial)
        column = on_window(column.view(1, outputs, 1, elements.keys, offsets))
    valid = query.new_ones(1, *spatial) if mask is None else mask.to(query.dtype)
    outside = (1 - on_window(query.new_ones(1, 1, offsets))) * MASKED_SCORE
    value = value.view_as(value)  # the compiler does not accept the same tensor as two inputs
    settings = square, kernel_size, circular, dropout, elements.paired, elements.keys
    return _Windowed.apply(query, key, value, table, argument, valid, outside, row, column, *settings)


class _Windows:
    """Gathers the pixels in the window of every pixel; with ``back``, the pixels whose window contains it.

    Backward adds the terms of the indices in another order (``backward``). Otherwise the compiler would recognise them
    and save tensors of forward as large as all scores.
    """

    def __init__(self, spatial, square: Shifts, side: int, circular: bool, device, backward: bool = False) -> None:
        self.square, self.circular, self.dim, self.indices = square, circular, len(spatial), []
        for back in (False, True):
            flat: Tensor | int = 0
            for axis, n in enumerate(spatial):
                step, pixel = torch.arange(side, device=device), torch.arange(n, device=device)[:, None]
                step = 2 * square.radius - step if back else step
                along, width = step + pixel if backward else pixel + step, n + 2 * square.radius
                if circular:
                    along, width = (along - square.radius) % n, n
                shape = [1] * (2 * self.dim)
                shape[axis], shape[self.dim + axis] = n, side
                flat = flat * width + along.view(shape)
            self.indices.append(torch.as_tensor(flat))

    def padded(self, x: Tensor) -> Tensor:
        """Pad images (..., *spatial) for their windows. Channels are padded together, in one kernel."""
        return x if self.circular else self.square.pad(x)

    def around(self, x: Tensor, back: bool = False) -> Tensor:
        """Gather windows: (..., *spatial) -> (..., *spatial, *window)."""
        return self._gathered(self.padded(x), back)

    def _gathered(self, padded: Tensor, back: bool = False) -> Tensor:
        return padded.flatten(-self.dim)[..., self.indices[int(back)]]  # torch 2.11 compiles no bool

    def of_queries(self, x: Tensor, back: bool = False) -> Tensor:
        """Add the axes of sums to features of queries: (..., *spatial) -> (..., *spatial, 1, 1, .., 1), or (...,
        *spatial, 1, *window) if ``back``."""
        return self.around(x, back).unsqueeze(-1 - self.dim) if back else x[(...,) + (None,) * (1 + self.dim)]

    def of_keys(self, x: Tensor, own: bool, back: bool = False) -> Tensor:
        """Add the axes of sums to :meth:`padded` features of keys: (B, e, K, *spatial) -> (B, e, H or 1, 1, *spatial, 1
        or S, *window). If ``back``, features are not padded, and the axes of the window have size 1."""
        x = x[(...,) + (None,) * self.dim] if back else self._gathered(x)
        return x.unsqueeze(3).unsqueeze(-1 - self.dim) if own else x.movedim(2, -1 - self.dim)[:, :, None, None]


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(
        query, key, value, table, argument, valid, outside, row, column, square, side, circular, dropout, paired, keys
    ):  # fmt: skip
        at, own, axes = _Windows(query.shape[4:], square, side, circular, query.device), keys == 1, _axes(query)
        scores = table[-1] + outside + (1 - at.around(valid)).unsqueeze(-1 - at.dim)[:, None, None, None] * MASKED_SCORE
        scores = scores if argument is None else scores + argument
        for one, other, rho in zip(_queries(query, paired), at.padded(key).unbind(2), table[:-1].unbind(), strict=True):
            scores = scores + at.of_queries(one) * (at.of_keys(other, own) + rho)
        top = scores.amax(axes, keepdim=True)
        weight = (scores - top).exp()
        total = weight.sum(axes)
        if dropout:
            weight = weight * hashed_dropout.keep(at.of_queries(row), column, dropout, weight.dtype)
        out = [(weight * at.of_keys(other, own)).sum(axes) / total for other in at.padded(value).unbind(2)]
        return torch.stack([x.sum(3) for x in out], 2), total.log() + top.flatten(-1 - at.dim).squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:9], *output)
        ctx.settings = inputs[9:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor):
        query, key, value, table, argument, valid, outside, row, column, out, lse = ctx.saved_tensors
        square, side, circular, dropout, paired, keys = ctx.settings
        at = _Windows(query.shape[4:], square, side, circular, query.device, backward=True)
        own, axes, rho = keys == 1, _axes(query), table[:-1].unbind()
        window_axes = axes[1:]
        given = [x.unsqueeze(3) for x in grad.unbind(2)]  # (B, e, H, 1, *spatial)

        def summed(terms: list[Tensor], over: tuple[int, ...], shape: torch.Size) -> Tensor:
            return torch.stack([x.sum(over) for x in terms], 2).view(shape)

        # Gradients of queries and tables: sums over the keys in each window.
        seen = [at.of_keys(other, own) + r for other, r in zip(at.padded(key).unbind(2), rho, strict=True)]
        scores = table[-1] + outside + (1 - at.around(valid)).unsqueeze(-1 - at.dim)[:, None, None, None] * MASKED_SCORE
        scores = (scores if argument is None else scores + argument) - at.of_queries(lse)
        for one, other in zip(_queries(query, paired), seen, strict=True):
            scores = scores + at.of_queries(one) * other
        slope = torch.zeros_like(scores)
        for one, other in zip(given, at.padded(value).unbind(2), strict=True):
            slope = slope + at.of_queries(one) * at.of_keys(other, own)
        if dropout:
            slope = slope * hashed_dropout.keep(at.of_queries(row), column, dropout, query.dtype)
        weight = scores.exp()
        several = lse.shape[3] > 1  # each output is a sum over t
        mean = ((weight * slope).sum(axes) if several else (grad * out).sum(2).unsqueeze(3)) - grad_lse
        slope = (slope - at.of_queries(mean)) * weight
        to_query = summed([slope * other for other in seen], axes if paired else (2, *axes), query.shape)
        to_argument = None if argument is None else slope.sum(window_axes, keepdim=True)
        with full_precision(query.device):
            logits = slope.sum(axes[0]).flatten(-at.dim).flatten(4, -2)  # (B, e, H, T, pixels, D)
            q = query.transpose(2, 3).flatten(4)  # (B, e, Q, C, pixels)
            q = q.unsqueeze(3) if paired else q.unsqueeze(2)
            to_rho = torch.matmul(q, logits).sum((0, 3)).movedim(-2, 0)
        to_table = torch.cat([to_rho, logits.sum((0, 3, 4))[None]]).view(table.shape)

        # Gradients of keys and values: sums over the pixels whose window contains a key.
        queries = [at.of_queries(x, back=True) for x in _queries(query, paired)]
        grads = [at.of_queries(x, back=True) for x in given]
        inside = at.around(valid.new_ones(1, *query.shape[4:]), back=True) + valid[(...,) + (None,) * at.dim] - 1
        masked = (1 - inside).unsqueeze(-1 - at.dim)[:, None, None, None] * MASKED_SCORE
        scores = table[-1] + outside + masked - at.of_queries(lse, back=True)
        if argument is not None:
            logits = argument.flatten(-1 - at.dim).movedim(-1, 4)  # (B, e, H, T, S, *spatial)
            scores = scores + at.around(logits, back=True).movedim(4, -1 - at.dim)
        for one, other, r in zip(queries, key.unbind(2), rho, strict=True):
            scores = scores + one * (at.of_keys(other, own, back=True) + r)
        weight, slope = scores.exp(), torch.zeros_like(scores)
        for one, other in zip(grads, value.unbind(2), strict=True):
            slope = slope + one * at.of_keys(other, own, back=True)
        kept = weight
        if dropout:
            keep = hashed_dropout.keep(at.of_queries(row, back=True), column, dropout, query.dtype)
            slope, kept = slope * keep, weight * keep
        slope = (slope - at.of_queries(mean, back=True)) * weight
        over = (3, *axes) if own and key.shape[3] > 1 else (2, 3, *window_axes)

        def of_keys(terms: list[Tensor], shape: torch.Size) -> Tensor:
            found = torch.stack([x.sum(over) for x in terms], 2)
            return (found if own else found.movedim(-1, 3)).reshape(shape)

        to_key = of_keys([slope * x for x in queries], key.shape)
        to_value = of_keys([kept * x for x in grads], value.shape)
        return to_query, to_key, to_value, to_table, to_argument, *[None] * 10


def _axes(query: Tensor) -> tuple[int, ...]:
    """The axes (S, *window) that scores are summed over."""
    return tuple(range(3 - query.ndim, 0))


def _queries(query: Float[Tensor, "B e C Q *spatial"], paired: bool) -> list[Float[Tensor, "B e #H #T *spatial"]]:
    """The channels of queries. T is 1 for ``paired`` queries, and H is 1 for others."""
    return [x.unsqueeze(3) if paired else x.unsqueeze(2) for x in query.unbind(2)]
