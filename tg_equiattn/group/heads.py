"""Outputs of attention heads, without checks: within a window, over all pixels, and by position alone.

Operands are finite at masked pixels, and outputs are not masked. ``key_mask`` is true at valid keys. Queries without a
valid key have the output zero. Queries are already multiplied by the scale of scores, :math:`1/\\sqrt{C}`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import hashed_dropout
from ..grids import Window, centred_positions, longest
from ..linear.linear_attention import Inputs, complete_lse, feature_attention
from ..operators import by_operator, is_small
from ..shapes import Bool, Float, Int
from ..softmax_attention import merge_attentions, softmax_attention, softmax_attention_of_heads
from ..torch_state import by_form, full_precision
from .definition import windowed_attention_definition
from .dense import dense_attention
from .encodings import RotaryEncoding, rotated
from .windowed import windowed_attention
from .windows import MASKED_SCORE, offsets_of_pairs, shifts, zero_where_masked


class Terms(NamedTuple):
    """Terms of scores beside the products of queries and keys; ``None`` stands for zeros.

    ``element_index`` holds the element u of each output, query and key element. ``None`` means frame attention, or
    lifting attention if queries, keys and values have one element.
    """

    offset_encoding: Float[Tensor, "H D C"] | None
    element_encoding: Float[Tensor, "U C"] | None = None
    space_bias: Float[Tensor, "heads H D"] | None = None
    group_bias: Float[Tensor, "heads U"] | None = None
    element_index: Int[Tensor, "H T S"] | Int[Tensor, "H S"] | None = None

    def split(self, counts: list[int]) -> list[Terms]:
        """The terms of consecutive offsets, as many as the counts are."""
        encodings, biases = (
            [None] * len(counts) if x is None else x.split(counts, axis)
            for x, axis in ((self.offset_encoding, 1), (self.space_bias, 2))
        )
        return [self._replace(offset_encoding=x, space_bias=y) for x, y in zip(encodings, biases, strict=True)]


def attention_of_heads(
    query: Float[Tensor, "B heads C Q *spatial"], key: Float[Tensor, "B heads C K *keys"],
    value: Float[Tensor, "B heads Cv K *keys"], terms: Terms, window: Window,
    key_mask: Bool[Tensor, "#B *keys"] | None = None, dropout: float = 0.0, plain: bool = False, step: int = 1,
) -> tuple[Float[Tensor, "B heads Cv H *spatial"], Float[Tensor, "B heads H *spatial"] | None]:  # fmt: skip
    """Attention by the formula of :mod:`.definition`, and the log-sum-exps of the scores of each query.

    Log-sum-exps are ``(B, heads, |H|, |H|, *spatial)`` with a sum over t, and ``None`` for a global window. With a
    global window, keys may lie on another grid if no term depends on offsets. Neighbouring offsets of a window are
    ``step`` pixels apart.
    """
    dtype, kind = torch.promote_types(query.dtype, torch.float32), value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    offset_encoding, element_encoding, space_bias, group_bias, index = terms
    seed = hashed_dropout.draw_seed(dropout, query.device) if dropout else None
    rows = next((x.shape[-axis] for x, axis in ((element_encoding, 2), (group_bias, 1)) if x is not None), 0)
    elements = _table(query, (rows,), element_encoding, group_bias)
    if window.is_global:
        flat = None if key_mask is None else key_mask.flatten(1)
        if seed is None and not (plain or rows or space_bias is not None or offset_encoding is not None):
            out = _by_content(query, key.flatten(4), value.flatten(4), index, flat)
        else:
            outputs = next((len(x) for x in (offset_encoding, index) if x is not None), query.shape[3])
            rho = query.new_zeros(outputs, 0, query.shape[2]) if offset_encoding is None else offset_encoding.to(dtype)
            bias = query.new_zeros(query.shape[1], outputs, 0) if space_bias is None else space_bias.to(dtype)
            operands = query, key.flatten(4), value.flatten(4), rho, bias, elements, index, flat, seed, dropout
            out = dense_attention(*operands, plain=plain)
        return zero_where_masked(out, None if flat is None else flat.any(1)).to(kind), None
    offsets = _table(query, cast(Tensor, offset_encoding).shape[:2], offset_encoding, space_bias)
    # The definition keeps the products of queries and encodings in memory, and all scores for a backward pass.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    others = () if index is None else index.shape[1 : None if recorded else -1]
    numbers = query.shape[0] * math.prod((*offsets.shape[:-1], *query.shape[4:], *others))
    small = is_small(query, numbers // 8 if recorded else numbers)  # tiles are computed again in backward
    by_tiles = not small and by_operator(query, numbers // 4, plain)
    attend = windowed_attention if by_tiles else windowed_attention_definition
    out, lse = attend(query, key, value, offsets, elements, index, key_mask, seed, window, dropout, step)
    # A query without a valid key has the score MASKED_SCORE for each key. Attention gives it an average of masked
    # values, and its backward cannot tell how many there are: the fill removes both. All heads and elements of a pixel
    # have the same keys.
    out = zero_where_masked(out, None if key_mask is None else lse[:, 0, 0, 0] > MASKED_SCORE / 2)
    return out.to(kind), lse.squeeze(3)


def _by_content(
    query: Float[Tensor, "B heads C Q *spatial"], key: Float[Tensor, "B heads C K M"],
    value: Float[Tensor, "B heads Cv K M"], index: Int[Tensor, "H T S"] | Int[Tensor, "H S"] | None,
    mask: Bool[Tensor, "#B M"] | None,
) -> Float[Tensor, "B heads Cv H *spatial"]:  # fmt: skip
    """Attention over all pixels without encodings and biases, where scores do not depend on the output element: softmax
    attention of pixels, or of pairs of a pixel and an element if there is an index, by torch's kernels."""
    spatial, (batch, heads, _, elements), keys = query.shape[4:], query.shape[:4], key.shape[3]
    q, k, v = (x.flatten(4).permute(0, 1, 3, 4, 2) for x in (query, key, value))
    q, k, v = (x.flatten(0, 2) if index is None else x.flatten(2, 3).flatten(0, 1) for x in (q, k, v))
    if mask is not None:
        columns, rows = (1, heads * keys) if index is None else (keys, heads)
        mask = mask.expand(batch, -1).repeat(1, columns).repeat_interleave(rows, 0)
    with full_precision(query.device):
        out = softmax_attention(q, k, v, mask)
    out = out.view(batch, heads, elements, math.prod(spatial), value.shape[2]).permute(0, 1, 4, 2, 3)
    if index is not None and index.ndim == 3:
        out = out.sum(3, keepdim=True).expand(-1, -1, -1, len(index), -1)
    return out.unflatten(-1, spatial)


def rotary_attention(
    query: Float[Tensor, "B heads C Q *spatial"], key: Float[Tensor, "B heads C K *keys"],
    value: Float[Tensor, "B heads Cv K *keys"], encoding: RotaryEncoding, matrices: Float[Tensor, "H dim dim"],
    index: Int[Tensor, "H S"] | None, key_mask: Bool[Tensor, "#B *keys"] | None, dropout: float,
) -> Float[Tensor, "B heads Cv H *spatial"]:  # fmt: skip
    """Attention over all pixels with rotary positions in frames, by torch's kernels: pairs of a head and a group
    element are its heads. With an ``index``, their keys are those of all elements. Positions are in pixels of the
    queries' image."""
    dtype, pixels = torch.promote_types(query.dtype, torch.float32), query.shape[4:]

    def angles(x: Tensor, unit: float) -> Float[Tensor, "heads H pixels pairs"]:
        places = unit * centred_positions(x.shape[4:], x.device, dtype)
        return encoding(places, matrices.to(dtype)).permute(2, 1, 0, 3)

    queries, keys, values = (x.flatten(4).permute(0, 1, 3, 4, 2) for x in (query, key, value))
    phases = angles(key, longest(pixels) / longest(key.shape[4:]))
    mask = None if key_mask is None else key_mask.flatten(1).expand(query.shape[0], -1)
    if index is None:
        keys, every = rotated(keys, phases), mask
    else:
        embeddings = cast(Tensor, encoding.table)[index].unsqueeze(2)  # (H, S, 1, channels)
        keys = rotated(keys.unsqueeze(2) + embeddings.to(keys.dtype), phases.unsqueeze(2)).flatten(3, 4)
        values = values.flatten(2, 3).unsqueeze(2)
        every = None if mask is None else mask.repeat(1, index.shape[1])
    values = values.contiguous().expand(-1, -1, len(matrices), -1, -1)
    q, k, v = (x.flatten(1, 2) for x in (rotated(queries, angles(query, 1.0)), keys, values))
    out = softmax_attention_of_heads(q, k, v, every, dropout)
    out = out.unflatten(1, (query.shape[1], -1)).permute(0, 1, 4, 2, 3).unflatten(-1, pixels)
    return zero_where_masked(out, None if mask is None else mask.any(1))


def _table(query: Tensor, rows: Sequence[int], rho: Tensor | None, bias: Tensor | None) -> Float[Tensor, "e *rows C+1"]:
    """Encodings (*rows, C) with biases (e, *rows) as their last channel; ``None`` means zeros."""
    heads, channels = query.shape[1:3]
    if rho is None and bias is None:
        return query.new_zeros(heads, *rows, channels + 1)
    rho = query.new_zeros(*rows, channels) if rho is None else rho.to(query.dtype)
    bias = query.new_zeros(heads, *rows) if bias is None else bias.to(query.dtype)
    return torch.cat([rho.expand(heads, *rho.shape), bias.unsqueeze(-1)], -1)


def global_attention(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, window: Window,
    projection: Float[Tensor, "features C"], far_bias: Float[Tensor, "heads U"],
    key_mask: Bool[Tensor, "#B *spatial"] | None, dropout: float, plain: bool,
) -> Tensor:  # fmt: skip
    r"""Attention to all pixels in linear time: exact weights in a window, random features beyond.

    The weight of the key (j, s) for the output (i, h) is, with u = ``index[h, s]``,

    .. math::
        w = \frac{e^{f(u)}}{n} \langle \phi(q(i,h)), \phi(k(j,s)) \rangle
        + [j \text{ near } i]\, \exp\big(c\, \langle q(i,h),\; k(j,s) + \rho_{space}(h^{-1}(x_j - x_i))
        + \rho_{group}(u) \rangle + b_{space}(h^{-1}(x_j - x_i)) + b_{group}(u)\big),

    and outputs are averages of the values with these weights. :math:`\langle \phi(q), \phi(k) \rangle` is a random
    feature estimate of :math:`\exp(c \langle q, k \rangle)` with :math:`c = 1/\sqrt{C}`, by which queries are not yet
    multiplied here. n is the number of keys, so that the ratio of both terms does not depend on the size of the image.
    The group does not act on channels, on which the features depend, so attention is exactly equivariant for every draw
    of the features.

    The index is (H, S) and means relation ``"relative"``, or ``None``, which means ``"frame"``. ``projection`` holds
    the directions of the random features, and ``far_bias`` holds f, (heads, 1) in frames.
    """
    near, lse = attention_of_heads(query * query.shape[2] ** -0.5, key, value, terms, window, key_mask, dropout, plain)
    if terms.element_index is None:  # in frames, (head, element) pairs act as heads
        bias = far_bias.expand(-1, query.shape[3]).reshape(-1, 1, 1)
    else:
        bias = far_bias[:, terms.element_index]
    far, far_lse = _far(query, key, value, projection, bias, key_mask)
    with full_precision(near.device):
        outs = torch.stack([near, F.dropout(far, dropout)])
        out, _ = merge_attentions(outs, torch.stack([cast(Tensor, lse), far_lse.to(near.dtype)]).unsqueeze(3))
    return out.to(near.dtype)


def _merge_elements(
    sums: Float[Tensor, "B*heads*S m e"], top: Float[Tensor, "B*heads*S m 1"], far_bias: Float[Tensor, "heads H S"]
) -> tuple[Float[Tensor, "B*heads*H m e"], Float[Tensor, "B*heads*H m 1"]]:
    """From sums of exp(score - top) over the pixels of each key element, those over all key elements for each output
    element, with biases ``far_bias``."""
    heads, _, elements = far_bias.shape
    top = top.unflatten(0, (-1, heads, 1, elements)) + far_bias[..., None, None].to(top.dtype)  # (B, heads, H, S, m, 1)
    most = top.detach().amax(3, keepdim=True)
    weight = (top - most).exp().squeeze(-1)
    sums = torch.einsum("bnhsm,bnsme->bnhme", weight, sums.unflatten(0, (-1, heads, elements)))
    return sums.flatten(0, 2), most.squeeze(3).flatten(0, 2)


def _far(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor, far_bias: Float[Tensor, "heads H S"],
    mask: Bool[Tensor, "#B *spatial"] | None,
) -> tuple[Float[Tensor, "B heads Cv H *spatial"], Float[Tensor, "B heads H *spatial"]]:  # fmt: skip
    """Attention by random features only, and its log-sum-exps."""
    heads_and_elements, spatial = query.shape[1:4:2], query.shape[4:]
    # (B, heads |H|, pixels, C)
    q, k, v = (x.flatten(4).permute(0, 1, 3, 4, 2).flatten(1, 2) for x in (query, key, value))
    mask = None if mask is None else mask.flatten(1).expand(query.shape[0], -1)
    key_mask = None if mask is None else mask.repeat_interleave(q.shape[1], 0)
    merge = functools.partial(_merge_elements, far_bias=far_bias)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    with full_precision(query.device):
        out, lse = feature_attention(Inputs(flat_q, flat_k, flat_v, projection).wide(), key_mask, merge)
        out, lse = (x.unflatten(0, q.shape[:2]) for x in (out.to(value.dtype), lse))
        lse = complete_lse(lse, q.to(lse.dtype), projection)
    if mask is None:
        keys = lse.new_full((), k.shape[2] * far_bias.shape[2])
    else:
        keys = (mask.sum(1).clamp(min=1)[:, None, None, None] * far_bias.shape[2]).to(lse.dtype)
    lse = (lse - keys.log()).unflatten(1, heads_and_elements).squeeze(-1).unflatten(3, spatial)
    return out.unflatten(1, heads_and_elements).permute(0, 1, 4, 2, 3).unflatten(4, spatial), lse


def attention_by_position(
    value: Float[Tensor, "B heads Cv S *spatial"], terms: Terms, window: Window
) -> Float[Tensor, "B heads Cv H *spatial"]:
    """Attention of heads without content, a separable group convolution.

    out(i, h) = sum_D softmax_D(b(h^-1 D)) v(i + D, h), where b is the bias of offsets. If the terms have an index,
    v(j, h) is replaced by sum_t sum_s softmax_s(g(u)) v(j, s), where g is the bias of u = ``index[h, t, s]``: the
    softmax over pixels and elements is the product of both. ``value`` is zero at masked pixels and outside of the
    image. It has one element for lifting.

    Source: Cordonnier et al. (2020), Theorem 1, for attention by offsets alone; Chollet, Xception (2017), for separable
    convolutions.
    """
    if terms.element_index is not None:
        of_elements = cast(Tensor, terms.group_bias)[:, terms.element_index].softmax(-1).to(value.dtype)
        of_elements = of_elements.sum(2) if of_elements.ndim == 4 else of_elements
        value = torch.einsum("ehs,becs...->bech...", of_elements, value)
    spatial, (heads, channels, keys) = value.shape[4:], value.shape[1:4]
    weight = _weights(cast(Tensor, terms.space_bias))
    if window.is_global:
        pairs = weight[..., offsets_of_pairs(spatial, value.device)].to(value.dtype)
        every = value.flatten(4).expand(-1, -1, -1, weight.shape[1], -1)
        return torch.einsum("ehij,bechj->bechi", pairs, every).unflatten(-1, spatial)
    filters = weight[:, None].expand(-1, channels, -1, -1).flatten(0, 2)[:, None]
    out = _convolve(value.flatten(1, 3), filters, window, groups=heads * channels * keys)
    return out.unflatten(1, (-1, channels, weight.shape[1]))


def lifting_by_position(
    x: Float[Tensor, "B in *spatial"], mask: Bool[Tensor, "#B *spatial"] | None,
    value_weight: Float[Tensor, "e Cv in"], value_bias: Float[Tensor, "e Cv"], out_weight: Float[Tensor, "out e Cv"],
    out_bias: Float[Tensor, " out"], space_bias: Float[Tensor, "e H D"], window: Window,
) -> Float[Tensor, "B out H *spatial"]:  # fmt: skip
    """Lifting attention of heads without content, with the projections before and after it: one convolution.

    Its filters are sums over heads of products of the projections and the weights of offsets. ``x`` is zero at masked
    pixels.
    """
    valid = x.new_ones(1, 1, *x.shape[2:]) if mask is None else mask.to(x.dtype)[:, None]
    with full_precision(x.device):
        values = torch.cat([value_weight, value_bias[..., None]], -1)
        maps = torch.bmm(out_weight.transpose(0, 1), values).flatten(1)  # (e, out in)
        filters = maps.mT @ _weights(space_bias).to(values.dtype).flatten(1)
    elements = space_bias.shape[1]
    filters = filters.view(len(out_bias), -1, elements, space_bias.shape[2]).transpose(1, 2).flatten(0, 1)
    of_x, of_bias = filters.split((x.shape[1], 1), 1)
    # an image by itself for value_bias: on a CPU, filters of 1 to 3 channels are several times faster than those of 4
    constant = _convolve(valid, of_bias, window, bias=out_bias.repeat_interleave(elements))
    return (_convolve(x, of_x, window) + constant).unflatten(1, (-1, elements))


def _weights(space_bias: Tensor) -> Tensor:
    """Softmax weights of offsets."""
    return space_bias.to(torch.promote_types(space_bias.dtype, torch.float32)).softmax(-1)


def _convolve(
    x: Tensor, filters: Float[Tensor, "o i D"], window: Window, groups: int = 1, bias: Tensor | None = None
) -> Tensor:
    """Convolve images with filters over the window, with zeros or the opposite side of the image beyond its border."""
    at = shifts(window.sides, window.selection)
    x, padding = (at.pad(x, circular=True), (0,) * window.dim) if window.circular else (x, at.reach)
    filters = at.to_square(filters).to(x.dtype)
    if len(filters) == groups > 1 and x.device.type == "cpu" and torch.is_grad_enabled() and x.shape[0]:
        return _depthwise(x, filters, padding)
    return _conv(x, filters, None if bias is None else bias.to(x.dtype), padding=padding, groups=groups)


def _conv(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return (F.conv2d if x.ndim == 4 else F.conv3d)(x, *arguments, **options)


def _by_channel(x: Tensor, filters: Float[Tensor, "c 1 *sides"], padding: Sequence[int]) -> Tensor:
    """The convolution of each channel with its own filter."""
    return _conv(x, filters, padding=padding, groups=len(filters))


class _Depthwise(torch.autograd.Function):
    """:func:`_by_channel`, whose derivatives are convolutions of this kind, too. Forward and backward take a fifth of
    torch's time on a CPU, where torch's gradient of such filters is slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Float[Tensor, "c 1 *sides"], padding: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, filters)
        ctx.padding = padding
        return _by_channel(x, filters, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, filters = ctx.saved_tensors
        grad, batch = grad.to(x.dtype), x.shape[0]
        margins = [side - 1 - n for side, n in zip(filters.shape[2:], ctx.padding, strict=True)]
        to_x = _conv(grad, filters.flip(*range(2, x.ndim)), padding=margins, groups=len(filters))
        images, of_images = x.reshape(1, -1, *x.shape[2:]), grad.reshape(-1, 1, *grad.shape[2:])
        to_filters = _conv(images, of_images, padding=ctx.padding, groups=batch * len(filters))
        return to_x, to_filters.view(batch, *filters.shape).sum(0), None


_depthwise = by_form(_by_channel, _Depthwise.apply)


def attention_weights(
    attend: Callable[[Float[Tensor, "B heads C S *spatial"]], Float[Tensor, "B heads C H *query_spatial"]],
    value: Float[Tensor, "B heads _ S *spatial"], outputs: int, pixels: Sequence[Sequence[int]],
) -> Float[Tensor, "B pixels heads H S *spatial"]:  # fmt: skip
    """Attention weights of chosen query pixels.

    Outputs are linear in the values, so the weights are the derivatives of the outputs by the values. ``attend`` maps
    values to outputs, each channel separately and linearly. ``value`` gives the sizes, dtype and device; its number of
    channels is not used. Weights can be differentiated if gradients are enabled.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        shape = (*value.shape[:2], len(pixels) * outputs, *value.shape[3:])
        probe = torch.zeros(shape, dtype=value.dtype, device=value.device, requires_grad=True)
        out = attend(probe).unflatten(2, (-1, outputs)).diagonal(0, 3, 4)  # (B, heads, pixels, *spatial, H)
        chosen = [out[(slice(None), slice(None), n, *pixel)].sum() for n, pixel in enumerate(pixels)]
        (weights,) = torch.autograd.grad(torch.stack(chosen).sum(), probe, create_graph=recorded)
    return weights.unflatten(2, (-1, outputs)).transpose(1, 2)
