"""The residual attention block and the norms over regular fields."""

from __future__ import annotations

from typing import Any

from escnn.nn import FieldType

from tg_equiattn.nn import GroupAttentionBlock, RegularGlobalNorm, RegularLayerNorm

from .attention_module import R2AttentionModule
from .module import R2Module, Redrawn
from .types import common_gspace, context_channels, group_from_gspace, regular_channels


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


class R2RegularGlobalNorm(R2Module):
    """One mean and variance an image, over the fields of a regular type, group elements and pixels, as published.

    See :class:`tg_equiattn.nn.RegularGlobalNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    def __init__(self, in_type: FieldType, eps: float = 1e-12) -> None:
        core = RegularGlobalNorm(regular_channels("in_type", in_type), eps)
        super().__init__(core, group_from_gspace(in_type.gspace), in_type, in_type, lifts=False)


class R2AttentionBlock(Redrawn, R2AttentionModule):
    """Norm, swish, group attention, norm, swish, dropout, shortcut, pointwise bottleneck, norm, shortcut.

    See :class:`tg_equiattn.nn.GroupAttentionBlock`.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        heads: attention heads.
        value_dropout: probability of dropping an output of the attention in training.
        norm: ``"global"``, as published, ``"layer"`` or ``"batch"``.
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

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        *,
        heads: int = 8,
        value_dropout: float = 0.0,
        norm: str = "global",
        crop: int = 0,
        reach: str = "window",
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        context_type: FieldType | None = None,
        **attention: Any,
    ) -> None:
        group = group_from_gspace(common_gspace(in_type, out_type))
        fields = regular_channels("in_type", in_type), regular_channels("out_type", out_type)
        core = GroupAttentionBlock(
            group, *fields, heads=heads, value_dropout=value_dropout, norm=norm, crop=crop, reach=reach,
            drop_path=drop_path, layer_scale=layer_scale,
            context_channels=context_channels(in_type, context_type, regular_channels), **attention,
        )  # fmt: skip
        super().__init__(core, group, in_type, out_type, lifts=False, context_type=context_type)
        self.crop = crop
        height, width = self.check_size
        self.check_size = (height + 2 * crop, width + 2 * crop)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        *kept, height, width = super().evaluate_output_shape(input_shape)
        return (*kept, height - 2 * self.crop, width - 2 * self.crop)
