"""Lifting and group self-attention over escnn field types."""

from __future__ import annotations

from escnn.nn import FieldType

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention

from .attention_module import R2AttentionModule
from .module import Redrawn
from .types import common_gspace, context_channels, group_from_gspace, regular_channels, trivial_channels


class R2LiftingAttention(R2AttentionModule):
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

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        encoding: str = "axial",
        encoding_eps: float = 1e-5,
        neighbourhood: str | None = None,
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        locality: float | str | None = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        group = group_from_gspace(common_gspace(in_type, out_type))
        core = LiftingAttention(
            group, trivial_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, encoding=encoding, encoding_eps=encoding_eps,
            neighbourhood=neighbourhood, padding_mode=padding_mode,
            context_channels=context_channels(in_type, context_type, trivial_channels), locality=locality,
            dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=True, context_type=context_type)


class R2GroupAttention(R2AttentionModule):
    r"""Group self-attention between regular fields.

    See :class:`tg_equiattn.nn.GroupAttention` for the formula, its source and the meaning of ``relation``.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        relation: ``"ge_vit"``, ``"lifted"``, ``"relative"``, or ``"gsa"``, which is not equivariant and warns.
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

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        relation: str = "ge_vit",
        encoding: str = "axial",
        encoding_eps: float = 1e-5,
        neighbourhood: str | None = None,
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        locality: float | str | None = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        group = group_from_gspace(common_gspace(in_type, out_type))
        core = GroupAttention(
            group, regular_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, relation=relation, encoding=encoding,
            encoding_eps=encoding_eps, neighbourhood=neighbourhood, padding_mode=padding_mode,
            context_channels=context_channels(in_type, context_type, regular_channels), locality=locality,
            dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)


class R2GlobalAttention(Redrawn, R2AttentionModule):
    r"""Global group self-attention between regular fields, in time linear in pixels: exact within a window, by random
    features beyond.

    See :class:`tg_equiattn.nn.GlobalGroupAttention` for the formula and its sources.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        kernel_size: odd side of the window in pixels.
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

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int = 5,
        num_features: int | None = None,
        redraw_interval: int | None = None,
        encoding: str = "axial",
        encoding_eps: float = 1e-5,
        neighbourhood: str | None = None,
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        locality: float | str | None = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        group = group_from_gspace(common_gspace(in_type, out_type))
        core = GlobalGroupAttention(
            group, regular_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, num_features=num_features,
            redraw_interval=redraw_interval, encoding=encoding, encoding_eps=encoding_eps, neighbourhood=neighbourhood,
            padding_mode=padding_mode, context_channels=context_channels(in_type, context_type, regular_channels),
            locality=locality, dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)
