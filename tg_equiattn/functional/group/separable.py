"""Frame attention of heads without content: a grouped convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...grids import Window
from ...modes import full_precision
from .shifts import in_square, offsets_of_pairs, shifts

if TYPE_CHECKING:
    from jaxtyping import Float


def separable_attention_impl(
    value: Float[Tensor, "B heads Cv H *spatial"], space_bias: Float[Tensor, "heads H D"], window: Window
) -> Float[Tensor, "B heads Cv H *spatial"]:
    """Attention by position only: out(i, h) = sum_D softmax_D(b(h^-1 D)) v(i + D, h).

    b is ``space_bias``. ``value`` is zero outside of the image.

    Source: Cordonnier et al. (2020), Theorem 1, for attention by offsets alone; Chollet, Xception (2017), for separable
    convolutions.
    """
    spatial = value.shape[4:]
    with full_precision(value.device):
        weight = space_bias.to(torch.promote_types(space_bias.dtype, torch.float32)).softmax(-1)
    if window.kernel_size is None:
        pairs = weight[..., offsets_of_pairs(spatial, value.device)].to(value.dtype)  # (heads, |H|, N, N)
        return torch.einsum("ehij,bechj->bechi", pairs, value.flatten(4)).unflatten(-1, spatial)
    side, dim = window.kernel_size, window.dim
    weight = in_square(weight, shifts(side, window.selection, dim), side)  # zeros at the corners of a disk
    filters = weight.to(value.dtype)[:, None].expand(-1, value.shape[2], -1, -1).flatten(0, 2)
    convolve = F.conv2d if dim == 2 else F.conv3d
    x, padding = value.flatten(1, 3), side // 2
    if window.circular:
        x, padding = shifts(side, (), dim).pad(x, circular=True), 0
    out = convolve(x, filters.unflatten(1, (1, *[side] * dim)), padding=padding, groups=len(filters))
    return out.unflatten(1, value.shape[1:4])
