"""Transformers of frames between field types, of images (R2) and of volumes (R3)."""

from __future__ import annotations

from typing import Any

from escnn.nn import FieldType

from tg_equiattn import checks
from tg_equiattn.nn import FrameTransformer, FrameTransformerBlock

from .module import RdModule
from .types import count_fields


@checks.arguments_of(FrameTransformerBlock)
class RdTransformerBlock(RdModule):
    def __init__(self, in_type: FieldType, **arguments: Any) -> None:
        group, channels = self.group_of(in_type, in_type), count_fields("in_type", in_type, True)
        super().__init__(FrameTransformerBlock(group, channels, **arguments), group, in_type, in_type)


class R2TransformerBlock(RdTransformerBlock):
    """Pre-norm transformer block of images: attention over all pixels in frames with rotary positions, then an MLP.

    The formula and its source are at :class:`tg_equiattn.nn.FrameTransformerBlock`. Use it where images have few
    pixels: behind convolutions with strides and pools.

    Args:
        in_type (FieldType): Type of input and output: regular fields.
        heads (int): Number of attention heads, a divisor of the number of fields that leaves at least 2 for each head.
            ``None`` means heads of about 48 fields.
        mlp_ratio (float): Fields of the hidden layer of the MLP, divided by those of ``in_type``.
        dropout (float): Probability, in training, of dropping a field of a pixel in the output of the attention and of
            the MLP.
        drop_path (float): Probability, in training, of leaving out the attention or the MLP of a sample.

    Shapes:
        ``(B, in_type.size, H, W)`` -> the same.

    Raises:
        ValueError: if ``in_type`` does not consist of regular fields of a discrete gspace of images, or if another
            argument is not allowed.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])
        >>> len(R2TransformerBlock(hidden, heads=2).check_equivariance())
        4
    """

    dim = 2


class R3TransformerBlock(RdTransformerBlock):
    """Transformer block of volumes; arguments are those of :class:`R2TransformerBlock`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> the same.
    """

    dim = 3


@checks.arguments_of(FrameTransformer, "lifts", "pool")
class RdFrameTransformer(RdModule):
    def __init__(self, in_type: FieldType, out_type: FieldType, *, patch_size: int = 16, **arguments: Any) -> None:
        group = self.group_of(in_type, out_type)
        lifts = all(r.is_trivial() for r in in_type.representations)
        counts = count_fields("in_type", in_type, not lifts), count_fields("out_type", out_type, True)
        core = FrameTransformer(group, *counts, patch_size=patch_size, lifts=lifts, pool=False, **arguments)
        super().__init__(core, group, in_type, out_type, lifts)
        self.patch_size = patch_size
        self.check_size = (2 * patch_size, 3 * patch_size, 2 * patch_size)[: group.dim]

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, size, *sides = super().evaluate_output_shape(input_shape)
        return (batch, size, *(side // self.patch_size for side in sides))


class R2FrameTransformer(RdFrameTransformer):
    """Vision transformer of images: patches, transformer blocks, and regular fields of each patch out.

    It is :class:`tg_equiattn.nn.FrameTransformer`, which also has presets and invariant outputs, between field types.

    Args:
        in_type (FieldType): Type of the input: trivial fields (images), or regular fields, for example of convolutions.
        out_type (FieldType): Type of the output: regular fields of the same gspace.
        patch_size (int): Side of a patch in pixels, which divides the sides of the image. It must be 1 if the group has
            elements that do not map the pixel grid to itself.
        channels (int): Regular fields of the tokens.
        num_layers (int): Number of blocks.
        heads (int): Attention heads of every block, a divisor of ``channels`` that leaves at least 2 for each head.
            ``None`` means heads of about 48 fields.
        mlp_ratio (float): Fields of the hidden layer of each MLP, divided by ``channels``.
        dropout (float): Dropout of :class:`R2TransformerBlock`.
        drop_path (float): Stochastic depth of the last block. It grows linearly from 0 in the first.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, out_type.size, H / patch_size, W / patch_size)``.

    Raises:
        ValueError: if a field type is not supported, or if another argument is not allowed.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.flipRot2dOnR2(4)
        >>> image = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
        >>> hidden = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> model = R2FrameTransformer(image, hidden, patch_size=4, channels=8, num_layers=2)
        >>> model.evaluate_output_shape((1, 3, 16, 24))
        (1, 32, 4, 6)
    """

    dim = 2


class R3FrameTransformer(RdFrameTransformer):
    """Vision transformer of volumes; arguments are those of :class:`R2FrameTransformer`.

    Shapes:
        ``(B, in_type.size, D, H, W)`` -> ``(B, out_type.size, D / patch_size, H / patch_size, W / patch_size)``.
    """

    dim = 3
