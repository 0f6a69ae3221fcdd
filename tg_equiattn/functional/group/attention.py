"""Lifting and group self-attention as pure functions of queries, keys, values and encodings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...grids import Window
from ..backend import DEFINITION, FUSABLE, OPERATOR, choose_form
from .definition import windowed_attention_definition
from .dense import dense_attention
from .fusable import windowed_attention_fusable
from .hashed_dropout import draw_seed
from .masks import zero_where_masked
from .operands import check_frame_attention, check_group_attention
from .operator import windowed_attention


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_encoding: Tensor | None,
    element_encoding: Tensor | None,
    index: Tensor,
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

    with u = ``index[h, t, s]``, :math:`c = 1/\sqrt{C}`, and biases that each head has of its own. With an ``index`` of
    two axes (relation ``"relative"``) only h = t is formed and there is no sum over t.

    Scores are made in chunks, and again in backward. Where all pixels are keys, weights and values meet in matrix
    products, whose operands TF32 rounds where it is switched on.

    Args:
        offset_encoding: encoding of rotated offsets, or the full encoding of offsets and u.
        element_encoding: encoding of u; ``None`` if ``offset_encoding`` has an axis for u.
        index: u of each (h, t, s), a permutation along s; see :func:`tg_equiattn.encodings.relation_index`.
        window: the keys of a query, or the whole grid; it also says what is outside of the image.
        space_bias, group_bias: of rotated offsets and of u, for each head; ``None`` means none.
        dropout: probability of dropping a weight after the sum over t.
        mask: true where there are pixels. The others are no keys, whatever they hold, and their outputs are zero.
        key_mask: true for the pixels of ``key`` that are keys, where ``window`` has all of them; ``None`` means
            ``mask``, or all where keys have another image. That may be of another size, for cross attention, if
            ``offset_encoding`` and ``space_bias`` are ``None``.

    Shapes:
        - query, key: ``(B, heads, C, |H|, *spatial)``; value: ``(B, heads, Cv, |H|, *spatial)``
        - offset_encoding: ``(|H|, D, C)``, or full ``(|H|, D, |H|, C)``; D offsets of the window, or with global
          attention of all pairs, in the order of :meth:`Window.offsets`
        - element_encoding: ``(|H|, C)``; index: ``(|H|, |H|, |H|)`` or ``(|H|, |H|)``
        - space_bias: ``(heads, |H|, D)``; group_bias: ``(heads, |H|)``; mask: bool ``(B or 1, *spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Raises:
        ValueError: for shapes, dtypes, devices or options that do not fit.

    Source: GSA-Nets Eq. 14-16 (arXiv:2010.00977), GE-ViT Eq. 14-17 (arXiv:2306.06722). The published code divides
    scores by the square root of the layer's input width; here by that of the head width.
    """
    check_group_attention(
        query,
        key,
        value,
        offset_encoding,
        element_encoding,
        index,
        window,
        space_bias,
        group_bias,
        dropout,
        mask,
        key_mask,
    )
    query, key, value, key_mask = _without_masked(query, key, value, mask, key_mask)
    out, _ = group_attention_impl(
        query, key, value, offset_encoding, element_encoding, index, window, space_bias, group_bias, dropout, key_mask
    )
    return zero_where_masked(out, mask)


def _without_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Features with zeros at masked pixels, and the mask of keys: that of queries where they have one image."""
    if key_mask is None and key.shape[4:] == query.shape[4:]:
        key_mask = mask
    key, value = (zero_where_masked(x, key_mask) for x in (key, value))
    return zero_where_masked(query, mask), key, value, key_mask


_FORMS = {
    DEFINITION: windowed_attention_definition,
    OPERATOR: windowed_attention,
    FUSABLE: windowed_attention_fusable,
}


def group_attention_impl(
    query, key, value, offset_encoding, element_encoding, index, window, space_bias=None, group_bias=None, dropout=0.0,
    key_mask=None, plain=False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`group_attention` without checks, of operands with finite numbers at masked pixels.

    ``index`` ``None`` means frames, or lifting with one element of queries, keys and values. ``key_mask`` is true where
    there are keys; outputs are not masked. Over all pixels encodings may be ``None``, and keys may then lie on another
    grid. Second come the log-sum-exps ``(B, heads, |H|, *spatial)`` of each query's scores, or with a sum over t ``(B,
    heads, |H|, |H|, *spatial)``; over all pixels, where no caller needs them, an empty tensor.
    """
    dtype, kind = torch.promote_types(query.dtype, torch.float32), value.dtype
    query, key, value = (x.to(dtype) for x in (query * query.shape[2] ** -0.5, key, value))
    if window.kernel_size is None:
        encodings = [
            None if x is None else x.to(dtype) for x in (offset_encoding, element_encoding, space_bias, group_bias)
        ]
        out = dense_attention(query, key, value, index, *encodings, key_mask=key_mask, dropout=dropout)
        return out.to(kind), query.new_zeros(0)
    tables = _tables(query.shape[1], dtype, offset_encoding, element_encoding, space_bias, group_bias)
    window = window.kernel_size, window.selection, window.circular
    # what the form for compilers keeps of backward: gradients of logits of offsets
    logits = query.shape[0] * tables[0][..., 0].numel() * math.prod(query.shape[4:])
    if index is not None and index.ndim == 3:
        logits *= index.shape[1]
    attend = _FORMS[choose_form(query, logits // 4, plain)]
    out, lse = attend(query, key, value, *tables, index, key_mask, draw_seed(dropout, query.device), *window, dropout)
    return out.to(kind), lse.squeeze(3)


def _tables(
    heads: int, dtype: torch.dtype, offset_encoding: Tensor, element_encoding: Tensor | None, space_bias: Tensor | None,
    group_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``offset_table`` and ``element_table`` of :mod:`.definition`: encodings and, as their last channel, biases."""

    def joined(rho: Tensor, *biases: Tensor | None) -> Tensor:
        rho = rho.to(dtype).expand(heads, *rho.shape)
        bias = sum((x.to(dtype) for x in biases if x is not None), rho.new_zeros(rho.shape[:-1]))
        return torch.cat([rho, bias.unsqueeze(-1)], -1)

    if offset_encoding.ndim == 4:  # (H, D, U, C)
        of_offsets, of_elements = space_bias, group_bias
        of_offsets = None if space_bias is None else space_bias[:, :, None]
        of_elements = None if group_bias is None else group_bias[:, None, :, None]
        offset_table = joined(offset_encoding.transpose(1, 2), of_offsets, of_elements)
        return offset_table, offset_table.new_zeros(heads, 0, offset_table.shape[-1])
    offset_table = joined(offset_encoding.unsqueeze(1), None if space_bias is None else space_bias.unsqueeze(2))
    if element_encoding is None:
        return offset_table, offset_table.new_zeros(heads, 0, offset_table.shape[-1])
    return offset_table, joined(element_encoding, group_bias)


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

    Arguments and errors as :func:`group_attention`, without a group axis on query, key and value.

    Shapes:
        - query, key: ``(B, heads, C, *spatial)``; value: ``(B, heads, Cv, *spatial)``
        - offset_encoding: ``(|H|, D, C)``; space_bias: ``(heads, |H|, D)``
        - output: ``(B, heads, Cv, |H|, *spatial)``

    Source: GSA-Nets Eq. 14, GE-ViT Eq. 14.
    """
    if query.ndim not in (5, 6):
        raise ValueError(f"query must have shape (B, heads, C, *spatial), got {tuple(query.shape)}")
    if offset_encoding.ndim != 3:
        raise ValueError(f"offset_encoding must have shape (|H|, D, C), got {tuple(offset_encoding.shape)}")
    operands = query.unsqueeze(3), key.unsqueeze(3), value.unsqueeze(3), offset_encoding
    return frame_attention(*operands, window=window, space_bias=space_bias, dropout=dropout, mask=mask)


def frame_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_encoding: Tensor | None,
    *,
    window: Window,
    space_bias: Tensor | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    r"""Every group element attends in its own frame: to the same element of other pixels.

    .. math::
        \mathrm{out}(i, h) = \sum_{D} \mathrm{softmax}_D\big(c\, \langle q(i, h),\; k(i + D, h)
        + \rho(h^{-1} D) \rangle + b(h^{-1} D)\big)\; v(i + D, h)

    over offsets D of the window, or of all pixels, with :math:`c = 1/\sqrt{C}`. It is equivariant for every group;
    elements meet in the linear maps before and after it (:class:`tg_equiattn.nn.GroupLinear`). A pixel and head takes
    :math:`|H| D` scores, where :func:`group_attention` of relation ``"relative"`` takes :math:`|H|^2 D`. With one
    element of queries, keys and values it is lifting self-attention.

    Scores are made again in backward. Where all pixels are keys, weights and values meet in matrix products, whose
    operands TF32 rounds where it is switched on.

    Arguments and errors are those of :func:`group_attention`; ``offset_encoding`` encodes rotated offsets alone.

    Shapes:
        - query, key: ``(B, heads, C, T, *spatial)``; value: ``(B, heads, Cv, T, *spatial)``; T is ``|H|`` or 1
        - offset_encoding: ``(|H|, D, C)``, D in the order of :meth:`Window.offsets`; space_bias: ``(heads, |H|, D)``
        - mask: bool ``(B or 1, *spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Source: GE-ViT Eq. 16 (arXiv:2306.06722) for t = s = h, which leaves a softmax over pixels alone; frames of group
    elements in three dimensions: Platonic Transformers (arXiv:2510.03511).
    """
    check_frame_attention(query, key, value, offset_encoding, window, space_bias, dropout, mask, key_mask)
    query, key, value, key_mask = _without_masked(query, key, value, mask, key_mask)
    out, _ = group_attention_impl(
        query, key, value, offset_encoding, None, None, window, space_bias, None, dropout, key_mask
    )
    return zero_where_masked(out, mask)
