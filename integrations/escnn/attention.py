"""Lifting and group self-attention between field types, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention

from .module import RdModule
from .types import context_channels, regular_channels, trivial_channels


class RdAttentionModule(RdModule):
    """An :class:`RdModule` of attention, which can be told what pixels there are, and whose keys may be other fields'
    (``context_type``; None where it is self-attention)."""

    context_type: FieldType | None = None

    @property
    def _inputs(self) -> dict[str, FieldType]:
        return super()._inputs | ({} if self.context_type is None else {"context": self.context_type})

    def forward(
        self, input: GeometricTensor, mask: Tensor | None = None, *, context: GeometricTensor | None = None
    ) -> GeometricTensor:
        """Attend.

        Args:
            input: fields, which the queries are of.
            mask: bool ``(B, *spatial)`` or ``(1, *spatial)``, true where there are pixels; the others are no keys,
                whatever they hold, and their outputs are zero.
            context: fields of ``context_type`` on the same grid, which keys and values are of; ``None`` means the
                input.
        """
        return self._wrap(self.core(self._fields(input), mask, context=self._context(context)))

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        return None if context is None else self._fields(context, "context", self.context_type)

    def attention_map(
        self,
        input: GeometricTensor,
        pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None,
        *,
        context: GeometricTensor | None = None,
    ) -> Tensor:
        """The attention weights of chosen pixels; see :meth:`tg_equiattn.nn.GroupAttention.attention_map`, whose layout
        this has. Elements are in the order of ``fibergroup.elements``."""
        core: Any = self.core
        return core.attention_map(self._fields(input), pixel, mask, context=self._context(context))


class _Layer(RdAttentionModule):
    """An attention layer of the core between two field types."""

    def __init__(
        self,
        kind: Any,
        in_type: FieldType,
        out_type: FieldType,
        context_type: FieldType | None,
        options: Mapping[str, Any] | None,
        **arguments: Any,
    ) -> None:
        group, lifts = self.group_of(in_type, out_type), kind is LiftingAttention
        count = trivial_channels if lifts else regular_channels
        channels = count("in_type", in_type), regular_channels("out_type", out_type)
        if isinstance(options, Mapping) and "context_channels" in options:
            raise ValueError("options must leave context_channels to context_type, got both")
        if context_type is not None:
            options = {**(options or {}), "context_channels": context_channels(in_type, context_type, count)}
        super().__init__(kind(group, *channels, **arguments, options=options), group, in_type, out_type, lifts)
        self.context_type = context_type


class RdLiftingAttention(_Layer):
    """Lifting self-attention from trivial to regular fields."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        locality: float | str | None = "auto",
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        dropout: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            LiftingAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, locality=locality, padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip


class RdGroupAttention(_Layer):
    """Group self-attention between regular fields."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        relation: str | None = None,
        locality: float | str | None = "auto",
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        dropout: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            GroupAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, relation=relation, locality=locality, padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip


class RdGlobalAttention(_Layer):
    """Global group self-attention between regular fields, in linear time."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int = 5,
        relation: str | None = None,
        num_features: int | None = None,
        locality: float | str | None = "auto",
        padding_mode: str = "mask",
        context_type: FieldType | None = None,
        dropout: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            GlobalGroupAttention, in_type, out_type, context_type, options, heads=heads, head_channels=head_channels,
            kernel_size=kernel_size, relation=relation, num_features=num_features, locality=locality,
            padding_mode=padding_mode, dropout=dropout,
        )  # fmt: skip

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features; see :meth:`tg_equiattn.nn.GlobalGroupAttention.redraw_features`."""
        core: Any = self.core
        core.redraw_features(generator)


class R2LiftingAttention(RdLiftingAttention):
    """Lifting self-attention of images, from trivial to regular fields: :class:`tg_equiattn.nn.LiftingAttention`, where
    the formula, its source and all arguments but field types are described.

    Args:
        in_type (FieldType): trivial fields.
        out_type (FieldType): regular fields of the same gspace.
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


class R3LiftingAttention(RdLiftingAttention):
    """:class:`R2LiftingAttention` of volumes: ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.

    A window of 3 has 27 places, one of 5 has 125; ``"square"`` is a cube, ``"disk"`` a ball.
    """

    dim = 3


class R2GroupAttention(RdGroupAttention):
    """Group self-attention of images between regular fields: :class:`tg_equiattn.nn.GroupAttention`, where the formula,
    its source and all arguments but field types are described.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        context_type (FieldType): as :class:`R2LiftingAttention`.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H, W)``.

    Raises:
        ValueError: as :class:`R2LiftingAttention`.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.flipRot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> layer = R2GroupAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        8
    """

    dim = 2


class R3GroupAttention(RdGroupAttention):
    """:class:`R2GroupAttention` of volumes: ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.dihedralOnR3(2)
        >>> hidden = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> layer = R3GroupAttention(hidden, hidden, heads=2, kernel_size=3)
        >>> len(layer.check_equivariance())
        4
    """

    dim = 3


class R2GlobalAttention(RdGlobalAttention):
    """Global group self-attention of images between regular fields, in time linear in pixels:
    :class:`tg_equiattn.nn.GlobalGroupAttention`, where the formula, its sources and all arguments but field types are
    described. Fields, shapes and errors are those of :class:`R2GroupAttention`.
    """

    dim = 2


class R3GlobalAttention(RdGlobalAttention):
    """:class:`R2GlobalAttention` of volumes: ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D, H, W)``."""

    dim = 3
