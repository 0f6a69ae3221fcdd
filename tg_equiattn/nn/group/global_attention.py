"""Group self-attention that reaches all pixels in linear time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.group.global_attention import global_frame_attention_impl, global_group_attention_impl
from ...groups import DilationGroup, FiniteGroup, check_group
from ..performer.random_features import RandomFeatures
from .attention_layer import AttentionLayer
from .options import SHARED

FAR = 4.0  # f of every second head at the start; weights of a window with sharp places sum to about e^2 or e^3


@checks.python_numbers
class GlobalGroupAttention(AttentionLayer):
    r"""Global group self-attention of regular features: exact within a window, by random features beyond.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_j w\, v(j,h) \Big/ \sum_j w, \qquad
        w = \frac{e^f}{n} \langle \phi(q(i,h)), \phi(k(j,h)) \rangle
        + [j \text{ near } i]\, \exp\big(\mathrm{score}(i, h, j)\big)

    with the score of :class:`GroupAttention` for relation ``"frame"`` (encodings and locality), all heads looking by
    content; with ``"relative"`` sums are over (j, s), the score is that of (i, h) and (j, s), and f a function of
    :math:`h^{-1}s`. n is the number of keys, f is learned for each head: 0 at the start, but 4 in every second head,
    which starts with most of its weight far away. Time and memory are linear in pixels; images may have any size. It is
    exactly equivariant, as the window alone is, for every draw of the random features.

    Args:
        group, in_channels, out_channels, heads, head_channels: as :class:`LiftingAttention`, whose errors are raised.
        kernel_size: odd side of the window in pixels.
        relation: ``"frame"`` or ``"relative"``; ``None`` means ``"frame"``.
        num_features: random features m; ``None`` means :math:`d \log d`, d the width of a head, at least 16.
        locality: as :class:`GroupAttention`, of the window.
        padding_mode: as :class:`LiftingAttention`.
        dropout: probability, in training, of dropping a weight of the window, and an output of the far part.
        options: those of :class:`LiftingAttention`; and ``redraw_interval``, training steps between draws of the random
            features, by default none by itself. Directions, their seed and the count of steps are in the checkpoint.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``.

    Source: GE-ViT Eq. 16 with h = t for the window; Choromanski et al. (2021) for the features; see
    :func:`~tg_equiattn.functional.global_group_attention`.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GlobalGroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    allowed = (*SHARED, "redraw_interval")

    def __init__(
        self, group: FiniteGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int = 5, relation: str | None = None,
        num_features: int | None = None, locality: float | str | None = "auto", padding_mode: str = "mask",
        dropout: float = 0.0, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(group, DilationGroup):
            raise ValueError(
                f"group must be finite, without scales, got {group!r}: features sum over all scales, and that sum "
                "changes where features move up one; take GroupAttention"
            )
        check_group(group)
        if kernel_size is None:
            raise ValueError(
                "kernel_size must be a positive odd integer: the window within which weights are exact, got None "
                "(GroupAttention attends to all pixels exactly)"
            )
        if relation is not None:
            checks.choice("relation", relation, ("frame", "relative"))
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            relation=relation, locality=locality, padding_mode=padding_mode, dropout=dropout, options=options,
        )  # fmt: skip
        width = self.head_channels
        num_features = max(16, int(width * math.log(width))) if num_features is None else num_features
        self.features = RandomFeatures(num_features, width, self.options.redraw_interval)
        self.far_bias = nn.Parameter(torch.zeros(heads, 1 if self.relation == "frame" else len(group)))
        with torch.no_grad():
            self.far_bias[1::2] = FAR

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features: the seed's next, or from a CPU ``generator`` (give every rank an equal one)."""
        self.features.redraw_features(generator)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.features(x.device, torch.promote_types(x.dtype, torch.float32))  # counts a training step
        return super().forward(x, mask, context=context, context_mask=context_mask)

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, key_mask: Tensor | None, dropout: float
    ) -> Tensor:
        offset_encoding, element_encoding, space_bias, group_bias = self._scores(tuple(query.shape[4:]), query.device)
        options: dict[str, Any] = {
            "space_bias": space_bias, "window": self.window, "dropout": dropout, "mask": key_mask,
            "plain": self.plain,
        }  # fmt: skip
        projection = self.features.directions(query.device, torch.promote_types(query.dtype, torch.float32))
        if index is None:
            return global_frame_attention_impl(query, key, value, projection, offset_encoding, self.far_bias, **options)
        return global_group_attention_impl(
            query,
            key,
            value,
            projection,
            offset_encoding,
            element_encoding,
            index,
            self.far_bias,
            group_bias=group_bias,
            **options,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.features.num_random_features}"
