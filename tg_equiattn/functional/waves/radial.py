"""Kernels as functions of the distance: what Gaussians, potentials and ripples and their derivatives multiply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...modes import transformed
from .kernels import EwaldKernels

Functions = Callable[[Tensor, int], Tensor]


class _Ladder(torch.autograd.Function):
    """Functions f_0 to f_l of t, by degree, that are each other's derivatives, df_l / dt = -f_{l+1}: of any order, at 0
    too."""

    @staticmethod
    def forward(ctx, functions: Functions, t: Tensor, lmax: int) -> Tensor:
        out = functions(t, lmax + 1)
        ctx.save_for_backward(t, out)
        ctx.functions, ctx.lmax = functions, lmax
        return out[:-1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        t, known = ctx.saved_tensors
        # what is differentiated again is evaluated again, as a function of t
        higher = _Ladder.apply(ctx.functions, t, ctx.lmax + 1) if torch.is_grad_enabled() else known
        return None, -(grad * higher[1:]).sum(0), None


def _ladder(functions: Functions, t: Tensor, lmax: int) -> Tensor:
    """With their own derivatives, but where functions have to be differentiated as they stand."""
    plain = torch.compiler.is_compiling() or transformed()
    return functions(t, lmax) if plain else _Ladder.apply(functions, t, lmax)


def boys_functions(t: Tensor, lmax: int) -> Tensor:
    r""":math:`F_l(t) = \int_0^1 u^{2 l} e^{-t u^2} du` of t >= 0, for every degree stacked before the axes of t."""
    return _ladder(_boys, t, lmax)


def _boys(t: Tensor, lmax: int) -> Tensor:
    """Near 0 the series of the highest degree, whose terms are all positive, and the recursion down; from ``edge`` on
    the error function and the recursion up. Both are differentiable as they stand."""
    edge = 1.5 + lmax
    small = t < edge
    near = torch.where(small, t, 0.0)
    exponential = (-near).exp()
    terms = [1 / (2 * lmax + 1)]  # of F_l(t) exp(t) = sum_k (2 t)^k / (2 l + 1)(2 l + 3)...(2 l + 2 k + 1)
    while terms[-1] * edge ** (len(terms) - 1) > torch.finfo(t.dtype).eps / 8 * terms[0]:  # which ``edge`` has all of
        terms.append(terms[-1] * 2 / (2 * lmax + 2 * len(terms) + 1))
    down = [exponential * _series(terms, near)]
    for degree in range(lmax, 0, -1):
        down.append((2 * near * down[-1] + exponential) / (2 * degree - 1))
    far = torch.where(small, edge, t)
    exponential, root = (-far).exp(), far.sqrt()
    up = [math.sqrt(math.pi) / 2 * torch.erf(root) / root]
    for degree in range(lmax):
        up.append(((2 * degree + 1) * up[-1] - exponential) / (2 * far))
    return torch.stack([torch.where(small, a, b) for a, b in zip(reversed(down), up, strict=True)])


def cosine_functions(y: Tensor, lmax: int) -> Tensor:
    r""":math:`C_l(y) = (-d / dy)^l \cos \sqrt{2 y}` of y >= 0, for every degree stacked before the axes of y: cosines
    and, from :math:`C_1 = \sin x / x` on, spherical Bessel functions :math:`j_{l-1}(x) / x^{l-1}`."""
    return _ladder(_cosine, y, lmax)


def _cosine(y: Tensor, lmax: int) -> Tensor:
    """Near 0 the series, from there on the recursion; both are differentiable as they stand."""
    edge = (lmax + 2) ** 2 / 2
    small = y < edge
    near, far = torch.where(small, y, 0.0), torch.where(small, edge, y)
    root = (2 * far).sqrt()
    up = [root.cos(), root.sin() / root]
    for degree in range(1, lmax):
        up.append(((2 * degree - 1) * up[-1] - up[-2]) / (2 * far))
    out = []
    for degree in range(lmax + 1):
        terms = [2.0**degree * math.factorial(degree) / math.factorial(2 * degree)]
        while abs(terms[-1]) * edge ** (len(terms) - 1) > torch.finfo(y.dtype).eps / 8 * terms[0]:
            n = len(terms) + degree
            terms.append(-terms[-1] * n / len(terms) * 2 / (2 * n * (2 * n - 1)))
        out.append(torch.where(small, _series(terms, near), up[degree]))
    return torch.stack(out)


def _series(terms: Sequence[float], t: Tensor) -> Tensor:
    """The polynomial with these coefficients, from the constant on."""
    series = torch.full_like(t, terms[-1])
    for term in reversed(terms[:-1]):
        series = series * t + term
    return series


def radial_factors(t: Tensor, kernels: EwaldKernels) -> Tensor:
    """f_l(t) of t (..., H, C, n, m), stacked over l first: of Gaussians, potentials and ripples."""
    gaussians, ripples, lmax, parts = kernels.gaussians, kernels.ripples, kernels.lmax, []
    if gaussians:
        parts.append((-t[..., :gaussians, :, :]).exp().expand(lmax + 1, *t.shape[:-3], gaussians, *t.shape[-2:]))
    if gaussians < ripples:
        parts.append(math.sqrt(2 / math.pi) * boys_functions(t[..., gaussians:ripples, :, :], lmax))
    if kernels.wavenumbers is not None:
        turns = (kernels.widths[:, ripples:] * kernels.wavenumbers).square()[..., None, None].to(t.dtype)
        some = t[..., ripples:, :, :]
        cosines, fall = cosine_functions(turns * some, lmax), (-some).exp()
        found = [
            sum((math.comb(degree, m) * turns**m * cosines[m] for m in range(degree + 1)), some.new_zeros(()))
            for degree in range(lmax + 1)
        ]
        parts.append(torch.stack(found) * fall)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -3)
