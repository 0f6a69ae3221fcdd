"""Lifting and group self-attention as pure functions of queries, keys, values and encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...grids import Window
from .heads import Terms, attention_of_heads
from .windows import zero_where_masked


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
    terms = Terms(offset_encoding, element_encoding, space_bias, group_bias, index)
    _check(query, key, value, terms, window, dropout, mask, key_mask)
    if key_mask is None and key.shape[4:] == query.shape[4:]:
        key_mask = mask
    query = zero_where_masked(query, mask)
    key, value = (zero_where_masked(x, key_mask) for x in (key, value))
    query = query.to(torch.promote_types(query.dtype, torch.float32)) * query.shape[2] ** -0.5
    out, _ = attention_of_heads(query, key, value, terms, window, key_mask, dropout)
    return zero_where_masked(out, mask)


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


def _check(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, window: Window, dropout: float, mask: Tensor | None,
    key_mask: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the operands of :func:`group_attention` fit each other."""
    offset_encoding, element_encoding, space_bias, group_bias, index = terms
    if not isinstance(window, Window):
        raise ValueError(f"window must be a tg_equiattn.grids.Window, got {type(window).__name__}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (6, 7):
            raise ValueError(f"{name} must have shape (B, heads, C, |H|, *spatial), got {tuple(x.shape)}")
    (batch, heads, channels, elements), spatial = query.shape[:4], query.shape[4:]
    if key.shape[4:] != spatial and not (window.is_global and offset_encoding is None and space_bias is None):
        raise ValueError(
            f"key must have the pixels of query, {tuple(query.shape)}, got {tuple(key.shape)}; for keys from an image "
            "of another size, use a global window (kernel_size=None) with offset_encoding=None and space_bias=None"
        )
    if min(key.shape[4:]) < 1:
        raise ValueError(f"key must have at least one pixel on every spatial axis, got {tuple(key.shape)}")
    if index is None and (element_encoding is not None or group_bias is not None):
        raise ValueError(
            "index must be given with element_encoding or group_bias, got None; make it with relation_index, or leave "
            "both out for relation 'frame'"
        )
    if offset_encoding is None and not window.is_global:
        raise ValueError(
            "offset_encoding must be given for a window, got None; use a global window (kernel_size=None) for "
            "attention without positions"
        )
    if index is not None and offset_encoding is not None and element_encoding is None:
        raise ValueError(f"element_encoding must have shape ({elements}, {channels}), got None")
    window.check(spatial)
    outputs = elements
    if index is not None:
        outputs = len(index)
        shapes = [(outputs, elements, elements), (elements, elements)]
        checks.tensor("index", index, torch.int64, shapes, query.device)
        _check_permutations(index)
    elif elements == 1 and offset_encoding is not None:  # lifting
        outputs = len(offset_encoding)
    checks.probability(dropout=dropout)
    checks.pixel_mask(mask, batch, spatial, query.device)
    checks.pixel_mask(key_mask, key.shape[0], key.shape[4:], key.device, "key_mask")
    offsets = window.count(spatial)
    for name, tensor, shape in (
        ("query", query, tuple(query.shape)),
        ("key", key, (*query.shape[:4], *key.shape[4:])),
        ("value", value, (*key.shape[:2], value.shape[2], *key.shape[3:])),
        ("offset_encoding", offset_encoding, (outputs, offsets, channels)),
        ("element_encoding", element_encoding, (elements, channels)),
        ("group_bias", group_bias, (heads, elements)),
        ("space_bias", space_bias, (heads, outputs, offsets)),
    ):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {tensor.dtype}")
        if tensor is not None:
            dtype = query.dtype if name in ("key", "value") else tensor.dtype
            checks.tensor(name, tensor, dtype, [shape], query.device)


@checks.of_values
def _check_permutations(index: Tensor) -> None:
    """Raise ValueError unless each row of ``index`` is a permutation of the group elements."""
    permutation = torch.arange(index.shape[-1])
    if not torch.equal(index.sort(-1).values, permutation.expand_as(index)):
        wanted = f"a permutation of 0 ... {index.shape[-1] - 1} along its last axis"
        raise ValueError(f"index must be {wanted}, got other values; make it with relation_index")
