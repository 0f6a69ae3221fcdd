"""Attention, its residual block and layer normalisation between field types, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, GroupAttentionBlock, LiftingAttention, RegularLayerNorm

from .module import RdModule
from .types import count_fields


class RdAttentionModule(RdModule):
    """An :class:`RdModule` of attention, whose keys may be other fields' (``context_type``)."""

    def forward(
        self,
        input: GeometricTensor,
        mask: Tensor | None = None,
        *,
        context: GeometricTensor | None = None,
        context_mask: Tensor | None = None,
    ) -> GeometricTensor:
        """Attend, as :meth:`tg_equiattn.nn.GroupAttention.forward`; the context is of ``context_type``, or of
        ``in_type`` where there is none."""
        out = self.core(self._fields(input), mask, context=self._context(context), context_mask=context_mask)
        return self._wrap(out)

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        return None if context is None else self._fields(context, "context", self.context_type)

    def attention_map(
        self, input: GeometricTensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None, *, context: GeometricTensor | None = None, context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The weights of chosen pixels, as :meth:`tg_equiattn.nn.GroupAttention.attention_map`; elements are in the
        order of ``fibergroup.elements``."""
        core: Any = self.core
        fields, context_fields = self._fields(input), self._context(context)
        return core.attention_map(fields, pixel, mask, context=context_fields, context_mask=context_mask)


class _Layer(RdAttentionModule):
    """An attention layer of the core between two field types."""

    def __init__(
        self, kind: Any, in_type: FieldType, out_type: FieldType, context_type: FieldType | None,
        options: Mapping[str, Any] | None, **arguments: Any,
    ) -> None:  # fmt: skip
        group, lifts = self.group_of(in_type, out_type), kind is LiftingAttention
        channels = count_fields("in_type", in_type, not lifts), count_fields("out_type", out_type, True)
        if isinstance(options, Mapping) and "context_channels" in options:
            raise ValueError("options must leave context_channels to context_type, got both")
        if context_type is not None:
            options = {**(options or {}), "context_channels": count_fields("context_type", context_type, not lifts)}
            if context_type.gspace != in_type.gspace:
                raise ValueError(
                    f"context_type must have the gspace of in_type, {in_type.gspace}, got {context_type.gspace}"
                )
        core = kind(group, *channels, **arguments, options=options)
        super().__init__(core, group, in_type, out_type, lifts, context_type)


class R2LiftingAttention(_Layer):
    """Lifting self-attention of images, from trivial to regular fields: :class:`tg_equiattn.nn.LiftingAttention`, where
    the formula, its source and all arguments but field types are described.

    Args:
        in_type, out_type (FieldType): trivial fields, and regular ones of the same gspace.
        context_type (FieldType): fields of the ``context`` of cross attention, of the same kind and gspace as
            ``in_type``; every call then needs one. ``None`` for self-attention, which still takes a context of
            ``in_type``.

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

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, heads: int = 8, head_channels: int | None = None,
        kernel_size: int | None = 5, locality: float | str | None = "auto", padding_mode: str = "mask",
        context_type: FieldType | None = None, dropout: float = 0.0, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            LiftingAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, locality=locality, padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip


class R3LiftingAttention(R2LiftingAttention):
    """:class:`R2LiftingAttention` of volumes: ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``;
    ``"square"`` is a cube, ``"disk"`` a ball."""

    dim = 3


class R2GroupAttention(_Layer):
    """Group self-attention of images between regular fields: :class:`tg_equiattn.nn.GroupAttention`, where the formula,
    its source and all arguments but field types are described.

    Args:
        in_type, out_type (FieldType): regular fields of one gspace.
        context_type (FieldType): as :class:`R2LiftingAttention`.

    Shapes and errors are those of :class:`R2LiftingAttention`; an example is that of :class:`R2AttentionBlock`.
    """

    dim = 2

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, heads: int = 8, head_channels: int | None = None,
        kernel_size: int | None = 5, relation: str | None = None, locality: float | str | None = "auto",
        padding_mode: str = "mask", context_type: FieldType | None = None, dropout: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            GroupAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, relation=relation, locality=locality, padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip


class R3GroupAttention(R2GroupAttention):
    """:class:`R2GroupAttention` of volumes, as :class:`R3LiftingAttention`."""

    dim = 3


class R2GlobalAttention(_Layer):
    """Global group self-attention of images between regular fields, in time linear in pixels:
    :class:`tg_equiattn.nn.GlobalGroupAttention`, where the formula, its sources and all arguments but field types are
    described. Fields, shapes and errors are those of :class:`R2GroupAttention`.
    """

    dim = 2

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, heads: int = 8, head_channels: int | None = None,
        kernel_size: int = 5, relation: str | None = None, num_features: int | None = None,
        locality: float | str | None = "auto", padding_mode: str = "mask", context_type: FieldType | None = None,
        dropout: float = 0.0, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            GlobalGroupAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, relation=relation, num_features=num_features, locality=locality,
            padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """As :meth:`tg_equiattn.nn.GlobalGroupAttention.redraw_features`."""
        self.core.redraw_features(generator)  # type: ignore[operator]


class R3GlobalAttention(R2GlobalAttention):
    """:class:`R2GlobalAttention` of volumes, as :class:`R3LiftingAttention`."""

    dim = 3


class R2AttentionBlock(RdAttentionModule):
    """The residual block of group attention of images: :class:`tg_equiattn.nn.GroupAttentionBlock`, where the formula,
    its source and all arguments but the first are described.

    Args:
        attention: an :class:`R2GroupAttention` or :class:`R2GlobalAttention`, whose fields are those of the block.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H - 2 crop, W - 2 crop)``.

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

    def __init__(
        self, attention: R2GroupAttention | R2GlobalAttention, *, norm: str = "batch", dropout: float = 0.0,
        crop: int = 0, drop_path: float = 0.0, layer_scale: float | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(attention, (R2GroupAttention, R2GlobalAttention)):
            name = f"R{self.dim}"
            raise ValueError(
                f"attention must be an {name}GroupAttention or an {name}GlobalAttention, got {type(attention).__name__}"
            )
        self.check_dimension(attention.in_type, "attention")
        core = GroupAttentionBlock(
            attention.core,  # type: ignore[arg-type]
            norm=norm,
            dropout=dropout,
            crop=crop,
            drop_path=drop_path,
            layer_scale=layer_scale,
        )
        super().__init__(core, attention.group, attention.in_type, attention.out_type, False, attention.context_type)
        self.crop = crop
        self.check_size = tuple(side + 2 * crop for side in self.check_size)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """As :meth:`tg_equiattn.nn.GroupAttentionBlock.redraw_features`."""
        self.core.redraw_features(generator)  # type: ignore[operator]

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(side - 2 * self.crop for side in sides))


class R3AttentionBlock(R2AttentionBlock):
    """:class:`R2AttentionBlock` of volumes, around an :class:`R3GroupAttention` or :class:`R3GlobalAttention`."""

    dim = 3


class R2RegularLayerNorm(RdModule):
    """Layer normalisation over the fields of a regular type, which the output has, too, at every pixel and group
    element: :class:`tg_equiattn.nn.RegularLayerNorm`."""

    dim = 2

    def __init__(self, in_type: FieldType, eps: float = 1e-5) -> None:
        group = self.group_of(in_type, in_type)
        core = RegularLayerNorm(count_fields("in_type", in_type, True), eps)
        super().__init__(core, group, in_type, in_type)


class R3RegularLayerNorm(R2RegularLayerNorm):
    """:class:`R2RegularLayerNorm` of volumes."""

    dim = 3
