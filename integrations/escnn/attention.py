"""Attention between field types, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention
from tg_equiattn.nn.performer.random_features import DrawsFeatures

from .module import RdModule
from .types import count_fields


class RdAttentionModule(RdModule):
    """An :class:`RdModule` of attention. Keys and values may come from other fields, of type ``context_type``."""

    def forward(
        self,
        input: GeometricTensor,
        mask: Tensor | None = None,
        *,
        context: GeometricTensor | None = None,
        context_mask: Tensor | None = None,
    ) -> GeometricTensor:
        """Attention of the pixels of ``input`` to its own pixels or to those of a context.

        Args:
            input: Fields of ``in_type``.
            mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels of ``input``. Masked pixels have no
                effect on other pixels, and their outputs are zero. ``None`` means that all pixels are valid.
            context: Fields of ``context_type`` from which keys and values are made; without a ``context_type``, fields
                of ``in_type``. ``None`` means ``input``.
            context_mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels of the context. Masked
                pixels are not keys. A query without a valid key has zero weights, so its attention is the bias of the
                output projection. ``None`` means ``mask``.
        """
        out = self.core(self._fields(input), mask, context=self._context(context), context_mask=context_mask)
        return self._wrap(out)

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        if context is None and self.context_type is not None:
            raise ValueError(
                f"context must be given, with fields of context_type, {self.context_type}, got None; for "
                "self-attention, make the layer with context_type=None"
            )
        return None if context is None else self._fields(context, "context", self.context_type)

    def attention_map(
        self, input: GeometricTensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None, *, context: GeometricTensor | None = None, context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention weights of chosen query pixels. Arguments and result are those of
        :meth:`tg_equiattn.nn.GroupAttention.attention_map`, with fields for ``x`` and ``context``. Group elements are
        in the order of ``fibergroup.elements``."""
        core: Any = self.core
        fields, context_fields = self._fields(input), self._context(context)
        return core.attention_map(fields, pixel, mask, context=context_fields, context_mask=context_mask)


class _Layer(RdAttentionModule):
    """An attention layer of the core between two field types."""

    def __init__(
        self, kind: Any, in_type: FieldType, out_type: FieldType, context_type: FieldType | None, **arguments: Any
    ) -> None:
        group, lifts = self.group_of(in_type, out_type), kind is LiftingAttention
        channels = count_fields("in_type", in_type, not lifts), count_fields("out_type", out_type, True)
        if context_type is not None:
            arguments["context_channels"] = count_fields("context_type", context_type, not lifts)
            if context_type.gspace != in_type.gspace:
                raise ValueError(
                    f"context_type must have the gspace of in_type, {in_type.gspace}, got {context_type.gspace}"
                )
        super().__init__(kind(group, *channels, **arguments), group, in_type, out_type, lifts, context_type)


class R2LiftingAttention(_Layer):
    """Lifting self-attention of images, from trivial to regular fields.

    The formula and its source are at :class:`tg_equiattn.nn.LiftingAttention`.

    Args:
        in_type (FieldType): Type of the input: trivial fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int): Odd side of the window in pixels, or ``None`` for attention to all pixels, at any image size.
            A window may be larger than the image; pixels outside are masked.
        heads (int): Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x
            3 window, 27 a cube.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, and at least one for each part of the axial encoding.
        window_shape (str): ``"square"`` or ``"disk"`` (in volumes a cube or a ball). ``None`` means a disk if the group
            has elements that do not map the pixel grid to itself (rotations by 45 degrees), since a square is not
            symmetric under them; else a square.
        padding_mode (str): ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side,
            so that the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        encoding (str): Encoding of relative positions. ``"axial"`` is one MLP for each axis, as published; ``"joint"``
            one MLP of the whole offset. ``None`` is attention by content alone and needs ``kernel_size=None``; keys may
            then come from an image of another size.
        locality (float or str): Strength of the locality in 1 / pixel^2, not negative: every head starts at its own
            offset and prefers pixels near it. ``"auto"`` means 4, and 1 for groups with elements that do not map the
            pixel grid to itself. ``None`` means no locality.
        content_heads (int): Number of heads with queries and keys. The other heads weight pixels by position alone,
            which makes them a convolution. ``None`` means an eighth of the heads, rounded up, and all of them without
            locality or over all pixels.
        context_type (FieldType): Type of the ``context`` of cross attention: fields of the same kind and gspace as
            ``in_type``, which every call then needs. ``None`` is self-attention; a call may still pass a context of
            ``in_type``.
        dropout (float): Probability of dropping an attention weight in training.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

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

    def __init__(
        self, in_type: FieldType, out_type: FieldType, kernel_size: int | None = 5, *, heads: int = 8,
        head_channels: int | None = None, window_shape: str | None = None, padding_mode: str = "mask",
        encoding: str | None = "axial", locality: float | str | None = "auto", content_heads: int | None = None,
        context_type: FieldType | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            LiftingAttention, in_type, out_type, context_type, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, window_shape=window_shape, padding_mode=padding_mode, encoding=encoding,
            locality=locality, content_heads=content_heads, dropout=dropout,
        )  # fmt: skip


class R3LiftingAttention(R2LiftingAttention):
    """Lifting self-attention of volumes; arguments are those of :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3


class R2GroupAttention(_Layer):
    """Group self-attention of images between regular fields.

    The formula, its source, and what changes with ``kernel_size=None`` are at :class:`tg_equiattn.nn.GroupAttention`.

    Args:
        in_type (FieldType): Type of the input: regular fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int): Odd side of the window in pixels, or ``None`` for attention to all pixels, at any image size.
            A window may be larger than the image; pixels outside are masked.
        heads (int): Number of attention heads. With locality every head starts at its own offset: nine heads fill a 3 x
            3 window, 27 a cube.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, and at least one for each part of the axial encoding.
        window_shape (str): ``"square"`` or ``"disk"`` (in volumes a cube or a ball). ``None`` means a disk if the group
            has elements that do not map the pixel grid to itself (rotations by 45 degrees), since a square is not
            symmetric under them; else a square.
        padding_mode (str): ``"mask"`` ends windows at the border. ``"circular"`` continues them at the opposite side,
            so that the layer is equivariant to rolls of the image; it needs a ``kernel_size``.
        relation (str): Which group elements meet. ``"frame"``: h attends to h, and elements meet in the linear maps.
            The others compare all elements, and name the u that the encoding sees: ``"ge_vit"`` (h^-1 t s^-1 t),
            ``"lifted"`` (t^-1 s), ``"relative"`` (t^-1 s with h = t only) and ``"gsa"`` (h^-1 t^-1 s), which is
            **not equivariant**, warns, and serves to reproduce the papers' comparison. ``None`` means ``"frame"``.
        encoding (str): Encoding of relative positions. ``"axial"`` is one MLP for each axis, as published; ``"joint"``
            one MLP of the whole offset. ``None`` is attention by content alone and needs ``kernel_size=None``; keys may
            then come from an image of another size.
        locality (float or str): Strength of the locality in 1 / pixel^2, not negative: every head starts at its own
            offset and prefers pixels near it. With ``relation="relative"`` every head also prefers one group element at
            the start. ``"auto"`` means 4, and 1 for groups with elements that do not map the pixel grid to itself.
            ``None`` means no locality.
        content_heads (int): Number of heads with queries and keys; needs ``relation="frame"``. The other heads weight
            pixels by position alone, which makes them a separable group convolution. ``None`` means an eighth of the
            heads, rounded up, and all of them without locality or over all pixels.
        context_type (FieldType): Type of the ``context`` of cross attention: fields of the same kind and gspace as
            ``in_type``, which every call then needs. ``None`` is self-attention; a call may still pass a context of
            ``in_type``.
        dropout (float): Probability of dropping an attention weight in training.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

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

    def __init__(
        self, in_type: FieldType, out_type: FieldType, kernel_size: int | None = 5, *, heads: int = 8,
        head_channels: int | None = None, window_shape: str | None = None, padding_mode: str = "mask",
        relation: str | None = None, encoding: str | None = "axial", locality: float | str | None = "auto",
        content_heads: int | None = None, context_type: FieldType | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            GroupAttention, in_type, out_type, context_type, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, window_shape=window_shape, padding_mode=padding_mode, relation=relation,
            encoding=encoding, locality=locality, content_heads=content_heads, dropout=dropout,
        )  # fmt: skip


class R3GroupAttention(R2GroupAttention):
    """Group self-attention of volumes; arguments are those of :class:`R2GroupAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3


class R2GlobalAttention(DrawsFeatures, _Layer):
    """Global group self-attention of images between regular fields, in time linear in pixels.

    The formula and its sources are at :class:`tg_equiattn.nn.GlobalGroupAttention`.

    Args:
        in_type (FieldType): Type of the input: regular fields.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        kernel_size (int): Odd side of the window in pixels, within which weights are exact.
        heads (int): Number of attention heads.
        head_channels (int): Channels of queries, keys and values in each head. ``None`` means the fields of
            ``out_type`` divided by ``heads``, rounded up, and at least one for each part of the axial encoding.
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
        redraw_interval (int): Training steps between two draws of the random features. ``None`` keeps the first draw.
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

    def __init__(
        self, in_type: FieldType, out_type: FieldType, kernel_size: int = 5, *, heads: int = 8,
        head_channels: int | None = None, window_shape: str | None = None, padding_mode: str = "mask",
        relation: str = "frame",
        encoding: str = "axial", locality: float | str | None = "auto", num_random_features: int | None = None,
        redraw_interval: int | None = None, context_type: FieldType | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            GlobalGroupAttention, in_type, out_type, context_type, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, window_shape=window_shape, padding_mode=padding_mode, relation=relation,
            encoding=encoding, locality=locality, num_random_features=num_random_features,
            redraw_interval=redraw_interval, dropout=dropout,
        )  # fmt: skip


class R3GlobalAttention(R2GlobalAttention):
    """Global group self-attention of volumes; arguments are those of :class:`R2GlobalAttention`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.
    """

    dim = 3
