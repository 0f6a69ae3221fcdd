"""Attention scores that depend on position only. With them each head starts at its own offset, like a tap of a
convolution."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Window
from ..modes import full_precision

if TYPE_CHECKING:
    from jaxtyping import Float

CONTENT = 0.3  # initial scale of queries with locality, so that positions determine the weights at the start
CONTRAST = 2.0  # initial score of the preferred group element above that of the others


def starting_offsets(heads: int, window: Window, elements: int = 1) -> list[tuple[tuple[int, ...], int, int]]:
    """The initial offset, preferred group element and round of each head; no two heads have the same three.

    Head e starts at the e-th nearest offset of the window (ties in the order of coordinates) and prefers the element e
    modulo ``elements``. When all offsets are used, heads start again at the nearest offset, with the next element
    there. When all pairs of an offset and an element are used, the next round begins; its locality strength is half as
    large.

    Args:
        heads: Number of heads.
        window: The window of attention. With a global window, offsets come from a cube around the pixel.
        elements: Number of group elements that heads may prefer. The default 1 means no preference.
    """
    if window.is_global:
        radius = math.ceil(heads ** (1 / window.dim))  # a cube of this radius contains the nearest offsets
        offsets = list(itertools.product(range(-radius, radius + 1), repeat=window.dim))
    else:
        offsets = [tuple(offset) for offset in window.offsets().tolist()]
    offsets = sorted(offsets, key=lambda offset: (sum(n * n for n in offset), offset))[:heads]
    repeats = (divmod(head, len(offsets)) for head in range(heads))
    return [(offsets[n], (n + repeat) % elements, repeat // elements) for repeat, n in repeats]


class Locality(nn.Module):
    r"""Learned scores of each head that depend on rotated offsets and group elements, but not on content.

    .. math:: l_e(h^{-1}D, u) = -\alpha_e\, |h^{-1}D - \Delta_e|^2 + w_e[u]

    D are offsets in pixels. Head e learns a locality strength :math:`\alpha_e \ge 0` in 1 / pixel^2, a centre
    :math:`\Delta_e` in pixels and a preference :math:`w_e[u]` for each group element u. Each head starts at its own
    offset (:func:`starting_offsets`).

    With one head for each offset and element, large :math:`\alpha` and large differences of w, relative attention is a
    group convolution. At the border they differ: the softmax weights the nearest pixel of the image, while a
    convolution sees zeros.

    ``forward`` takes rotated offsets in pixels and returns scores and preferences; preferences are ``None`` without
    ``elements``.

    Args:
        heads: Number of heads.
        window: The window of attention.
        locality_strength: Initial :math:`\alpha` of the first round of heads, in 1 / pixel^2, not negative.
        elements: Number of group elements u. ``None`` means no preferences w (frames and lifting).
        element_preference: Whether each head starts with a preference for one group element. Otherwise w starts at
            zero. The default is False.

    Raises:
        ValueError: if ``heads`` is not a positive integer, or if ``locality_strength`` is negative or not finite.

    Source: Cordonnier et al., On the relationship between self-attention and convolutional layers (2020), Theorem 1;
    d'Ascoli et al., ConViT (2021), for the initial values. Both are without a group.
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
            *starting_offsets(heads, window, elements if elements and element_preference else 1), strict=True
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

    def forward(
        self, offsets: Float[Tensor, "frames offsets d"]
    ) -> tuple[Float[Tensor, "heads frames offsets"], Float[Tensor, "heads elements"] | None]:
        with full_precision(offsets.device):
            dtype = torch.promote_types(self.locality_strength.dtype, torch.float32)  # float16 overflows
            locality_strength, centre = self.locality_strength.to(dtype), self.centre.to(dtype)
            # -|alpha| is never positive; unlike abs, this form has a gradient at zero, so that alpha can leave zero
            factor = torch.where(locality_strength < 0, locality_strength, -locality_strength)
            distance = (offsets.to(dtype) - centre[:, None, None]).square().sum(-1)
            return factor[:, None, None] * distance, self.preference

    def extra_repr(self) -> str:
        return f"heads={self.heads}, locality_strength={self.start}, elements={self.elements}"


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of a model that should not decay: strengths, offsets and elements that heads prefer.

    Weight decay pulls these to zero, where all heads look at the same pixel. The names are those of
    ``model.named_parameters()``. A model that has the method ``no_weight_decay`` of timm can return this set.

    Args:
        model (torch.nn.Module): Any module, also one of escnn.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> from tg_equiattn.nn import GroupAttention
        >>> model = torch.nn.Sequential(GroupAttention(cyclic(4), 8, 8))
        >>> names = no_weight_decay(model)
        >>> sorted(names)
        ['0.locality.centre', '0.locality.locality_strength']
        >>> constant = [p for name, p in model.named_parameters() if name in names]
        >>> others = [p for name, p in model.named_parameters() if name not in names]
        >>> optimizer = torch.optim.AdamW([{"params": others}, {"params": constant, "weight_decay": 0.0}])
    """
    places = {place: part for place, part in model.named_modules() if isinstance(part, Locality)}
    return {f"{place}.{name}".lstrip(".") for place, part in places.items() for name, _ in part.named_parameters()}
