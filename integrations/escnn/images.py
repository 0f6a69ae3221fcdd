"""The layers on images: planar gspaces."""

from __future__ import annotations

from .attention import RdGlobalAttention, RdGroupAttention, RdLiftingAttention
from .block import RdAttentionBlock, RdRegularGlobalNorm, RdRegularLayerNorm


class R2LiftingAttention(RdLiftingAttention):
    r"""Lifting self-attention from trivial to regular fields.

    See :class:`tg_equiattn.nn.LiftingAttention` for the formula, its source and the meaning of the arguments.

    Args:
        in_type (FieldType): trivial fields.
        out_type (FieldType): regular fields of the same gspace.
        heads: attention heads. With locality each starts at a place of its own: nine fill a 3 x 3 window.
        head_channels: width of a head; ``None`` means half the number of output fields.
        kernel_size: odd side of the window, which may be larger than the image, or ``None`` for global attention.
        encoding: ``"axial"``, ``"joint"`` or ``"full"``.
        encoding_eps: of the layer norm in the encoding's MLP; the published models have 1e-12.
        neighbourhood: ``"square"`` or ``"disk"``; ``None`` means the disk where the gspace has elements that do not map
            the pixel grid to itself (``rot2dOnR2(8)``), the square elsewhere.
        padding_mode: ``"mask"``, where windows end at the border; or ``"circular"``, where they go on at the other side
            and the layer is equivariant to rolls of the image. Not for global attention.
        context_type (FieldType): fields of the ``context`` of cross attention, of the same kind and gspace as
            ``in_type``; every call then needs one. ``None`` for self-attention, which still takes a context of
            ``in_type``.
        locality: sharpness in 1 / pixel^2 by which every head looks at a place of its own at the start, as a tap of a
            convolution; ``"auto"`` means 4, and 1 for gspaces with elements that do not map the pixel grid to itself;
            ``None`` leaves attention to content and encoding alone, as the papers.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the scores; ``None`` means :math:`1/\sqrt{\mathrm{head\_channels}}`.
        backend: ``"torch"``, ``"triton"`` (a fused kernel for windows, on CUDA), ``"auto"``, the faster as measured, or
            ``"plain"``, standard operators alone.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

    Raises:
        ValueError: for other field types (with the layer or the 1x1 ``R2Conv`` that takes them), continuous gspaces
            (with the ``RestrictionModule``), and bad arguments.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> image = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> R2LiftingAttention(image, hidden, heads=2).evaluate_output_shape((1, 3, 9, 9))
        (1, 32, 9, 9)
    """

    dim = 2


class R2GroupAttention(RdGroupAttention):
    r"""Group self-attention between regular fields.

    See :class:`tg_equiattn.nn.GroupAttention` for the formula, its source and the meaning of ``relation``.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        relation: ``"frame"``, ``"ge_vit"``, ``"lifted"``, ``"relative"``, or ``"gsa"``, which is not equivariant and
            warns; ``None`` means ``"frame"``.
        content_heads: with ``"frame"``, how many heads look by content as well as by place; ``None`` means an eighth,
            rounded up, and all of them with ``kernel_size=None`` or without locality.
        heads, head_channels, kernel_size, encoding, encoding_eps, neighbourhood, padding_mode, context_type, locality,
            dropout, scale, backend: as :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

    Raises:
        ValueError: for other field types (with the layer or the 1x1 ``R2Conv`` that takes them), continuous gspaces
            (with the ``RestrictionModule``), and bad arguments.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.flipRot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> layer = R2GroupAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        8
    """

    dim = 2


class R2GlobalAttention(RdGlobalAttention):
    r"""Global group self-attention between regular fields, in time linear in pixels: exact within a window, by random
    features beyond.

    See :class:`tg_equiattn.nn.GlobalGroupAttention` for the formula and its sources.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        kernel_size: odd side of the window in pixels.
        relation: ``"frame"`` or ``"relative"``; ``None`` means ``"frame"``.
        num_features: random features; ``None`` means :math:`d \log d`, d the width of a head, at least 16.
        redraw_interval: training steps between draws of the random features; ``None`` means none by itself.
        dropout: probability, in training, of dropping a weight of the window, and an output of the far part.
        heads, head_channels, encoding, encoding_eps, neighbourhood, padding_mode, context_type, locality, scale,
            backend: as :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

    Raises:
        ValueError: for other field types (with the layer or the 1x1 ``R2Conv`` that takes them), continuous gspaces
            (with the ``RestrictionModule``), and bad arguments.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> layer = R2GlobalAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        4
    """

    dim = 2


class R2AttentionBlock(RdAttentionBlock):
    """Norm, swish, group attention, norm, swish, dropout, shortcut, pointwise bottleneck, norm, shortcut.

    See :class:`tg_equiattn.nn.GroupAttentionBlock`.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        heads: attention heads.
        value_dropout: probability of dropping an output of the attention in training.
        norm: ``"batch"``, ``"layer"`` or ``"global"``, as published; ``None`` means ``"batch"``.
        crop: pixels to remove at each side before the bottleneck.
        reach: ``"window"``, :class:`R2GroupAttention`; or ``"global"``, :class:`R2GlobalAttention`.
        drop_path: probability of leaving out each of the two branches of an image in training (stochastic depth).
        layer_scale: what each field of both branches is multiplied with at the start, learned from there
            (LayerScale); ``None`` means no such factors.
        context_type (FieldType): regular fields of the ``context`` of cross attention, which then has a norm of its
            own and which every call then needs; ``None`` for self-attention.
        attention: further arguments of :class:`R2GroupAttention` or :class:`R2GlobalAttention`.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H - 2 crop, W - 2 crop)``.

    Raises:
        ValueError: for other field types (with the 1x1 ``R2Conv`` that converts them) and bad arguments.
    """

    dim = 2


class R2RegularGlobalNorm(RdRegularGlobalNorm):
    """One mean and variance an image, over the fields of a regular type, group elements and pixels, as published.

    See :class:`tg_equiattn.nn.RegularGlobalNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    dim = 2


class R2RegularLayerNorm(RdRegularLayerNorm):
    """Layer normalisation over the fields of a regular type, at every pixel and group element.

    See :class:`tg_equiattn.nn.RegularLayerNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    dim = 2
