"""Group convolutional networks of escnn's own layers: what group attention is compared with."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

import torch
from harness.training import parameters
from torch import Tensor

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.escnn import group_from_gspace

Layer = Callable[[nn.FieldType], nn.EquivariantModule]


def convolution(fields: nn.FieldType, incoming: nn.FieldType | None = None) -> nn.EquivariantModule:
    """A convolution of 3 pixels to a side that keeps the size of images or volumes, between equal fields or from the
    incoming ones."""
    kind = nn.R2Conv if fields.gspace.dimensionality == 2 else nn.R3Conv
    return kind(incoming or fields, fields, kernel_size=3, padding=1)


class GCNN(torch.nn.Module):
    """Convolution, and ``layers`` between regular fields, each with norm and ReLU; group pooling, linear classifier.

    Args:
        gspace: of all fields; trivial fields come in.
        channels: regular fields of every layer.
        layers: builds the layer after the first convolution, and the next, and so on.
        classes: number of logits.
        pools: layers after which space is pooled by 2, counted from 1; 0 means after the first convolution.

    Shapes:
        ``(B, 1, *spatial)`` -> ``(B, classes)``.
    """

    def __init__(
        self,
        gspace: gspaces.GSpace,
        channels: int,
        layers: Sequence[Layer],
        classes: int = 10,
        pools: Sequence[int] = (0,),
    ) -> None:
        super().__init__()
        self.group = group_from_gspace(gspace)
        self.in_type = nn.FieldType(gspace, [gspace.trivial_repr])
        self.fields = nn.FieldType(gspace, channels * [gspace.regular_repr])
        self.pools = frozenset(pools)
        first = convolution(self.fields, self.in_type)
        self.stages = torch.nn.ModuleList(
            nn.SequentialModule(layer, nn.InnerBatchNorm(self.fields), nn.ReLU(self.fields))
            for layer in (first, *(build(self.fields) for build in layers))
        )
        pool = nn.PointwiseMaxPool2D if gspace.dimensionality == 2 else nn.PointwiseMaxPool3D
        self.pool = pool(self.fields, kernel_size=2)
        self.invariant = nn.GroupPooling(self.fields)
        self.classifier = torch.nn.Linear(channels, classes)
        # escnn's convolutions keep expanded filters in eval mode, which no checkpoint needs and another mode refuses
        self._register_state_dict_hook(_without_filters)
        self.register_load_state_dict_pre_hook(_drop_filters)

    def features(self, x: Tensor) -> Tensor:
        """The last regular feature map, ``(B, channels, |H|, *spatial)``."""
        y = nn.GeometricTensor(x, self.in_type)
        for number, stage in enumerate(self.stages):
            y = stage(y)
            if number in self.pools:
                y = self.pool(y)
        return y.tensor.unflatten(1, (-1, len(self.group)))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.GeometricTensor(self.features(x).flatten(1, 2), self.fields)
        return self.classifier(self.invariant(y).tensor.flatten(2).mean(2))


def _without_filters(module: torch.nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    for name in [n for n in state if n.startswith(prefix) and n.endswith((".filter", ".expanded_bias"))]:
        del state[name]


def _drop_filters(module: torch.nn.Module, *_: object) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.R2Conv, nn.R3Conv)):
            layer.train()


def matched(
    build: Callable[[int], torch.nn.Module], wanted: int, width: int = 1, fewer: bool = True
) -> torch.nn.Module:
    """The model of the width, from ``width`` on, whose number of parameters comes closest to what is wanted, or the
    smallest that does not have ``fewer``.

    Real models are built, for escnn has none on the meta device that :func:`harness.training.match_parameters` uses.
    """
    below = above = build(width)
    while parameters(above) < wanted:
        width += 1
        below, above = above, build(width)
    return above if not fewer else min(below, above, key=lambda model: abs(parameters(model) - wanted))
