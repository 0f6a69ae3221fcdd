"""Lifting and group self-attention over escnn field types, of images and of volumes."""

from __future__ import annotations

from escnn.nn import FieldType

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention

from .attention_module import RdAttentionModule
from .module import Redrawn
from .types import context_channels, regular_channels, trivial_channels


class RdLiftingAttention(RdAttentionModule):
    """Lifting self-attention from trivial to regular fields."""

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
        group = self.group_of(in_type, out_type)
        core = LiftingAttention(
            group, trivial_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, encoding=encoding, encoding_eps=encoding_eps,
            neighbourhood=neighbourhood, padding_mode=padding_mode,
            context_channels=context_channels(in_type, context_type, trivial_channels), locality=locality,
            dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=True, context_type=context_type)


class RdGroupAttention(RdAttentionModule):
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
        content_heads: int | None = None,
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
        group = self.group_of(in_type, out_type)
        core = GroupAttention(
            group, regular_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, relation=relation,
            content_heads=content_heads, encoding=encoding, encoding_eps=encoding_eps, neighbourhood=neighbourhood,
            padding_mode=padding_mode,
            context_channels=context_channels(in_type, context_type, regular_channels), locality=locality,
            dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)


class RdGlobalAttention(Redrawn, RdAttentionModule):
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
        group = self.group_of(in_type, out_type)
        core = GlobalGroupAttention(
            group, regular_channels("in_type", in_type), regular_channels("out_type", out_type), heads=heads,
            head_channels=head_channels, kernel_size=kernel_size, relation=relation, num_features=num_features,
            redraw_interval=redraw_interval, encoding=encoding, encoding_eps=encoding_eps, neighbourhood=neighbourhood,
            padding_mode=padding_mode, context_channels=context_channels(in_type, context_type, regular_channels),
            locality=locality, dropout=dropout, scale=scale, backend=backend,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)
