"""Attention through kernels as they stand, over all pairs of each graph."""

from __future__ import annotations

import torch
from torch import Tensor

from ...encodings.harmonics import solid_harmonics
from .kernels import Product, radial_factors


def pair_sums(
    pos_i: Tensor, query: Tensor, pos: Tensor, key: Tensor, value: Tensor, widths: Tensor, gains: Tensor,
    gaussians: int, product: Product,
) -> Tensor:  # fmt: skip
    """Sums over all nodes of each graph for some of them, exactly.

    Args:
        pos_i, query: ``(B, n, 3)``, ``(B, n, H, C, A)``, of those that attend.
        pos, key, value: ``(B, N, 3)``, ``(B, N, H, C, A)``, ``(B, N, H, V)``, of those attended to, zeros for padding.
        widths, gains: ``(H, C)``, ``(H, C, lmax + 1)``, of the kernels.
        gaussians: how many are Gaussians.

    Returns:
        ``(B, n, H, E)``.
    """
    apart = pos_i[:, :, None] - pos[:, None]  # B, n, N, 3
    lmax, width = gains.shape[2] - 1, widths[..., None, None]  # H, C, 1, 1
    t = apart.square().sum(3)[:, None, None] / (2 * width.square())
    factors = radial_factors(t, gaussians, lmax)  # L, B, H, C, n, N
    scores = query.permute(0, 2, 3, 1, 4) @ key.permute(0, 2, 3, 4, 1)  # B, H, C, n, N
    harmonics = solid_harmonics(apart, lmax).movedim(3, 1)[:, None]  # B, 1, harmonics, n, N
    value = value.movedim(2, 1)[:, :, None]  # B, H, 1, N, V
    out = []
    for degree in range(lmax + 1):
        gain = gains[..., degree, None, None] / (-width) ** degree
        weight = (scores * factors[degree] * gain).sum(2)[:, :, None]
        sums = (weight * harmonics[:, :, degree**2 : (degree + 1) ** 2]) @ value  # B, H, 2 l + 1, n, V
        unit = torch.eye(sums.shape[2], dtype=sums.dtype, device=sums.device)[:, None]
        out.append(product(sums.permute(0, 3, 2, 1, 4), unit, degree).sum(2))
    return sum(out[1:], out[0])
