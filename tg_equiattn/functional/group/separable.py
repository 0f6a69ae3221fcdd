"""Frame and lifting attention of heads without content: a grouped convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...grids import Window
from ...modes import full_precision
from .shifts import offsets_of_pairs, shifts

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def separable_attention_impl(
    value: Float[Tensor, "B heads Cv T *spatial"], space_bias: Float[Tensor, "heads H D"], window: Window
) -> Float[Tensor, "B heads Cv H *spatial"]:
    """Attention by position only: out(i, h) = sum_D softmax_D(b(h^-1 D)) v(i + D, h).

    b is ``space_bias``. ``value`` is zero outside of the image. It has T = H elements, or one for lifting.

    Source: Cordonnier et al. (2020), Theorem 1, for attention by offsets alone; Chollet, Xception (2017), for separable
    convolutions.
    """
    spatial, channels, elements = value.shape[4:], value.shape[2], space_bias.shape[1]
    if window.kernel_size is None:
        pairs = _weights(space_bias)[..., offsets_of_pairs(spatial, value.device)].to(value.dtype)
        every = value.flatten(4).expand(-1, -1, -1, elements, -1)
        return torch.einsum("ehij,bechj->bechi", pairs, every).unflatten(-1, spatial)
    filters = _filters(_weights(space_bias)[:, None].expand(-1, channels, -1, -1).flatten(0, 2)[:, None], window)
    out = _convolve(value.flatten(1, 3), filters, window, groups=value.shape[1] * channels * value.shape[3])
    return out.unflatten(1, (-1, channels, elements))


def lifting_by_position_impl(
    x: Float[Tensor, "B in *spatial"], valid: Bool[Tensor, "#B *spatial"] | None,
    value_weight: Float[Tensor, "e Cv in"], value_bias: Float[Tensor, "e Cv"], out_weight: Float[Tensor, "out e Cv"],
    out_bias: Float[Tensor, " out"], space_bias: Float[Tensor, "e H D"], window: Window,
) -> Float[Tensor, "B out H *spatial"]:  # fmt: skip
    """Lifting attention of heads without content, with the projections before and after it: one convolution.

    Its filters are sums over heads of products of the projections and the weights of offsets. ``x`` is zero at pixels
    that are not ``valid``.
    """
    valid = x.new_ones(1, *x.shape[2:]) if valid is None else valid.to(x.dtype)
    x = torch.cat([x, valid[:, None].expand(x.shape[0], 1, *x.shape[2:])], 1)  # the last channel multiplies value_bias
    with full_precision(x.device):
        values = torch.cat([value_weight, value_bias[..., None]], -1)
        maps = torch.bmm(out_weight.transpose(0, 1), values).flatten(1)  # (e, out in)
        filters = maps.mT @ _weights(space_bias).to(values.dtype).flatten(1)
    elements = space_bias.shape[1]
    filters = filters.view(len(out_bias), -1, elements, space_bias.shape[2]).transpose(1, 2).flatten(0, 1)
    bias = out_bias[:, None].expand(-1, elements).flatten()
    return _convolve(x, _filters(filters, window), window, bias=bias).unflatten(1, (-1, elements))


def _weights(space_bias: Tensor) -> Tensor:
    """Softmax weights of offsets."""
    with full_precision(space_bias.device):
        return space_bias.to(torch.promote_types(space_bias.dtype, torch.float32)).softmax(-1)


def _filters(x: Float[Tensor, "n C D"], window: Window) -> Float[Tensor, "n C *sides"]:
    """Place values of offsets in a square, with zeros at the corners of a disk."""
    side, dim = cast(int, window.kernel_size), window.dim
    return shifts(side, window.selection, dim).to_square(x, -1).unflatten(-1, [side] * dim)


def _convolve(x: Tensor, filters: Tensor, window: Window, groups: int = 1, bias: Tensor | None = None) -> Tensor:
    """Convolve images with filters, with zeros or the opposite side of the image beyond its border."""
    side = cast(int, window.kernel_size)
    padding = side // 2
    if window.circular:
        x, padding = shifts(side, (), window.dim).pad(x, circular=True), 0
    convolve = F.conv2d if window.dim == 2 else F.conv3d
    bias = None if bias is None else bias.to(x.dtype)
    return convolve(x, filters.to(x.dtype), bias, padding=padding, groups=groups)
