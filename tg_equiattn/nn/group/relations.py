"""Relations of group attention: the group elements that attend to each other, and the projections for them."""

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
    """A relation of the group elements of queries, keys and outputs: its index table, projections and initial values.

    This class is the relation of lifting, whose input has no group elements.
    """

    name: str | None = None
    input_has_elements = False
    prefers_element = False  # true if each head starts with a preference for one group element

    def __init__(self, group: FiniteGroup | DilationGroup, scale_window: int | None, all_pixels: bool) -> None:
        self.isometries, self.scale_window, self.all_pixels = group.isometries, scale_window, all_pixels
        # true if heads without content run as a separable convolution
        self.separates_heads = not isinstance(group, DilationGroup)

    @property
    def arguments(self) -> int | None:
        """The number of elements u of the group encoding; ``None`` if the encoding does not depend on u."""
        return None

    def index(self) -> Tables | None:
        """The table of u for output, query and key elements; ``None`` if the encoding does not depend on u."""
        return None

    def matching(self, in_channels: int, out_channels: int) -> nn.Module:
        """The projection to queries or keys."""
        return Pointwise(in_channels, out_channels)

    def valuing(self, in_channels: int, out_channels: int) -> nn.Module:
        """The projection to values."""
        return Pointwise(in_channels, out_channels)

    def start(self, query: nn.Module, key: nn.Module, heads: int, by_locality: bool, crosses: bool) -> None:
        """Initialise the projections to queries and keys. ``by_locality`` scales queries down, so that locality
        determines the attention weights at the start."""
        nn.init.normal_(cast(Tensor, query.bias))  # so that scores depend on offsets where the input is zero
        if by_locality:
            with torch.no_grad():
                for parameter in query.parameters():
                    parameter.mul_(CONTENT)


class Frame(Relation):
    """Frame attention: element h attends to element h. Linear maps before and after attention mix elements."""

    name, input_has_elements = "frame", True

    def matching(self, in_channels: int, out_channels: int) -> nn.Module:
        """The projection to queries or keys. With a global window it mixes group elements, so that a head can compare
        an element with another one."""
        return self.valuing(in_channels, out_channels) if self.all_pixels else Pointwise(in_channels, out_channels)

    def valuing(self, in_channels: int, out_channels: int) -> nn.Module:
        return GroupLinear(self.isometries, in_channels, out_channels)

    def start(self, query: nn.Module, key: nn.Module, heads: int, by_locality: bool, crosses: bool) -> None:
        """Initialise the projections. With a global window, head e compares element h with h u, where u is the e-th
        element: its keys start as the queries of element h u. Features that are equal up to a rotation then have large
        scores from the first step."""
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
    """Relations in which queries attend to keys of all elements: ``"relative"``, ``"lifted"``, ``"ge_vit"`` and
    ``"gsa"``."""

    input_has_elements = True

    def __init__(
        self, name: str, group: FiniteGroup | DilationGroup, scale_window: int | None, all_pixels: bool
    ) -> None:
        super().__init__(group, scale_window, all_pixels)
        self.name, self.prefers_element, self.separates_heads = name, name == "relative", False
        if name == "gsa":
            warnings.warn(
                "relation='gsa' (GSA-Nets section 5.2) is not equivariant and serves to reproduce the papers' "
                "comparison; use 'frame', 'ge_vit', 'lifted' or 'relative' for an equivariant layer",
                stacklevel=4,
            )

    @property
    def arguments(self) -> int:
        """The number of elements u of the group encoding: |H|, times the size of the window of scales if there is
        one."""
        return len(self.isometries) * (self.scale_window or 1)

    def index(self) -> Tables:
        return Tables(functools.partial(relation_index, self.isometries, cast(str, self.name)))


def make_relation(name: str | None, *arguments: Any) -> Relation:
    """Make the relation of a name; ``None`` means lifting."""
    if name is None:
        return Relation(*arguments)
    return Frame(*arguments) if name == "frame" else Compared(name, *arguments)
