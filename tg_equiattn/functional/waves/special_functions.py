"""Boys functions and their derivatives of any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...modes import cached, runs_eagerly

if TYPE_CHECKING:
    from jaxtyping import Float


class _Ladder(torch.autograd.Function):
    """Boys functions F_0 to F_l of t, with dF_l / dt = -F_{l+1}. Forward computes one more degree, which backward uses.

    Backward calls this function with one more degree, so it has derivatives of any order, also at t = 0; a registered
    operator would need one more operator for each order.
    """

    @staticmethod
    def forward(ctx, t: Tensor, lmax: int) -> Tensor:
        out = _boys(t, lmax + 1)
        ctx.save_for_backward(t, out)
        ctx.lmax = lmax
        return out[:-1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        t, known = ctx.saved_tensors
        # to be differentiated again, slopes have to be a function of t in autograd's graph
        slopes = _Ladder.apply(t, ctx.lmax + 1) if torch.is_grad_enabled() else known
        return -(grad * slopes[1:]).sum(0), None


def boys_functions(t: Float[Tensor, "*shape"], lmax: int) -> Float[Tensor, "degrees ..."]:
    r""":math:`F_l(t) = \int_0^1 u^{2 l} e^{-t u^2} du` for t >= 0, of degrees 0 to ``lmax``. Compilers and transforms
    get plain operations."""
    return _Ladder.apply(t, lmax) if runs_eagerly() else _boys(t, lmax)


def _boys(t: Float[Tensor, "*shape"], lmax: int) -> Float[Tensor, "degrees ..."]:
    """Boys functions in operations that autograd can differentiate: below ``edge`` the series of the highest degree,
    whose terms are all positive, and the recursion down; above it the error function and the recursion up."""
    edge = 1.5 + lmax
    small = t < edge
    near, far, exponential = t.clamp(max=edge), t.clamp(min=edge), (-t).exp()
    terms = [1 / (2 * lmax + 1)]  # F_l(t) exp(t) = sum_k (2 t)^k / (2 l + 1)(2 l + 3)...(2 l + 2 k + 1)
    while terms[-1] * edge ** (len(terms) - 1) > torch.finfo(t.dtype).eps / 8 * terms[0]:
        terms.append(terms[-1] * 2 / (2 * lmax + 2 * len(terms) + 1))
    down = [exponential * _polynomial(terms, near)]
    for degree in range(lmax, 0, -1):
        scaled = exponential if degree == 1 else exponential / (2 * degree - 1)
        down.append(torch.addcmul(scaled, near, down[-1], value=2 / (2 * degree - 1)))
    root, inverse = far.sqrt(), -0.5 / far
    up = [math.sqrt(math.pi) / 2 * torch.erf(root) / root]
    for degree in range(lmax):
        up.append(torch.sub(exponential, up[-1], alpha=2 * degree + 1) * inverse)
    return torch.where(small, torch.stack(down[::-1]), torch.stack(up))


def _polynomial(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """The polynomial with these coefficients, the constant first, by Horner's rule."""
    *others, first, second = _constants(tuple(coefficients), t.dtype, t.device)
    out = first + t * second
    for coefficient in reversed(others):
        out = torch.addcmul(coefficient, out, t)
    return out


@cached(64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of single numbers, made on the device, so that CUDA does not wait for a copy."""
    return tuple(torch.full((), value, dtype=dtype, device=device) for value in values)
