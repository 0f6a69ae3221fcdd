"""The layers on volumes: gspaces of three dimensions."""

from __future__ import annotations

from .attention import RdGlobalAttention, RdGroupAttention, RdLiftingAttention
from .block import RdAttentionBlock, RdRegularGlobalNorm, RdRegularLayerNorm


class R3LiftingAttention(RdLiftingAttention):
    r"""Lifting self-attention of volumes from trivial to regular fields.

    See :class:`tg_equiattn.nn.LiftingAttention` for the formula, its source and the meaning of the arguments.

    Args:
        in_type (FieldType): trivial fields.
        out_type (FieldType): regular fields of the same gspace.
        heads: attention heads. With locality each starts at a place of its own: 27 fill a 3 x 3 x 3 window.
        kernel_size: odd side of the window, or ``None`` for global attention. Its cube grows fast: 3 has 27 places, 5
            has 125.
        neighbourhood: ``"square"``, a cube, or ``"disk"``, a ball; ``None`` means the ball where the gspace has
            elements that do not map the voxel grid to itself (``icoOnR3()``), the cube elsewhere.
        head_channels, encoding, encoding_eps, padding_mode, context_type, locality, dropout, scale, backend: as
            :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.

    Raises:
        ValueError: for other field types (with the layer or the 1x1x1 ``R3Conv`` that takes them), continuous gspaces
            (with the ``RestrictionModule``, where escnn has one), planar ones, and bad arguments.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.cylindricalOnR3(4)
        >>> volume = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> R3LiftingAttention(volume, hidden, heads=2, kernel_size=3).evaluate_output_shape((1, 3, 5, 6, 7))
        (1, 64, 5, 6, 7)
    """

    dim = 3


class R3GroupAttention(RdGroupAttention):
    r"""Group self-attention of volumes between regular fields.

    See :class:`tg_equiattn.nn.GroupAttention` for the formula, its source and the meaning of ``relation``.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        relation, content_heads: as :class:`R2GroupAttention`.
        heads, head_channels, kernel_size, encoding, encoding_eps, neighbourhood, padding_mode, context_type, locality,
            dropout, scale, backend: as :class:`R3LiftingAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.

    Raises:
        ValueError: as :class:`R3LiftingAttention`.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.dihedralOnR3(2)
        >>> hidden = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> layer = R3GroupAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        4
    """

    dim = 3


class R3GlobalAttention(RdGlobalAttention):
    r"""Global group self-attention of volumes between regular fields, in time linear in voxels: exact within a window,
    by random features beyond.

    See :class:`tg_equiattn.nn.GlobalGroupAttention` for the formula and its sources.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        kernel_size: odd side of the window in voxels.
        relation, num_features, redraw_interval, dropout: as :class:`R2GlobalAttention`.
        heads, head_channels, encoding, encoding_eps, neighbourhood, padding_mode, context_type, locality, scale,
            backend: as :class:`R3LiftingAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.

    Raises:
        ValueError: as :class:`R3LiftingAttention`.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.dihedralOnR3(2)
        >>> hidden = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> layer = R3GlobalAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        4
    """

    dim = 3


class R3AttentionBlock(RdAttentionBlock):
    """Norm, swish, group attention, norm, swish, dropout, shortcut, pointwise bottleneck, norm, shortcut, of volumes.

    See :class:`tg_equiattn.nn.GroupAttentionBlock`.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        reach: ``"window"``, :class:`R3GroupAttention`; or ``"global"``, :class:`R3GlobalAttention`.
        heads, value_dropout, norm, crop, drop_path, layer_scale, context_type: as :class:`R2AttentionBlock`.
        attention: further arguments of :class:`R3GroupAttention` or :class:`R3GlobalAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D - 2 crop, H - 2 crop, W - 2 crop)``.

    Raises:
        ValueError: as :class:`R3LiftingAttention`.
    """

    dim = 3


class R3RegularGlobalNorm(RdRegularGlobalNorm):
    """One mean and variance a volume, over the fields of a regular type, group elements and voxels, as published.

    See :class:`tg_equiattn.nn.RegularGlobalNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    dim = 3


class R3RegularLayerNorm(RdRegularLayerNorm):
    """Layer normalisation over the fields of a regular type, at every voxel and group element.

    See :class:`tg_equiattn.nn.RegularLayerNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    dim = 3
