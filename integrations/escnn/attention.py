"""Attention between field types, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from typing import Any, ClassVar

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.linear.random_features import DrawsFeatures
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, GroupAttentionBlock, LiftingAttention, RegularLayerNorm

from .module import RdAttentionModule, RdModule
from .types import count_fields


class _Layer(RdAttentionModule):
    """An attention layer of the core between two field types."""

    kind: ClassVar[Any]  # the layer of the core

    def __init__(
        self, in_type: FieldType, out_type: FieldType, kernel_size: int | tuple[int, ...] | None = 5, *,
        context_type: FieldType | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        group, lifts = self.group_of(in_type, out_type), self.kind.lifts
        channels = count_fields("in_type", in_type, not lifts), count_fields("out_type", out_type, True)
        if context_type is not None:
            arguments["context_channels"] = count_fields("context_type", context_type, not lifts)
            if context_type.gspace != in_type.gspace:
                raise ValueError(
                    f"context_type must have the gspace of in_type, {in_type.gspace}, got {context_type.gspace}"
                )
        core = self.kind(group, *channels, kernel_size=kernel_size, **arguments)
        super().__init__(core, group, in_type, out_type, lifts, context_type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        stride: Any = self.core.stride
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(-(-side // stride) for side in sides))


@checks.arguments_of(LiftingAttention, "context_channels")
class RdLiftingAttention(_Layer):
    kind = LiftingAttention


class R2LiftingAttention(RdLiftingAttention):
    """Lifting self-attention of images, from trivial to regular fields. By default, one head of eight has content.

    The formula and its source are at :class:`tg_equiattn.nn.LiftingAttention`.

    Args:
        in_type (FieldType): Type of the input: trivial fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int or tuple): Odd side of the window in pixels, a side for each axis, such as ``(3, 5, 5)`` for
            volumes of thick slices, or ``None`` for attention to all pixels, at any image size. All group elements must
            keep the window. A window may be larger than the image; pixels outside are masked.
        heads (int): Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x
            3 window, 27 a cube.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, but at least one for each axis of the image, and an even
            number for ``"rotary"``.
        window_shape (str): ``"square"`` or ``"disk"`` (in volumes a cube or a ball). ``None`` means a disk if the group
            has elements that do not map the pixel grid to itself (rotations by 45 degrees), since a square is not
            symmetric under them; else a square.
        padding_mode (str): ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side,
            so that the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        encoding (str): Encoding of relative positions. ``"rotary"``, for all pixels, rotates queries and keys by angles
            omega . h^-1 x with learned frequencies and positions x in pixels from the middle of the image; torch's
            fused attention then needs no table of pairs. ``"axial"`` is one MLP for each axis, as published;
            ``"joint"`` one MLP of the whole offset. ``None`` is attention by content alone and needs
            ``kernel_size=None``. With ``"rotary"`` and ``None``, keys may come from an image of another size.
            ``"auto"`` means ``"rotary"`` over all pixels without locality, and otherwise ``"axial"``.
        locality (float or str): Strength of the locality in 1 / pixel^2, not negative: every head starts at its own
            offset and prefers pixels near it. ``None`` means no locality. ``"auto"`` means ``None`` over all pixels;
            within a window 4, and 1 for groups with elements that do not map the pixel grid to itself.
        content_heads (int): Number of heads with queries and keys. The other heads weight pixels by position alone,
            which makes them a convolution (with zero padding for ``"mask"``). ``None`` means an eighth of the heads,
            rounded up, and all of them without locality or over all pixels.
        context_type (FieldType): Type of the ``context`` of cross attention: fields of the same kind and gspace as
            ``in_type``, which every call then needs. ``None`` is self-attention; a call may still pass a context of
            ``in_type``. With a ``kernel_size`` of at least 3 and ``padding_mode="mask"``, input and context may have n
            pixels and 2 n or 2 n - 1 pixels along every axis, in either order. The window then counts pixels of the
            finer grid.
        stride (int): 1, or 2 for queries at every second pixel only, which give (n + 1) / 2 pixels for n. Keys are all
            pixels of the window. Sides must be odd, since every second pixel of even sides is not symmetric. A stride
            needs a ``kernel_size`` and ``padding_mode="mask"``, and takes no context.
        dropout (float): Probability, in training, of dropping an attention weight of a head with content.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``; ``(H + 1) / 2`` and ``(W + 1) / 2`` with a stride.

    Raises:
        ValueError: if a field type is not supported (the error names the layer or the 1x1 convolution to use), if the
            gspace is continuous (the error names the ``RestrictionModule``), or if another argument is not allowed.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> image = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> R2LiftingAttention(image, hidden, heads=2).evaluate_output_shape((1, 3, 9, 9))
        (1, 32, 9, 9)
    """

    dim = 2


class R3LiftingAttention(RdLiftingAttention):
    """Lifting self-attention of volumes; arguments are those of :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3


@checks.arguments_of(GroupAttention, "context_channels")
class RdGroupAttention(_Layer):
    kind = GroupAttention


class R2GroupAttention(RdGroupAttention):
    """Group self-attention of images between regular fields.

    The formula, its source, and what changes with ``kernel_size=None`` are at :class:`tg_equiattn.nn.GroupAttention`.

    Args:
        in_type (FieldType): Type of the input: regular fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int or tuple): Odd side of the window in pixels, a side for each axis, such as ``(3, 5, 5)`` for
            volumes of thick slices, or ``None`` for attention to all pixels, at any image size. All group elements must
            keep the window. A window may be larger than the image; pixels outside are masked.
        heads (int): Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x
            3 window, 27 a cube.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, but at least one for each axis of the image, plus one with a
            relation other than ``"frame"``, and an even number for ``"rotary"``.
        window_shape (str): ``"square"`` or ``"disk"`` (in volumes a cube or a ball). ``None`` means a disk if the group
            has elements that do not map the pixel grid to itself (rotations by 45 degrees), since a square is not
            symmetric under them; else a square.
        padding_mode (str): ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side,
            so that the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        relation (str): Which group elements are compared. ``"frame"``: element h attends to element h, and linear maps
            mix elements. The others compare all elements, and name the u that the encoding sees: ``"ge_vit"``
            (h^-1 t s^-1 t), ``"lifted"`` (t^-1 s), ``"relative"`` (t^-1 s with h = t only) and ``"gsa"``
            (h^-1 t^-1 s), which is **not equivariant**, warns, and serves to reproduce the papers' comparison.
        encoding (str): Encoding of relative positions. ``"rotary"``, for all pixels with ``"frame"`` or
            ``"relative"``, rotates queries and keys by angles omega . h^-1 x with learned frequencies and positions x
            in pixels from the middle of the image; torch's fused attention then needs no table of pairs. ``"axial"`` is
            one MLP for each axis, as published; ``"joint"`` one MLP of the whole offset. ``None`` is attention by
            content alone and needs ``kernel_size=None``. With ``"rotary"`` and ``None``, keys may come from an image of
            another size. ``"auto"`` means ``"rotary"`` over all pixels without locality with these relations, and
            otherwise ``"axial"``.
        locality (float or str): Strength of the locality in 1 / pixel^2, not negative: every head starts at its own
            offset and prefers pixels near it. With ``relation="relative"`` every head also prefers one group element at
            the start. ``None`` means no locality. ``"auto"`` means ``None`` over all pixels; within a window 4, and 1
            for groups with elements that do not map the pixel grid to itself.
        content_heads (int): Number of heads with queries and keys. The other heads weight pixels by position alone,
            which makes them a separable group convolution (with zero padding for ``"mask"``). ``None`` means half of
            the heads, rounded up, for ``"frame"`` within a window and with locality, and otherwise all of them.
        context_type (FieldType): Type of the ``context`` of cross attention: fields of the same kind and gspace as
            ``in_type``, which every call then needs. ``None`` is self-attention; a call may still pass a context of
            ``in_type``. With a ``kernel_size`` of at least 3 and ``padding_mode="mask"``, input and context may have n
            pixels and 2 n or 2 n - 1 pixels along every axis, in either order. The window then counts pixels of the
            finer grid.
        stride (int): 1, or 2 for queries at every second pixel only, which give (n + 1) / 2 pixels for n. Keys are all
            pixels of the window. Sides must be odd, since every second pixel of even sides is not symmetric. A stride
            needs a ``kernel_size`` and ``padding_mode="mask"``, and takes no context.
        dropout (float): Probability, in training, of dropping an attention weight of a head with content.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``; ``(H + 1) / 2`` and ``(W + 1) / 2`` with a stride.

    Raises:
        ValueError: if a field type is not supported (the error names the layer or the 1x1 convolution to use), if the
            gspace is continuous (the error names the ``RestrictionModule``), or if another argument is not allowed.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> R2GroupAttention(hidden, hidden, heads=2).evaluate_output_shape((1, 32, 9, 9))
        (1, 32, 9, 9)
    """

    dim = 2


class R3GroupAttention(RdGroupAttention):
    """Group self-attention of volumes; arguments are those of :class:`R2GroupAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3


@checks.arguments_of(GlobalGroupAttention, "context_channels")
class RdGlobalAttention(DrawsFeatures, _Layer):
    kind = GlobalGroupAttention


class R2GlobalAttention(RdGlobalAttention):
    """Global group self-attention of images between regular fields, in time linear in pixels.

    The formula and its sources are at :class:`tg_equiattn.nn.GlobalGroupAttention`.

    Args:
        in_type (FieldType): Type of the input: regular fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int or tuple): Odd side of the window in pixels, within which weights are exact, or a side for each
            axis. All group elements must keep the window.
        heads (int): Number of attention heads.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, but at least one for each axis of the image, plus one with
            ``"relative"``.
        window_shape (str): ``"square"`` or ``"disk"`` (in volumes a cube or a ball). ``None`` means a disk if the group
            has elements that do not map the pixel grid to itself (rotations by 45 degrees), since a square is not
            symmetric under them; else a square.
        padding_mode (str): ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side.
        relation (str): ``"frame"``: element h attends to h. ``"relative"``: h attends to all elements s, and the
            encoding sees h^-1 s.
        encoding (str): Encoding of relative positions in the window. ``"axial"`` is one MLP for each axis, ``"joint"``
            one MLP of the whole offset.
        locality (float or str): Strength of the locality in 1 / pixel^2, not negative: every head starts at its own
            offset and prefers pixels near it. ``"auto"`` means 4, and 1 for groups with elements that do not map the
            pixel grid to itself. ``None`` means no locality.
        num_random_features (int): Number of random features. More features make the weights of distant
            pixels more accurate at proportional cost. ``None`` means d log d, d the width of a head, at least 16.
        context_type (FieldType): Type of the ``context`` of cross attention: fields of the same kind and gspace as
            ``in_type``, which every call then needs. ``None`` is self-attention; a call may still pass a context of
            ``in_type``.
        dropout (float): Probability, in training, of dropping an attention weight of the window and an output of the
            random features.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

    Raises:
        ValueError: if a field type is not supported (the error names the layer or the 1x1 convolution to use), if the
            gspace is continuous (the error names the ``RestrictionModule``), or if another argument is not allowed.
    """

    dim = 2


class R3GlobalAttention(RdGlobalAttention):
    """Global group self-attention of volumes; arguments are those of :class:`R2GlobalAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3


class RdAttentionBlock(DrawsFeatures, RdAttentionModule):
    def __init__(
        self, attention: RdGroupAttention | RdGlobalAttention, *, norm: str = "batch", dropout: float = 0.0,
        crop: int = 0,
    ) -> None:  # fmt: skip
        if not isinstance(attention, (RdGroupAttention, RdGlobalAttention)):
            name = f"R{self.dim}"
            raise ValueError(
                f"attention must be an {name}GroupAttention or an {name}GlobalAttention, got {type(attention).__name__}"
            )
        self.check_dimension(attention.in_type, "attention")
        core = GroupAttentionBlock(attention.core, norm=norm, dropout=dropout, crop=crop)  # type: ignore[arg-type]
        super().__init__(core, attention.group, attention.in_type, attention.out_type, False, attention.context_type)
        self.crop, self.norm = crop, norm
        self.check_size = tuple(side + 2 * crop for side in self.check_size)

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        if context is not None and self.context_type is None and self.norm == "batch":
            raise ValueError(
                "context_type must be given with norm='batch', got None and a context; make the attention with "
                "context_type, so that the context has its own statistics, or use norm='layer'"
            )
        return super()._context(context)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(side - 2 * self.crop for side in sides))


class R2AttentionBlock(RdAttentionBlock):
    """The residual block of group attention of images.

    The formula and its source are at :class:`tg_equiattn.nn.GroupAttentionBlock`.

    Args:
        attention (R2GroupAttention or R2GlobalAttention): The attention layer, with ``stride=1``. Its types are those
            of the block.
        norm (str): ``"batch"``, one mean and variance for each field; ``"layer"`` (:class:`R2RegularLayerNorm`); or
            ``"global"``, as published, which mixes all pixels of an image.
        dropout (float): Probability of dropping an output of the attention in training.
        crop (int): Pixels to remove at each side before the bottleneck.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H - 2 crop, W - 2 crop)``.

    Raises:
        ValueError: if an argument is not allowed, or if ``attention`` is for fields of another dimensionality.

    Example:
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2AttentionBlock, R2GroupAttention
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> block = R2AttentionBlock(R2GroupAttention(hidden, hidden, heads=2, kernel_size=3), norm="layer")
        >>> len(block.check_equivariance())
        4
    """

    dim = 2


class R3AttentionBlock(RdAttentionBlock):
    """The residual block of group attention of volumes, around an :class:`R3GroupAttention` or an
    :class:`R3GlobalAttention`; arguments are those of :class:`R2AttentionBlock`."""

    dim = 3


class RdRegularLayerNorm(RdModule):
    def __init__(self, in_type: FieldType, eps: float = 1e-5) -> None:
        group = self.group_of(in_type, in_type)
        core = RegularLayerNorm(count_fields("in_type", in_type, True), eps)
        super().__init__(core, group, in_type, in_type)


class R2RegularLayerNorm(RdRegularLayerNorm):
    """Layer normalisation over the regular fields of images, separately at every pixel and group element.

    The formula and its source are at :class:`tg_equiattn.nn.RegularLayerNorm`.

    Args:
        in_type (FieldType): Type of input and output: regular fields.
        eps (float): Constant that is added to the variance. The default is 1e-5.

    Shapes:
        ``(B, in_type.size, H, W)`` -> the same.

    Raises:
        ValueError: if ``in_type`` does not consist of regular fields of a discrete gspace of images.
    """

    dim = 2


class R3RegularLayerNorm(RdRegularLayerNorm):
    """Layer normalisation of volumes; arguments are those of :class:`R2RegularLayerNorm`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> the same.
    """

    dim = 3
