"""Content-free scores by which every head of group self-attention starts at a place of its own, as a convolution."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Window
from ..modes import full_precision

CONTENT = 0.3  # of the usual size of queries at the start: with locality, places decide first
CONTRAST = 2.0  # of the preferred group element over the others at the start


def starting_places(heads: int, window: Window, elements: int = 1) -> list[tuple[tuple[int, ...], int, int]]:
    """Where each head looks at the start: an offset, a group element (of those that heads prefer) and a round, no two
    heads alike. Head e takes the e-th nearest offset of the window (ties in the order of coordinates) and the element
    e, modulo their number. When all offsets are taken heads begin again with the nearest one and the next element
    there; when all pairs are, in the next round, whose heads are half as sharp."""
    if window.is_global:
        radius = math.ceil(heads ** (1 / window.dim))  # a cube of this radius holds the nearest
        offsets = list(itertools.product(range(-radius, radius + 1), repeat=window.dim))
    else:
        offsets = [tuple(offset) for offset in window.offsets().tolist()]
    offsets = sorted(offsets, key=lambda offset: (sum(n * n for n in offset), offset))[:heads]
    turns = (divmod(head, len(offsets)) for head in range(heads))
    return [(offsets[place], (place + turn) % elements, turn // elements) for turn, place in turns]


class Locality(nn.Module):
    r"""Scores of rotated offsets and group elements, for each head, that do not depend on content.

    .. math:: l_e(h^{-1}D, u) = -\alpha_e\, |h^{-1}D - \Delta_e|^2 + w_e[u]

    with offsets D in pixels, and for each head e a locality_strength :math:`\alpha_e \ge 0` (1 / pixel^2), a centre
    :math:`\Delta_e` and a preference :math:`w_e` of the ``elements`` u, all learned; ``None`` without w (lifting).
    Heads start at places of their own (:func:`starting_places`), and, ``preferring``, with elements of their own; else
    w starts at zero. Large :math:`\alpha` and contrasts of w make relative attention with a head a tap a group
    convolution, away from the border: there the softmax looks at the nearest pixel, where a convolution sees zero.

    Shapes:
        ``(|H|, D, d)`` offsets in pixels -> ``(heads, |H|, D)`` and ``(heads, elements)`` or ``None``.

    Source: Cordonnier et al., On the relationship between self-attention and convolutional layers (2020), Theorem 1;
    d'Ascoli et al., ConViT (2021), for the start. Both have one group element.
    """

    def __init__(
        self, heads: int, window: Window, locality_strength: float, *, elements: int | None = None,
        element_preference: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.positive(heads=heads)
        checks.not_negative(locality=locality_strength)
        self.heads, self.elements, self.start = heads, elements, locality_strength
        offsets, preferred, rounds = zip(
            *starting_places(heads, window, elements if elements and element_preference else 1), strict=True
        )
        self.locality_strength = nn.Parameter(torch.tensor([locality_strength / 2.0**n for n in rounds]))
        self.centre = nn.Parameter(
            torch.tensor(offsets, dtype=self.locality_strength.dtype, device=self.locality_strength.device)
        )
        self.preference: nn.Parameter | None = None
        if elements:
            self.preference = nn.Parameter(self.locality_strength.new_zeros(heads, elements))
            if element_preference:
                with torch.no_grad():
                    self.preference[range(heads), list(preferred)] = CONTRAST

    def forward(self, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        with full_precision(offsets.device):
            dtype = torch.promote_types(self.locality_strength.dtype, torch.float32)  # half precision ends at 65,504
            locality_strength, centre = self.locality_strength.to(dtype), self.centre.to(dtype)
            # |alpha|, which learning can neither push below zero nor leave at zero
            locality_strength = torch.where(locality_strength >= 0, locality_strength, -locality_strength)
            distance = (offsets.to(dtype) - centre[:, None, None]).square().sum(-1)
            return -locality_strength[:, None, None] * distance, self.preference

    def extra_repr(self) -> str:
        return f"heads={self.heads}, locality_strength={self.start}, elements={self.elements}"
