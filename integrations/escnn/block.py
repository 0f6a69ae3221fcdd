"""The residual attention block and layer normalisation over regular fields, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from typing import Any

import torch
from escnn.nn import FieldType

from tg_equiattn.nn import GroupAttentionBlock, RegularLayerNorm

from .attention import RdAttentionModule, RdGlobalAttention, RdGroupAttention
from .module import RdModule
from .types import regular_channels


class RdRegularLayerNorm(RdModule):
    """Layer normalisation over the fields of a regular type, at every pixel and group element."""

    def __init__(self, in_type: FieldType, eps: float = 1e-5) -> None:
        group = self.group_of(in_type, in_type)
        core = RegularLayerNorm(regular_channels("in_type", in_type), eps)
        super().__init__(core, group, in_type, in_type, lifts=False)


class RdAttentionBlock(RdAttentionModule):
    """The residual block of group attention between regular fields."""

    def __init__(
        self,
        attention: RdGroupAttention | RdGlobalAttention,
        *,
        norm: str = "batch",
        dropout: float = 0.0,
        crop: int = 0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
    ) -> None:
        if not isinstance(attention, (RdGroupAttention, RdGlobalAttention)):
            name = f"R{self.dim}"
            raise ValueError(
                f"attention must be an {name}GroupAttention or an {name}GlobalAttention, got {type(attention).__name__}"
            )
        self.check_dimension(attention.in_type, "attention")
        inner: Any = attention.core
        core = GroupAttentionBlock(
            inner, norm=norm, dropout=dropout, crop=crop, drop_path=drop_path, layer_scale=layer_scale
        )
        super().__init__(core, attention.group, attention.in_type, attention.out_type, lifts=False)
        self.context_type, self.crop = attention.context_type, crop
        self.check_size = tuple(side + 2 * crop for side in self.check_size)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any; see
        :meth:`tg_equiattn.nn.GlobalGroupAttention.redraw_features`."""
        core: Any = self.core
        core.redraw_features(generator)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(side - 2 * self.crop for side in sides))


class R2AttentionBlock(RdAttentionBlock):
    """The residual block of group attention of images: :class:`tg_equiattn.nn.GroupAttentionBlock`, where the formula,
    its source and all arguments but the first are described.

    Args:
        attention: an :class:`R2GroupAttention` or :class:`R2GlobalAttention`, whose fields are those of the block.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H - 2 crop, W - 2 crop)``.

    Raises:
        ValueError: for bad arguments.

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
    """:class:`R2AttentionBlock` of volumes, around an :class:`R3GroupAttention` or :class:`R3GlobalAttention`."""

    dim = 3


class R2RegularLayerNorm(RdRegularLayerNorm):
    """Layer normalisation over the fields of a regular type, at every pixel and group element:
    :class:`tg_equiattn.nn.RegularLayerNorm`.

    Args:
        in_type (FieldType): regular fields; also the output type.
        eps: added to the variance.
    """

    dim = 2


class R3RegularLayerNorm(RdRegularLayerNorm):
    """:class:`R2RegularLayerNorm` of volumes."""

    dim = 3
