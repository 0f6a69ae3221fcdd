"""The relations of group attention: which elements meet, and what a layer needs for that."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...encodings.group import relation_index
from ...encodings.locality import CONTENT
from ...groups import DilationGroup, FiniteGroup
from ...tables import Tables
from .linear import GroupLinear, Pointwise


class Relation:
    """How the elements of queries, keys and outputs meet: the index table, the projections and their start.

    This class is for lifting, where input has no elements.
    """

    name: str | None = None
    input_has_elements = False
    prefers_element = False  # whether heads start with a group element of their own
    separates_heads = False  # whether heads without content run as a separable convolution

    def __init__(self, group: FiniteGroup | DilationGroup, scale_window: int | None, all_pixels: bool) -> None:
        self.isometries, self.scale_window, self.all_pixels = group.isometries, scale_window, all_pixels

    @property
    def arguments(self) -> int | None:
        """Elements u of the group encoding; ``None`` without one."""
        return None

    def index(self) -> Tables | None:
        """The table of u for output, query and key elements; ``None`` where no encoding depends on u."""
        return None

    def matching(self, in_channels: int, out_channels: int) -> nn.Module:
        """The projection to queries or keys."""
        return Pointwise(in_channels, out_channels)

    def valuing(self, in_channels: int, out_channels: int) -> nn.Module:
        """The projection to values."""
        return Pointwise(in_channels, out_channels)

    def start(self, query: nn.Module, key: nn.Module, heads: int, by_locality: bool, crosses: bool) -> None:
        """Set the first values of the projections to queries and keys, ``by_locality`` where locality decides first."""
        nn.init.normal_(cast(Tensor, query.bias))  # a pixel where x = 0, too, prefers some offsets to others
        if by_locality:
            with torch.no_grad():
                for parameter in query.parameters():
                    parameter.mul_(CONTENT)


class Frame(Relation):
    """Every element attends in its own frame; elements meet in the linear maps before and after."""

    name, input_has_elements, separates_heads = "frame", True, True

    def matching(self, in_channels: int, out_channels: int) -> nn.Module:
        """Over all pixels queries and keys compare an element with others."""
        return self.valuing(in_channels, out_channels) if self.all_pixels else Pointwise(in_channels, out_channels)

    def valuing(self, in_channels: int, out_channels: int) -> nn.Module:
        return GroupLinear(self.isometries, in_channels, out_channels)

    def start(self, query: nn.Module, key: nn.Module, heads: int, by_locality: bool, crosses: bool) -> None:
        """Over all pixels head e compares h with h u, u the e-th element: keys start as the queries of another element,
        so that features that are equal up to a rotation have large scores from the first step."""
        super().start(query, key, heads, False, crosses)
        if not self.all_pixels or crosses:
            return
        weight = cast(Tensor, query.weight)
        table = relation_index(self.isometries, "relative").to(weight.device)  # u^-1 g
        with torch.no_grad():
            of_heads = weight.unflatten(0, (heads, -1))
            rotated = [one[..., table[head % len(table)]] for head, one in enumerate(of_heads)]
            cast(Tensor, key.weight).copy_(torch.cat(rotated))


class Compared(Relation):
    """Queries of one element meet keys of all: ``"relative"``, ``"lifted"``, ``"ge_vit"`` and ``"gsa"``."""

    input_has_elements = True

    def __init__(
        self, name: str, group: FiniteGroup | DilationGroup, scale_window: int | None, all_pixels: bool
    ) -> None:
        super().__init__(group, scale_window, all_pixels)
        self.name, self.prefers_element = name, name == "relative"
        if name == "gsa":
            warnings.warn(
                "relation='gsa' (GSA-Nets section 5.2) is not equivariant; it is kept to reproduce the comparison, "
                "use 'frame', 'ge_vit', 'lifted' or 'relative' otherwise",
                stacklevel=4,
            )

    @property
    def arguments(self) -> int:
        """With scales, those of a window of scales around the query's."""
        return len(self.isometries) * (self.scale_window or 1)

    def index(self) -> Tables:
        return Tables(functools.partial(relation_index, self.isometries, cast(str, self.name)))


def make_relation(name: str | None, *arguments: Any) -> Relation:
    """The relation of a name; ``None`` for lifting."""
    if name is None:
        return Relation(*arguments)
    return Frame(*arguments) if name == "frame" else Compared(name, *arguments)
