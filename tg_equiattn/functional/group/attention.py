"""Lifting and group self-attention as pure functions of queries, keys, values and encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from ...grids import Neighbourhood
from ..backend import compiler_fuses, use_plain
from .fused_frames import fused_relative_attention
from .hashed_dropout import draw_seed
from .masks import zero_where_hidden
from .operands import check_group_attention
from .plan import plain_group_attention
from .tiled_attention import group_attention_op

_FUSED_ELEMENTS = 12  # of a group: compilers see each by itself


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rho_space: Tensor,
    rho_group: Tensor | None,
    index: Tensor,
    *,
    neighbourhood: Neighbourhood,
    space_bias: Tensor | None = None,
    group_bias: Tensor | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Group self-attention of regular features.

    .. math::
        \mathrm{score}(h, t, j, s) = c\, \langle q(i,t),\;
        k(j,s) + \rho_{space}(h^{-1}(x_j - x_i)) + \rho_{group}(u) \rangle
        + b_{space}(h^{-1}(x_j - x_i)) + b_{group}(u), \qquad
        \mathrm{out}(i, h) = \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}(\mathrm{score})\; v(j, s)

    with u = ``index[h, t, s]``, :math:`c = 1/\sqrt{C}`, and biases that each head has of its own. With an ``index`` of
    two axes (relation ``"relative"``) only h = t is formed and there is no sum over t.

    Weights are products of a content, a spatial and a group factor; with a full encoding, an ``index`` of two axes or,
    on the CPU, scores too extreme for products, every score is computed. Tiles are computed again in backward.

    Args:
        rho_space: encoding of rotated offsets, or the full encoding of offsets and u.
        rho_group: encoding of u; ``None`` if ``rho_space`` has an axis for u.
        index: u of each (h, t, s), a permutation along s; see :func:`tg_equiattn.encodings.relation_index`.
        neighbourhood: the window, or the whole grid; it also says what is outside of the image.
        space_bias, group_bias: of rotated offsets and of u, for each head; ``None`` means none.
        dropout: probability of dropping a weight after the sum over t.
        mask: true where there are pixels. The others are no keys, whatever they hold, and their outputs are zero.

    Shapes:
        - query, key: ``(B, heads, C, |H|, *spatial)``; value: ``(B, heads, Cv, |H|, *spatial)``
        - rho_space: ``(|H|, D, C)``, or full ``(|H|, D, |H|, C)``; D offsets of the window, or with global attention
          of all pairs, in the order of :meth:`Neighbourhood.offsets`
        - rho_group: ``(|H|, C)``; index: ``(|H|, |H|, |H|)`` or ``(|H|, |H|)``
        - space_bias: ``(heads, |H|, D)``; group_bias: ``(heads, |H|)``; mask: bool ``(B or 1, *spatial)``
        - output: ``(B, heads, Cv, |H|, *spatial)``, in the dtype of ``value``

    Raises:
        ValueError: for shapes, dtypes, devices or options that do not fit.

    Source: GSA-Nets Eq. 14-16 (arXiv:2010.00977), GE-ViT Eq. 14-17 (arXiv:2306.06722). The published code divides
    scores by the square root of the layer's input width; here by that of the head width.
    """
    check_group_attention(
        query, key, value, rho_space, rho_group, index, neighbourhood, space_bias, group_bias, dropout, mask
    )
    query, key, value = (zero_where_hidden(x, mask) for x in (query, key, value))
    return checked_group_attention(
        query, key, value, rho_space, rho_group, index, neighbourhood, space_bias, group_bias, dropout, mask
    )[0]


def checked_group_attention(
    query, key, value, rho_space, rho_group, index, neighbourhood, space_bias=None, group_bias=None, dropout=0.0,
    mask=None, plain=False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`group_attention` of operands that are known to fit and to hold numbers; also the logarithm (B, heads, |H|,
    *spatial) of a query's sum of exponentials of scores for an ``index`` of two axes, else an empty tensor."""
    path = "compiled" if torch.compiler.is_compiling() else "eager"
    path = "plain" if use_plain(plain) else path
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rho_space, rho_group = rho_space.to(dtype), None if rho_group is None else rho_group.to(dtype)
    window = neighbourhood.kernel_size or 0, neighbourhood.selection, neighbourhood.circular
    fuses = path == "compiled" and index.ndim == 2 and len(index) <= _FUSED_ELEMENTS and window[0] and not dropout
    if fuses and compiler_fuses(query, query[:, :, 0].numel() * rho_space.shape[1] // 4):
        query, key, features = (x.to(dtype) for x in (query * query.shape[2] ** -0.5, key, value))
        space_bias, group_bias = (None if x is None else x.to(dtype) for x in (space_bias, group_bias))
        out, level = fused_relative_attention(
            query, key, features, rho_space, rho_group, index, space_bias, group_bias, mask, *window
        )
        return zero_where_hidden(out, mask).to(value.dtype), level
    if space_bias is not None or group_bias is not None:
        rho_space, rho_group = _with_biases(rho_space, rho_group, query.shape[1], space_bias, group_bias)
    batch_and_heads = query.shape[:2]
    query, key, features = (x.to(dtype).flatten(0, 1) for x in (query, key, value))
    there = None if mask is None else mask[:, None].expand(*batch_and_heads, *mask.shape[1:]).flatten(0, 1)
    attend = plain_group_attention if path == "plain" else group_attention_op
    out, level = attend(
        query * query.shape[1] ** -0.5, key, features, rho_space,
        rho_space.new_zeros(0) if rho_group is None else rho_group, index, there,
        draw_seed(dropout, query.device), *window, dropout, path,
    )  # fmt: skip
    level = level.unflatten(0, batch_and_heads) if index.ndim == 2 else level
    return zero_where_hidden(out.unflatten(0, batch_and_heads), mask).to(value.dtype), level


def lifting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rho_space: Tensor,
    *,
    neighbourhood: Neighbourhood,
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
        - rho_space: ``(|H|, D, C)``; space_bias: ``(heads, |H|, D)``
        - output: ``(B, heads, Cv, |H|, *spatial)``

    Source: GSA-Nets Eq. 14, GE-ViT Eq. 14.
    """
    if query.ndim not in (5, 6):
        raise ValueError(f"query must have shape (B, heads, C, *spatial), got {tuple(query.shape)}")
    if rho_space.ndim != 3:
        raise ValueError(f"rho_space must have shape (|H|, D, C), got {tuple(rho_space.shape)}")
    query, key, value = (x.unsqueeze(3) for x in (query, key, value))
    index = torch.zeros(len(rho_space), 1, 1, dtype=torch.int64, device=query.device)
    return group_attention(
        query, key, value, rho_space, rho_space.new_zeros(1, rho_space.shape[-1]), index, neighbourhood=neighbourhood,
        space_bias=space_bias, dropout=dropout, mask=mask,
    )  # fmt: skip


def _with_biases(rho_space, rho_group, heads, space_bias, group_bias) -> tuple[Tensor, Tensor | None]:
    """Both encodings with one more channel a head, its bias: cheaper than a tensor of biases for every pixel, and their
    gradients come with those of the encodings."""

    def joined(rho: Tensor, bias: Tensor | None) -> Tensor:
        bias = rho.new_zeros(()) if bias is None else bias.to(rho.dtype)
        return torch.cat([rho, bias.expand(heads, *rho.shape[:-1]).movedim(0, -1)], -1)

    if rho_group is not None:
        return joined(rho_space, space_bias), joined(rho_group, group_bias)
    space_bias = None if space_bias is None else space_bias[..., None]  # a full encoding has both
    group_bias = None if group_bias is None else group_bias[:, None, None]
    return joined(rho_space, sum(x for x in (space_bias, group_bias) if x is not None)), None
