"""The residual block of group attention and layer normalization between field types (R2 and R3)."""

from __future__ import annotations

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn.nn import GroupAttentionBlock, RegularLayerNorm
from tg_equiattn.nn.performer.random_features import DrawsFeatures

from .attention import RdGlobalAttention, RdGroupAttention
from .module import RdAttentionModule, RdModule
from .types import count_fields


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
        attention (R2GroupAttention or R2GlobalAttention): The attention layer, whose types are those of the block.
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
