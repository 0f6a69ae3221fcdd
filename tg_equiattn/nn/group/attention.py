"""Lifting and group self-attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...groups import DilationGroup, FiniteGroup
from .attention_layer import AttentionLayer
from .options import SHARED


class LiftingAttention(AttentionLayer):
    r"""Lifting self-attention: images or volumes in, regular features of a finite group out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_{j \in \eta(i)}
        \mathrm{softmax}_j\big(c\,\langle q_i,\; k_j + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v_j

    with the locality l of the head and :math:`c = 1/\sqrt{\mathrm{head\_channels}}`.

    Args:
        group: the finite group H; its dimension (2 or 3) is that of the input. Or scales times one
            (:func:`tg_equiattn.groups.dyadic`): offsets then are those of the window times h, with as many pixels.
        in_channels, out_channels: channels of the input and the output.
        heads: attention heads. With locality each starts at a place of its own: nine fill a 3 x 3 window, 27 a cube.
        head_channels: width of a head; ``None`` means half of ``out_channels``, as published.
        kernel_size: odd side of the window in pixels, or ``None`` for global attention at any image size. A window may
            be larger than the image; outside is masked, as at any border.
        locality: strength in 1 / pixel^2 by which every head looks at a place of its own at the start, not negative;
            ``"auto"`` means 4, and 1 for groups with elements that do not map the pixel grid to itself, which turn
            broad places better; ``None`` leaves attention to content and encoding alone, as the papers. A head e adds
            :math:`-\alpha_e |h^{-1}(x_j - x_i) - \Delta_e|^2` to its scores, both learned.
        padding_mode: ``"mask"``, where windows end at the border; or ``"circular"``, where they go on at the other side
            and the layer is equivariant to rolls of the image. Not for global attention.
        dropout: probability of dropping an attention weight in training.
        options: what few set, by name: ``encoding``, ``"axial"`` (an MLP for each axis), ``"joint"`` (one of the
            offset), ``"full"`` (one of offset and element) or ``None``, which needs ``kernel_size=None``: attention by
            content alone, whose context may have a size of its own; ``window_shape``, ``"square"`` or ``"disk"``, by
            default the disk where the group has elements that do not map the pixel grid to itself (rotations by 45
            degrees), which a square window serves badly; ``context_channels`` of the ``context`` of cross attention,
            which every call then needs, where without them the layer still takes one with ``in_channels``.

    Shapes:
        ``(B, in_channels, H, W)`` or ``(B, in_channels, D, H, W)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: GSA-Nets Eq. 14; GE-ViT Eq. 14; GSA-Nets App. E, Eq. 20, for scales, without its factor :math:`1/h^d`, with
    which the layer is not equivariant.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> layer = LiftingAttention(dihedral(4), 3, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 3, 9, 7)).shape
        torch.Size([2, 20, 8, 9, 7])
    """

    lifts = True

    def __init__(
        self, group: FiniteGroup | DilationGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int | None = 5, locality: float | str | None = "auto",
        padding_mode: str = "mask", dropout: float = 0.0, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            locality=locality, padding_mode=padding_mode, dropout=dropout, options=options,
        )  # fmt: skip


class GroupAttention(AttentionLayer):
    r"""Group self-attention: regular features of a finite group in and out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}\big(
        c\,\langle q(i,t),\; k(j,s) + \rho(h^{-1}(x_j - x_i), u) \rangle + l(h^{-1}(x_j - x_i), u)\big)\; v(j, s)

    with the locality l of the head. By default (relation ``"frame"``) every element attends in its own frame alone, and
    elements meet in the linear map of the values (:class:`GroupLinear`):

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_j \mathrm{softmax}_j\big(
        c\,\langle q(i,h),\; k(j,h) + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v(j, h), \qquad
        v(j, h) = \sum_s W_v[h^{-1} s]\; x(j, s) .

    With a head for each place, wide enough values, sharp places and no content it is a group convolution. Where all
    pixels are keys (``kernel_size=None``) queries and keys are :class:`GroupLinear`, too, so that a head can compare h
    with another element: keys start as queries of an element that each head has of its own.

    Args:
        relation: ``"frame"``; or which group element u the encoding sees: ``"ge_vit"`` (:math:`h^{-1}ts^{-1}t`),
            ``"lifted"`` (:math:`t^{-1}s`), ``"relative"`` (:math:`t^{-1}s` with h = t only, :math:`|H|` times cheaper),
            or ``"gsa"`` (:math:`h^{-1}t^{-1}s`), which is **not equivariant**, is kept to reproduce the comparison, and
            warns. ``None`` means ``"frame"``, and ``"relative"`` with scales, which allow no other.
        group, in_channels, out_channels, heads, head_channels, kernel_size, padding_mode, dropout: as
            :class:`LiftingAttention`, whose errors are raised.
        locality: as :class:`LiftingAttention`; with ``"relative"`` a head prefers a group element at the start, too.
        options: those of :class:`LiftingAttention`; and ``content_heads``, with ``"frame"``, how many heads look by
            content as well as by place, where the others, behind them, look by place alone (a separable group
            convolution, which is what the layer is with 0): by default an eighth of the heads, rounded up, and all of
            them where all pixels are keys or there is no locality to look by; and ``scale_window``, with scales, how
            many of them a scale attends to: an odd number, 3 by default, its own in the middle, the others where there
            are any.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``.

    Source: GSA-Nets Eq. 16; GE-ViT Eq. 16-17. u comes from the Cayley table, so the layer is equivariant for dihedral
    groups as well. ``"frame"`` is ours; see :func:`~tg_equiattn.functional.frame_attention`. Scales: GSA-Nets App. E,
    Eq. 21, without its factor :math:`1/h^{d+1}`.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    separable = True
    allowed = (*SHARED, "content_heads", "scale_window")
