"""The residual attention block and the layer norm over regular fields."""

from __future__ import annotations

from typing import Any

from escnn.nn import FieldType

from tg_equiattn.nn import GroupAttentionBlock, RegularLayerNorm

from .module import R2Module
from .types import common_gspace, group_from_gspace, regular_channels


class R2RegularLayerNorm(R2Module):
    """Layer normalisation over the fields of a regular type, at every pixel and group element.

    See :class:`tg_equiattn.nn.RegularLayerNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    def __init__(self, in_type: FieldType, eps: float = 1e-5) -> None:
        core = RegularLayerNorm(regular_channels("in_type", in_type), eps)
        super().__init__(core, group_from_gspace(in_type.gspace), in_type, in_type, lifts=False)


class R2AttentionBlock(R2Module):
    """Norm, swish, group attention, norm, swish, dropout, shortcut, pointwise bottleneck, norm, shortcut.

    See :class:`tg_equiattn.nn.GroupAttentionBlock`.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        heads: attention heads.
        value_dropout: probability of dropping an output of the attention in training.
        norm: ``"layer"``, as published, or ``"batch"``.
        attention: further arguments of :class:`R2GroupAttention`.

    Raises:
        ValueError: for other field types (with the 1x1 ``R2Conv`` that converts them) and bad arguments.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int,
        value_dropout: float = 0.0,
        norm: str = "layer",
        **attention: Any,
    ) -> None:
        group = group_from_gspace(common_gspace(in_type, out_type))
        fields = regular_channels("in_type", in_type), regular_channels("out_type", out_type)
        core = GroupAttentionBlock(group, *fields, heads=heads, value_dropout=value_dropout, norm=norm, **attention)
        super().__init__(core, group, in_type, out_type, lifts=False)
