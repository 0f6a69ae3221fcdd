"""The pre-activation residual block of group self-attention networks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import checks
from ...groups import FiniteGroup
from .attention import GroupAttention
from .norm import make_norm
from .pointwise import Pointwise
from .pooling import SpatialCrop


class GroupAttentionBlock(nn.Module):
    r"""Norm, swish, group attention, norm, swish, dropout, shortcut; then a pointwise bottleneck, norm, shortcut.

    .. math::
        y &= \mathrm{crop}\big(\mathrm{shortcut}(x)
            + \mathrm{drop}(\sigma(\mathrm{norm}(\mathrm{attn}(\sigma(\mathrm{norm}(x))))))\big) \\
        z &= y + \mathrm{norm}(W_2\, \sigma(\mathrm{norm}(W_1\, y)))

    The shortcut is the identity, or a pointwise map where the width changes; the bottleneck has half the width.

    Args:
        group, in_channels, out_channels, heads: as :class:`GroupAttention`.
        value_dropout: probability of dropping an output of the attention in training.
        norm: ``"global"`` (:class:`RegularGlobalNorm`, as published), ``"layer"`` (:class:`RegularLayerNorm`) or
            ``"batch"`` (:class:`RegularBatchNorm`).
        crop: pixels to remove at each side before the bottleneck.
        attention: further arguments of :class:`GroupAttention` (``kernel_size``, ``relation``, ``dropout``, ...).

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial - 2 crop)``.

    Source: GSA-Nets Fig. F.1, with the order of the published code.
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 8,
        value_dropout: float = 0.0,
        norm: str = "global",
        crop: int = 0,
        **attention: Any,
    ) -> None:
        super().__init__()
        checks.probability(value_dropout=value_dropout)
        self.attention = nn.Sequential(
            make_norm(norm, in_channels),
            nn.SiLU(),
            GroupAttention(group, in_channels, out_channels, heads=heads, **attention),
            make_norm(norm, out_channels),
            nn.SiLU(),
            nn.Dropout(value_dropout),
        )
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else Pointwise(in_channels, out_channels)
        self.crop = SpatialCrop(crop)
        hidden = max(out_channels // 2, 1)
        self.mlp = nn.Sequential(
            Pointwise(out_channels, hidden),
            make_norm(norm, hidden),
            nn.SiLU(),
            Pointwise(hidden, out_channels),
            make_norm(norm, out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.crop(self.shortcut(x) + self.attention(x))
        return x + self.mlp(x)
