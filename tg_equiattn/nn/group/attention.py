"""Lifting and group self-attention layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ...functional.group.attention import group_attention_impl
from ...functional.group.separable import lifting_by_position_impl
from ...groups import DilationGroup, FiniteGroup
from .attention_layer import AttentionLayer
from .linear import Pointwise, pointwise


class LiftingAttention(AttentionLayer):
    r"""Lifting self-attention: images or volumes in, regular features of a finite group out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_{j \in \eta(i)}
        \mathrm{softmax}_j\big(c\,\langle q_i,\; k_j + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v_j

    with the locality l of the head and :math:`c = 1/\sqrt{\mathrm{head\_channels}}`.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of the input. It may also be a group of scales times a
            finite group (:func:`tg_equiattn.groups.dyadic`): a window then has the same number of pixels at each scale.
        in_channels: Channels of the input.
        out_channels: Channels of the output, for each group element.
        heads: Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x 3
            window, 27 a cube.
        head_channels: Channels of queries, keys and values in each head. ``None`` means ``out_channels / heads``,
            rounded up, and at least one for each part of the axial encoding.
        kernel_size: Odd side of the window in pixels, or ``None`` for attention to all pixels, at any image size. A
            window may be larger than the image; pixels outside are masked.
        window_shape: ``"square"`` or ``"disk"``. ``None`` means a disk if the group has elements that do not map the
            pixel grid to itself (rotations by 45 degrees), since a square is not symmetric under them; else a square.
        padding_mode: ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side, so that
            the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        encoding: Encoding of relative positions. ``"axial"`` is one MLP for each axis, as published; ``"joint"`` one
            MLP of the whole offset. ``None`` is attention by content alone and needs ``kernel_size=None``; keys may
            then come from an image of another size.
        locality: Strength of the locality in 1 / pixel^2, not negative. Head e adds :math:`-\alpha_e |h^{-1}(x_j - x_i)
            - \Delta_e|^2` to its scores; both parameters are learned. ``"auto"`` means 4, and 1 for groups with
            elements that do not map the pixel grid to itself. ``None`` means no locality, as in the papers.
        content_heads: Number of heads with queries and keys. The other heads weight pixels by position alone, which
            makes them a convolution. ``None`` means an eighth of the heads, rounded up, and all of them without
            locality, over all pixels, or for groups of scales.
        context_channels: Channels of the ``context`` of cross attention, which every call then needs. ``None`` is self
            attention; a call may still pass a context with ``in_channels``.
        dropout: Probability of dropping an attention weight in training.

    Shapes:
        ``(B, in_channels, H, W)`` or ``(B, in_channels, D, H, W)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets Eq. 14; GE-ViT Eq. 14. Scales: GSA-Nets App. E, Eq. 20, without its factor :math:`1/h^d`, with
    which the layer is not equivariant.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> layer = LiftingAttention(dihedral(4), 3, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 3, 9, 7)).shape
        torch.Size([2, 20, 8, 9, 7])
    """

    lifts = separable = True

    def __init__(
        self, group: FiniteGroup | DilationGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int | None = 5, window_shape: str | None = None,
        padding_mode: str = "mask", encoding: str | None = "axial", locality: float | str | None = "auto",
        content_heads: int | None = None, context_channels: int | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            window_shape=window_shape, padding_mode=padding_mode, encoding=encoding, locality=locality,
            content_heads=content_heads, context_channels=context_channels, dropout=dropout,
        )  # fmt: skip

    def _attend(self, x: Tensor, context: Tensor | None, key_mask: Tensor | None, dropout: float) -> Tensor:
        """Heads without content and the projections of their values and outputs are one convolution."""
        count, window = self.content_heads, self.window
        if count == self.heads or window.is_global:
            return super()._attend(x, context, key_mask, dropout)
        context = x if context is None else context
        offset_encoding, _, space_bias, _ = self._scores(tuple(x.shape[2:]), x.device)
        width, rest = count * self.head_channels, (self.heads - count, self.head_channels)
        value, out = cast(Pointwise, self.value), self.out
        found = lifting_by_position_impl(
            context, key_mask, value.weight[width:, :, 0].unflatten(0, rest), value.bias[width:].unflatten(0, rest),
            out.weight[:, width:, 0].unflatten(1, rest), out.bias, space_bias[count:], window,
        )  # fmt: skip
        if self.query is None or self.key is None:
            return found
        maps = self.query(x), self.key(context), pointwise(context, value.weight[:width, :, 0], value.bias[:width])
        query, key, values = (y.unflatten(1, (count, -1)).unsqueeze(3) for y in maps)
        heads, _ = group_attention_impl(
            query, key, values, offset_encoding, None, None, window, space_bias[:count], None, dropout, key_mask,
            self.plain,
        )  # fmt: skip
        weight = out.weight[:, :width, 0].expand(x.shape[0], -1, -1)
        return torch.baddbmm(found.flatten(2), weight, heads.flatten(1, 2).flatten(2)).view_as(found)


class GroupAttention(AttentionLayer):
    r"""Group self-attention: regular features of a finite group in and out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}\big(
        c\,\langle q(i,t),\; k(j,s) + \rho(h^{-1}(x_j - x_i), u) \rangle + l(h^{-1}(x_j - x_i), u)\big)\; v(j, s)

    with the locality l of the head. With the default ``relation="frame"`` every element attends to the same element of
    other pixels, and elements meet in the linear map of the values (:class:`GroupLinear`):

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_j \mathrm{softmax}_j\big(
        c\,\langle q(i,h),\; k(j,h) + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v(j, h), \qquad
        v(j, h) = \sum_s W_v[h^{-1} s]\; x(j, s) .

    With one head for each offset, strong locality and no content this is a group convolution.

    **All pixels.** ``kernel_size=None`` changes more than the number of keys. Encodings see offsets divided by the
    image's longest side instead of the window's radius; locality still measures pixels. All heads have content. With
    ``"frame"`` the projections of queries and keys mix group elements too (:class:`GroupLinear`), so that a head can
    compare element h with another one; keys start as the queries of an element that differs from head to head. Time and
    memory grow with the square of the number of pixels. There is no circular padding.

    Args:
        group: The finite group H. Its dimension (2 or 3) is that of the input. It may also be a group of scales times a
            finite group (:func:`tg_equiattn.groups.dyadic`): a window then has the same number of pixels at each scale.
        in_channels: Channels of the input, for each group element.
        out_channels: Channels of the output, for each group element.
        heads: Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x 3
            window, 27 a cube.
        head_channels: Channels of queries, keys and values in each head. ``None`` means ``out_channels / heads``,
            rounded up, and at least one for each part of the axial encoding.
        kernel_size: Odd side of the window in pixels, or ``None`` for attention to all pixels, at any image size. A
            window may be larger than the image; pixels outside are masked.
        window_shape: ``"square"`` or ``"disk"``. ``None`` means a disk if the group has elements that do not map the
            pixel grid to itself (rotations by 45 degrees), since a square is not symmetric under them; else a square.
        padding_mode: ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side, so that
            the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        relation: Which group elements meet. ``"frame"``: h attends to h. The others compare all elements, and name the
            element u that the encoding sees: ``"ge_vit"`` (:math:`h^{-1}ts^{-1}t`), ``"lifted"`` (:math:`t^{-1}s`),
            ``"relative"`` (:math:`t^{-1}s` with h = t only, :math:`|H|` times less work) and ``"gsa"``
            (:math:`h^{-1}t^{-1}s`), which is **not equivariant**, warns, and serves to reproduce the papers'
            comparison. ``None`` means ``"frame"``, and with scales ``"relative"``, the only relation they allow.
        encoding: Encoding of relative positions. ``"axial"`` is one MLP for each axis, as published; ``"joint"`` one
            MLP of the whole offset. ``None`` is attention by content alone and needs ``kernel_size=None``; keys may
            then come from an image of another size.
        locality: Strength of the locality in 1 / pixel^2, not negative. Head e adds :math:`-\alpha_e |h^{-1}(x_j - x_i)
            - \Delta_e|^2` to its scores; both parameters are learned. With ``"relative"`` every head starts with a
            preference for one group element as well. ``"auto"`` means 4, and 1 for groups with elements that do not map
            the pixel grid to itself. ``None`` means no locality, as in the papers.
        content_heads: Number of heads with queries and keys; needs ``relation="frame"``. The other heads weight pixels
            by position alone, which makes them a separable group convolution. ``None`` means an eighth of the heads,
            rounded up, and all of them without locality or over all pixels.
        scale_window: Number of scales that one scale attends to, odd, centred at its own; only for groups of scales.
            ``None`` means 3.
        context_channels: Channels of the ``context`` of cross attention, which every call then needs. ``None`` is self
            attention; a call may still pass a context with ``in_channels``.
        dropout: Probability of dropping an attention weight in training.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets Eq. 16; GE-ViT Eq. 16-17. u comes from the Cayley table, so the layer is equivariant for dihedral
    groups as well. ``"frame"`` is ours; see :func:`~tg_equiattn.functional.group_attention`. Scales: GSA-Nets App. E,
    Eq. 21, without its factor :math:`1/h^{d+1}`.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    separable = True
