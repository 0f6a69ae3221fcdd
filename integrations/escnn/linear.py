"""The linear map between regular fields of single pixels."""

from __future__ import annotations

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.functional.group.masks import zero_where_hidden
from tg_equiattn.nn import GroupLinear as CoreGroupLinear

from .module import RdModule
from .types import regular_channels


class GroupLinear(RdModule):
    """Every linear map of regular fields, the same at every pixel, that commutes with the group, of images and volumes.

    See :class:`tg_equiattn.nn.GroupLinear` for the formula. An ``R2Conv`` or ``R3Conv`` with ``kernel_size=1`` has as
    many weights, in escnn's basis.

    Args:
        in_type (FieldType): regular fields.
        out_type (FieldType): regular fields of the same gspace.
        bias: whether there is a bias, one a field.

    Shapes:
        ``(B, in_type.size, *spatial)`` -> ``(B, out_type.size, *spatial)``.

    Raises:
        ValueError: for other field types and gspaces.

    Example:
        >>> from escnn import gspaces, nn
        >>> gspace = gspaces.flipRot2dOnR2(4)
        >>> fields = [nn.FieldType(gspace, n * [gspace.regular_repr]) for n in (3, 5)]
        >>> GroupLinear(*fields).evaluate_output_shape((2, 24, 9, 7))
        (2, 40, 9, 7)
    """

    def __init__(self, in_type: FieldType, out_type: FieldType, bias: bool = True) -> None:
        group = self.group_of(in_type, out_type)
        channels = regular_channels("in_type", in_type), regular_channels("out_type", out_type)
        super().__init__(CoreGroupLinear(group, *channels, bias), group, in_type, out_type, lifts=False)

    def forward(self, input: GeometricTensor, mask: Tensor | None = None) -> GeometricTensor:
        """``mask`` is bool, ``(B, *spatial)`` or ``(1, *spatial)``, true where there are pixels; the others count in
        nothing, and outputs are zero there."""
        x = self._fields(input)
        checks.pixel_mask(mask, x.shape[0], x.shape[3:], x.device)
        return self._wrap(zero_where_hidden(self.core(x), mask))
