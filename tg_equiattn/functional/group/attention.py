"""Lifting and group self-attention as pure functions of queries, keys, values and encodings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...grids import Window
from ..hashed_dropout import draw_seed
from ..operators import DEFINITION, choose_form
from .definition import windowed_attention_definition
from .dense import dense_attention
from .masks import zero_where_masked, zero_without_keys
from .operands import check_attention
from .windowed import KERNELS, windowed_attention

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_encoding: Tensor | None,
    element_encoding: Tensor | None = None,
    index: Tensor | None = None,
    *,
    window: Window,
    space_bias: Tensor | None = None,
    group_bias: Tensor | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    r"""Group self-attention of regular features.

    .. math::
        \mathrm{score}(h, t, j, s) = c\, \langle q(i,t),\;
        k(j,s) + \rho_{space}(h^{-1}(x_j - x_i)) + \rho_{group}(u) \rangle
        + b_{space}(h^{-1}(x_j - x_i)) + b_{group}(u), \qquad
        \mathrm{out}(i, h) = \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}(\mathrm{score})\; v(j, s)

    Here u = ``index[h, t, s]`` and :math:`c = 1/\sqrt{C}`. Each head has its own biases b. If ``index`` has two axes
    (relation ``"relative"``), only the scores with h = t are formed and there is no sum over t. Without ``index``
    (relation ``"frame"``), only those with h = t = s are formed: an element attends to the same element of other
    pixels, in its own frame, and the softmax runs over pixels.

    Scores are formed in chunks and recomputed in backward, which saves memory. With a global window, outputs are matrix
    products of weights and values; their operands are rounded if TF32 is enabled.

    Args:
        query: Queries q.
        key: Keys k. With a global ``window``, and without ``offset_encoding`` and ``space_bias``, they may come from an
            image of another size (cross-attention).
        value: Values v, at the pixels of ``key``.
        offset_encoding: Encoding :math:`\rho_{space}` of rotated offsets. ``None`` means no encoding and needs a global
            ``window``.
        element_encoding: Encoding :math:`\rho_{group}` of u. It must be ``None`` without ``index``, and may be ``None``
            without ``offset_encoding``.
        index: Element u for each (h, t, s), a permutation of the group along s; see
            :func:`tg_equiattn.encodings.relation_index`. ``None`` means relation ``"frame"``.
        window: Offsets of the keys of a query, or all pixels (a global window). It also decides whether pixels outside
            of the image are masked or continue at the opposite side.
        space_bias: Bias :math:`b_{space}` of rotated offsets for each head. ``None`` means zero.
        group_bias: Bias :math:`b_{group}` of u for each head. ``None`` means zero; it must be ``None`` without
            ``index``.
        dropout: Probability of dropping a weight, after the sum over t. The default is 0.
        mask: True at valid pixels of ``query``. Numbers of masked pixels have no effect, and their outputs are zero.
            ``None`` means that all pixels are valid.
        key_mask: True at valid pixels of ``key`` and ``value``. Masked pixels are not keys. A query without a valid key
            has the output zero. ``None`` means ``mask`` if queries and keys have images of the same size, and otherwise
            that all keys are valid.

    Shapes:
        - query: ``(B, heads, C, |H|, *spatial)``
        - key: ``(B, heads, C, |H|, *spatial)``
        - value: ``(B, heads, Cv, |H|, *spatial)``
        - offset_encoding: ``(|H|, D, C)``. D counts the offsets of the window, or of all pairs of pixels, in the order
          of :meth:`Window.offsets`.
        - element_encoding: ``(|H|, C)``
        - index: int64 ``(|H|, |H|, |H|)`` or ``(|H|, |H|)``
        - space_bias: ``(heads, |H|, D)``
        - group_bias: ``(heads, |H|)``
        - mask: bool ``(B or 1, *spatial)``
        - key_mask: bool ``(B or 1, *key spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Raises:
        ValueError: if a tensor does not have the shape under Shapes or is on another device than ``query``; if
            ``query``, ``key`` and ``value`` do not have the same floating point dtype; if ``index`` is not a
            permutation along its last axis, or ``None`` with an encoding or a bias of u; if ``window`` does not fit the
            image or the encodings; or if ``dropout`` is not in [0, 1).

    Source: GSA-Nets Eq. 14-16 (arXiv:2010.00977), GE-ViT Eq. 14-17 (arXiv:2306.06722). The published code divides
    scores by the square root of the layer's input width; we divide by that of the head width. Frames are ours; Platonic
    Transformers (arXiv:2510.03511) use frames of group elements in three dimensions.
    """
    encodings = offset_encoding, element_encoding
    biases = space_bias, group_bias
    check_attention(query, key, value, *encodings, index, window, *biases, dropout, mask, key_mask)
    if key_mask is None and key.shape[4:] == query.shape[4:]:
        key_mask = mask
    query = zero_where_masked(query, mask)
    key, value = (zero_where_masked(x, key_mask) for x in (key, value))
    out, _ = group_attention_impl(query, key, value, *encodings, index, window, *biases, dropout, key_mask)
    return zero_where_masked(out, mask)


def group_attention_impl(
    query, key, value, offset_encoding, element_encoding, index, window, space_bias=None, group_bias=None, dropout=0.0,
    key_mask=None, plain=False, step=1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`group_attention` without checks. Operands must be finite at masked pixels; outputs are not masked.

    ``index=None`` means frame attention, or lifting attention if queries, keys and values have one element.
    ``key_mask`` is true at valid keys; queries without a valid key have the output zero. With a global window,
    encodings may be ``None``, and keys may then lie on another grid. Neighbouring offsets of a window are ``step``
    pixels apart.

    Returns the output and the log-sum-exps of the scores of each query: ``(B, heads, |H|, *spatial)``, or ``(B, heads,
    |H|, |H|, *spatial)`` with a sum over t. A global window has none.
    """
    dtype, kind = torch.promote_types(query.dtype, torch.float32), value.dtype
    query, key, value = query.to(dtype) * query.shape[2] ** -0.5, key.to(dtype), value.to(dtype)
    seed = draw_seed(dropout, query.device)
    rows = next((x.shape[-axis] for x, axis in ((element_encoding, 2), (group_bias, 1)) if x is not None), 0)
    elements = _table(query, (rows,), element_encoding, group_bias)
    if window.is_global:
        outputs = next((len(x) for x in (offset_encoding, index) if x is not None), query.shape[3])
        rho = query.new_zeros(outputs, 0, query.shape[2]) if offset_encoding is None else offset_encoding.to(dtype)
        bias = query.new_zeros(query.shape[1], outputs, 0) if space_bias is None else space_bias.to(dtype)
        flat = None if key_mask is None else key_mask.flatten(1)
        operands = query, key.flatten(4), value.flatten(4), rho, bias, elements, index, flat, seed, dropout
        out = dense_attention(*operands, plain=plain)
        return zero_where_masked(out, None if flat is None else flat.any(1)).to(kind), query.new_zeros(0)
    tables = _table(query, offset_encoding.shape[:2], offset_encoding, space_bias), elements
    # The definition keeps the products of queries and encodings in memory, and all scores for a backward pass.
    numbers = query.shape[0] * math.prod(tables[0].shape[:-1]) * math.prod(query.shape[4:])
    if index is not None:
        numbers *= math.prod(index.shape[1:-1])
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            numbers *= index.shape[-1]
    definition = choose_form(query, numbers // 4, plain, KERNELS.run(query, key, value)) == DEFINITION
    attend = windowed_attention_definition if definition else windowed_attention
    settings = window.kernel_size, window.selection, window.circular, dropout, step
    out, lse = attend(query, key, value, *tables, index, key_mask, seed, *settings)
    out = out if key_mask is None else zero_without_keys(out, lse)
    return out.to(kind), lse.squeeze(3)


def scaled_attention_impl(
    query, key, value, offset_encoding: Float[Tensor, "M D C"], element_encoding: Float[Tensor, "U C"] | None,
    index: Int[Tensor, "M M"] | None, window, space_bias: Float[Tensor, "heads M D"] | None,
    group_bias: Float[Tensor, "heads U"] | None, dropout, key_mask, plain, scales, scale_window,
) -> Tensor:  # fmt: skip
    r"""Lifting and group attention over scales, without checks. Operands must be finite at masked pixels; outputs are
    not masked. Queries without a key that is valid in ``key_mask`` have the output zero.

    The group is the product of scales :math:`2^j` and a finite group M with elements m and n:

    .. math::
        \mathrm{out}(i, j, m) = \sum_{D, l, n} \mathrm{softmax}_{D, l, n}\big(c\, \langle q(i, j, m),\;
        k(i + 2^j D, l, n) + \rho(m^{-1} D, (l - j, m^{-1} n)) \rangle + b\big)\; v(i + 2^j D, l, n)

    The sum runs over the offsets D of the window and the scales l in ``scale_window`` around j. Operands are those of
    :func:`group_attention`, except for these:

    - query, key and value have all scales and elements, scales first; for lifting they have one element
    - U = ``scale_window`` |M|, scales first
    - index is that of relation "relative" of M; ``None`` for lifting
    """
    elements, reach, found = len(offset_encoding), scale_window // 2, []
    for scale in range(scales):
        operands, of_scales = (query, key, value), index
        if index is not None:
            seen = range(max(0, scale - reach), min(scales, scale + reach + 1))
            keys = slice(seen.start * elements, seen.stop * elements)
            of_scales = torch.cat([index + (other - scale + reach) * elements for other in seen], 1)
            own = slice(scale * elements, (scale + 1) * elements)
            operands = query[:, :, :, own], key[:, :, :, keys], value[:, :, :, keys]
        encodings, biases = (offset_encoding, element_encoding), (space_bias, group_bias)
        settings = dropout, key_mask, plain, 2**scale
        out, _ = group_attention_impl(*operands, *encodings, of_scales, window, *biases, *settings)
        found.append(out)
    return torch.cat(found, 3)


def _table(query: Tensor, rows: Sequence[int], rho: Tensor | None, bias: Tensor | None) -> Float[Tensor, "e *rows C+1"]:
    """Encodings (*rows, C) with biases (e, *rows) as their last channel; ``None`` means zeros."""
    heads, channels = query.shape[1:3]
    rho = query.new_zeros(*rows, channels) if rho is None else rho.to(query.dtype)
    bias = query.new_zeros(heads, *rows) if bias is None else bias.to(query.dtype)
    return torch.cat([rho.expand(heads, *rho.shape), bias.unsqueeze(-1)], -1)


def lifting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_encoding: Tensor,
    *,
    window: Window,
    space_bias: Tensor | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Lifting self-attention, from a grid to a grid times a group.

    .. math::
        \mathrm{out}(i, h) = \sum_j
        \mathrm{softmax}_j\big(c\,\langle q_i, k_j + \rho(h^{-1}(x_j - x_i))\rangle + b(h^{-1}(x_j - x_i))\big)\; v_j

    Here :math:`c = 1/\sqrt{C}`, j runs over the window of i, and each head has its own bias b. Queries, keys and values
    have no group axis.

    Args:
        query: Queries q.
        key: Keys k, at the pixels of ``query``.
        value: Values v, at the pixels of ``key``.
        offset_encoding: Encoding :math:`\rho` of rotated offsets.
        window: Offsets of the keys of a query, or all pixels (a global window). It also decides whether pixels outside
            of the image are masked or continue at the opposite side.
        space_bias: Bias b of rotated offsets for each head. ``None`` means zero.
        dropout: Probability of dropping a weight. The default is 0.
        mask: True at valid pixels. Masked pixels are not keys, their numbers have no effect, and their outputs are
            zero. ``None`` means that all pixels are valid.

    Shapes:
        - query: ``(B, heads, C, *spatial)``
        - key: ``(B, heads, C, *spatial)``
        - value: ``(B, heads, Cv, *spatial)``
        - offset_encoding: ``(|H|, D, C)``. D counts the offsets of the window, or of all pairs of pixels, in the order
          of :meth:`Window.offsets`.
        - space_bias: ``(heads, |H|, D)``
        - mask: bool ``(B or 1, *spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Raises:
        ValueError: if a tensor does not have the shape under Shapes or is on another device than ``query``; if
            ``query``, ``key`` and ``value`` do not have the same floating point dtype; if ``window`` does not fit the
            image or ``offset_encoding``; or if ``dropout`` is not in [0, 1).

    Source: GSA-Nets Eq. 14, GE-ViT Eq. 14.
    """
    if query.ndim not in (5, 6):
        raise ValueError(f"query must have shape (B, heads, C, *spatial), got {tuple(query.shape)}")
    if offset_encoding.ndim != 3:
        raise ValueError(f"offset_encoding must have shape (|H|, D, C), got {tuple(offset_encoding.shape)}")
    operands = query.unsqueeze(3), key.unsqueeze(3), value.unsqueeze(3), offset_encoding
    return group_attention(*operands, window=window, space_bias=space_bias, dropout=dropout, mask=mask)
