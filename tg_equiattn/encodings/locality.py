"""Content-free scores by which every head of group self-attention starts at a place of its own, as a convolution."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Neighbourhood
from ..modes import full_precision

CONTENT = 0.3  # of the usual size of queries at the start: with locality, places decide first
CONTRAST = 2.0  # of the preferred group element over the others at the start


def starting_places(
    heads: int, neighbourhood: Neighbourhood, elements: int = 1
) -> list[tuple[tuple[int, ...], int, int]]:
    """Where each head looks at the start: an offset, a group element (of those that heads prefer) and a round, no two
    heads alike. Head e takes the e-th nearest offset of the window (ties in the order of coordinates) and the element
    e, modulo their number. When all offsets are taken heads begin again with the nearest one and the next element
    there; when all pairs are, in the next round, whose heads are half as sharp."""
    if neighbourhood.is_global:
        radius = math.ceil(heads ** (1 / neighbourhood.dim))  # a cube of this radius holds the nearest
        offsets = list(itertools.product(range(-radius, radius + 1), repeat=neighbourhood.dim))
    else:
        offsets = [tuple(offset) for offset in neighbourhood.offsets().tolist()]
    offsets = sorted(offsets, key=lambda offset: (sum(n * n for n in offset), offset))[:heads]
    turns = (divmod(head, len(offsets)) for head in range(heads))
    return [(offsets[place], (place + turn) % elements, turn // elements) for turn, place in turns]


class Locality(nn.Module):
    r"""Scores of rotated offsets and group elements, for each head, that do not depend on content.

    .. math:: l_e(h^{-1}D, u) = -\alpha_e\, |h^{-1}D - \Delta_e|^2 + w_e[u]

    with offsets D in pixels, and for each head e a sharpness :math:`\alpha_e \ge 0` (1 / pixel^2), a centre
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
        self, heads: int, neighbourhood: Neighbourhood, sharpness: float, *, elements: int | None = None,
        preferring: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.positive(heads=heads)
        checks.not_negative(locality=sharpness)
        self.heads, self.elements, self.start = heads, elements, sharpness
        offsets, preferred, rounds = zip(
            *starting_places(heads, neighbourhood, elements if elements and preferring else 1), strict=True
        )
        self.sharpness = nn.Parameter(torch.tensor([sharpness / 2.0**n for n in rounds]))
        self.centre = nn.Parameter(torch.tensor(offsets, dtype=self.sharpness.dtype, device=self.sharpness.device))
        self.preference: nn.Parameter | None = None
        if elements:
            self.preference = nn.Parameter(self.sharpness.new_zeros(heads, elements))
            if preferring:
                with torch.no_grad():
                    self.preference[range(heads), list(preferred)] = CONTRAST

    def forward(self, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        with full_precision(offsets.device):
            dtype = torch.promote_types(self.sharpness.dtype, torch.float32)  # half precision ends at 65,504
            sharpness, centre = self.sharpness.to(dtype), self.centre.to(dtype)
            # |alpha|, which learning can neither push below zero nor leave at zero
            sharpness = torch.where(sharpness >= 0, sharpness, -sharpness)
            distance = (offsets.to(dtype) - centre[:, None, None]).square().sum(-1)
            return -sharpness[:, None, None] * distance, self.preference

    def extra_repr(self) -> str:
        return f"heads={self.heads}, sharpness={self.start}, elements={self.elements}"
