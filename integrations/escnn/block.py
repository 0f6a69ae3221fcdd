"""The residual attention block and the norms over regular fields, of images and of volumes."""

from __future__ import annotations

from typing import Any

from escnn.nn import FieldType

from tg_equiattn.nn import (
    GlobalGroupAttention,
    GroupAttention,
    GroupAttentionBlock,
    RegularGlobalNorm,
    RegularLayerNorm,
)
from tg_equiattn.nn.group.fitting import check_keywords

from .attention_module import RdAttentionModule
from .module import RdModule, Redrawn
from .types import context_channels, regular_channels


class RdRegularLayerNorm(RdModule):
    """Layer normalisation over the fields of a regular type, at every pixel and group element."""

    def __init__(self, in_type: FieldType, eps: float = 1e-5) -> None:
        group = self.group_of(in_type, in_type)
        core = RegularLayerNorm(regular_channels("in_type", in_type), eps)
        super().__init__(core, group, in_type, in_type, lifts=False)


class RdRegularGlobalNorm(RdModule):
    """One mean and variance an image, over the fields of a regular type, group elements and pixels."""

    def __init__(self, in_type: FieldType, eps: float = 1e-12) -> None:
        group = self.group_of(in_type, in_type)
        core = RegularGlobalNorm(regular_channels("in_type", in_type), eps)
        super().__init__(core, group, in_type, in_type, lifts=False)


class RdAttentionBlock(Redrawn, RdAttentionModule):
    """The residual block of group attention between regular fields."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        value_dropout: float = 0.0,
        norm: str | None = None,
        crop: int = 0,
        reach: str = "window",
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        context_type: FieldType | None = None,
        **attention: Any,
    ) -> None:
        check_keywords(type(self).__name__, attention, GroupAttention, GlobalGroupAttention)
        group = self.group_of(in_type, out_type)
        fields = regular_channels("in_type", in_type), regular_channels("out_type", out_type)
        core = GroupAttentionBlock(
            group, *fields, heads=heads, value_dropout=value_dropout, norm=norm, crop=crop, reach=reach,
            drop_path=drop_path, layer_scale=layer_scale,
            context_channels=context_channels(in_type, context_type, regular_channels), **attention,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)
        self.crop = crop
        self.check_size = tuple(side + 2 * crop for side in self.check_size)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(side - 2 * self.crop for side in sides))
