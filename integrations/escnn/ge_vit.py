"""GE-ViT between escnn field types."""

from __future__ import annotations

from typing import Any

from escnn.gspaces import GSpace
from escnn.nn import FieldType
from torch import Tensor, nn

from tg_equiattn.nn import GEViT as CoreGEViT
from tg_equiattn.nn.group.fitting import check_keywords
from tg_equiattn.nn.group.ge_vit import preset

from .module import RdModule, Redrawn
from .types import trivial_channels


class GEViT(Redrawn, RdModule):
    """A GE-ViT from trivial fields (an image or a volume) to ``num_classes`` trivial fields on a single pixel.

    See :class:`tg_equiattn.nn.GEViT` for the architecture and all keyword arguments. ``rotmnist``, ``cifar10`` and
    ``patchcamelyon`` build the published architectures for a gspace.

    Args:
        in_type (FieldType): trivial fields.
        num_classes: number of logits.
        model: keyword arguments of :class:`tg_equiattn.nn.GEViT`.

    Shapes:
        ``(B, in_type.size, H, W)`` -> ``(B, num_classes, 1, 1)``, and ``(B, in_type.size, D, H, W)`` ->
        ``(B, num_classes, 1, 1, 1)``; ``.tensor.flatten(1)`` are the logits.

    Example:
        >>> from escnn import gspaces
        >>> model = GEViT.rotmnist(gspaces.rot2dOnR2(4))
        >>> model.evaluate_output_shape((8, 1, 28, 28))
        (8, 10, 1, 1)
    """

    def __init__(self, in_type: FieldType, num_classes: int, **model: Any) -> None:
        check_keywords(type(self).__name__, model, CoreGEViT)
        group = self.group_of(in_type, in_type)
        channels = trivial_channels("in_type", in_type)
        core = CoreGEViT(group, channels, num_classes, **model)
        out_type = FieldType(in_type.gspace, num_classes * [in_type.gspace.trivial_repr])
        super().__init__(core, group, in_type, out_type, lifts=True)
        self.check_size = (28, 28) if group.dim == 2 else (4, 4, 4)

    @classmethod
    def _preset(cls, name: str, size: int, gspace: GSpace, overrides: dict[str, Any]) -> GEViT:
        settings = preset(name, overrides)
        in_type = FieldType(gspace, settings.pop("in_channels") * [gspace.trivial_repr])
        model = cls(in_type, settings.pop("num_classes"), **settings)
        model.check_size = (size,) * gspace.dimensionality
        return model

    @classmethod
    def rotmnist(cls, gspace: GSpace, **overrides: Any) -> GEViT:
        """:meth:`tg_equiattn.nn.GEViT.rotmnist` for a gspace."""
        return cls._preset("rotmnist", 28, gspace, overrides)

    @classmethod
    def cifar10(cls, gspace: GSpace, **overrides: Any) -> GEViT:
        """:meth:`tg_equiattn.nn.GEViT.cifar10` for a gspace."""
        return cls._preset("cifar10", 32, gspace, overrides)

    @classmethod
    def patchcamelyon(cls, gspace: GSpace, **overrides: Any) -> GEViT:
        """:meth:`tg_equiattn.nn.GEViT.patchcamelyon` for a gspace."""
        return cls._preset("patchcamelyon", 96, gspace, overrides)

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, *[1] * self.group.dim))

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*super().evaluate_output_shape(input_shape)[:2], *[1] * self.group.dim)

    def _after(self) -> nn.Module:
        return nn.Unflatten(1, (-1, *[1] * self.group.dim))
