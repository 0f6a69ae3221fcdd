"""The pre-activation residual block of group self-attention networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.group.masks import zero_where_hidden
from ...groups import DilationGroup, FiniteGroup
from .attention import GroupAttention
from .attention_layer import AttentionLayer
from .fitting import check_keywords, check_whole, fitting_norm
from .global_attention import GlobalGroupAttention
from .masked import Masked, MaskedSequential
from .norm import RegularBatchNorm, make_norm
from .pointwise import Pointwise
from .pooling import SpatialCrop

REACHES = ("window", "global")


class Residual(nn.Module):
    r"""A branch added to its shortcut: :math:`x + \mathrm{drop}(\gamma_c\, y_c)`.

    Args:
        channels: of both.
        layer_scale: every :math:`\gamma_c` at the start, learned from there; ``None`` means 1, not learned.
        drop_path: probability of leaving out the branch of an image in training; what is kept is divided by one minus
            it.

    Source: Touvron et al. (2021), Eq. 4 (LayerScale); Huang et al. (2016), stochastic depth.
    """

    def __init__(self, channels: int, layer_scale: float | None = None, drop_path: float = 0.0) -> None:
        super().__init__()
        checks.probability(drop_path=drop_path)
        if layer_scale is not None:
            checks.positive_number(layer_scale=layer_scale)
        self.drop_path, self.start = drop_path, layer_scale
        self.layer_scale = None if layer_scale is None else nn.Parameter(torch.full((channels,), float(layer_scale)))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        axes = [1] * (x.ndim - 2)
        if self.layer_scale is not None:
            branch = branch * self.layer_scale.view(-1, *axes)
        if self.training and self.drop_path:
            draw = torch.rand(x.shape[0], 1, *axes, device=x.device)
            branch = branch * (draw >= self.drop_path).to(branch.dtype) / (1 - self.drop_path)
        return x + branch

    def extra_repr(self) -> str:
        return f"layer_scale={self.start}, drop_path={self.drop_path}"


class GroupAttentionBlock(Masked, nn.Module):
    r"""Norm, swish, group attention, norm, swish, dropout, shortcut; then a pointwise bottleneck, norm, shortcut.

    .. math::
        y &= \mathrm{crop}\big(\mathrm{shortcut}(x)
            + \gamma\, \mathrm{drop}(\sigma(\mathrm{norm}(\mathrm{attn}(\sigma(\mathrm{norm}(x))))))\big) \\
        z &= y + \gamma'\, \mathrm{norm}(W_2\, \sigma(\mathrm{norm}(W_1\, y)))

    The shortcut is the identity, or a pointwise map where the width changes; the bottleneck has half the width; the
    scales :math:`\gamma` are 1 but with ``layer_scale``. A context goes through a norm and swish as x does: of its own
    where ``context_channels`` is given, which a batch norm asks for, else the same.

    Args:
        group, in_channels, out_channels, heads: as :class:`GroupAttention`.
        value_dropout: probability of dropping an output of the attention in training.
        norm: ``"global"`` (:class:`RegularGlobalNorm`, as published), ``"layer"`` (:class:`RegularLayerNorm`) or
            ``"batch"`` (:class:`RegularBatchNorm`). ``None`` means ``"batch"``, which trains best and, in eval mode,
            mixes no pixels; ``"global"`` mixes all pixels of an image, and scales, with which it is refused.
        crop: pixels to remove at each side before the bottleneck; none with scales.
        reach: ``"window"``, :class:`GroupAttention`; or ``"global"``, :class:`GlobalGroupAttention`.
        drop_path: probability of leaving out each of the two branches of an image in training (stochastic depth).
        layer_scale: what each channel of both branches is multiplied with at the start, learned from there
            (LayerScale); ``None`` means no such factors.
        attention: further arguments of :class:`GroupAttention` (``kernel_size``, ``relation``, ``dropout``, ...) or
            :class:`GlobalGroupAttention` (``num_features``, ...).

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial - 2 crop)``.

    Source: GSA-Nets Fig. F.1, with the order of the published code; ``drop_path`` and ``layer_scale`` are those of
    Huang et al. (2016) and Touvron et al. (2021).
    """

    def __init__(
        self,
        group: FiniteGroup | DilationGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 8,
        value_dropout: float = 0.0,
        norm: str | None = None,
        crop: int = 0,
        reach: str = "window",
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        checks.probability(value_dropout=value_dropout)
        checks.choice("reach", reach, REACHES)
        norm = fitting_norm(group, norm)
        check_whole(group, crop=crop)
        kind: Any = GroupAttention
        if reach == "window" and (given := {"num_features", "redraw_interval"} & attention.keys()):
            raise ValueError(f"reach must be 'global' where {' and '.join(sorted(given))} is given, got 'window'")
        if reach == "global":
            if (scales := attention.pop("scale_window", None)) is not None:
                raise ValueError(f"scale_window must be None with reach='global', got {scales!r}")
            if (content := attention.pop("content_heads", None)) is not None:
                raise ValueError(f"content_heads must be None with reach='global', got {content!r}")
            kind = GlobalGroupAttention
        check_keywords(type(self).__name__, attention, kind)
        self.attention = nn.Sequential(
            make_norm(norm, in_channels),
            nn.SiLU(),
            kind(group, in_channels, out_channels, heads=heads, **attention),
            make_norm(norm, out_channels),
            nn.SiLU(),
            nn.Dropout(value_dropout),
        )
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else Pointwise(in_channels, out_channels)
        self.crop = SpatialCrop(crop)
        hidden = max(out_channels // 2, 1)
        self.mlp = MaskedSequential(
            Pointwise(out_channels, hidden),
            make_norm(norm, hidden),
            nn.SiLU(),
            Pointwise(hidden, out_channels),
            make_norm(norm, out_channels),
        )
        self.residuals = nn.ModuleList(Residual(out_channels, layer_scale, drop_path) for _ in range(2))
        width = attention.get("context_channels")
        self.context_norm = None if width is None else make_norm(norm, width)

    def mask_after(self, mask: Tensor) -> Tensor:
        return self.crop.mask_after(mask)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """``mask`` and ``context`` as those of :meth:`GroupAttention.forward`."""
        attended, bottlenecked = self.residuals
        _, _, attention, norm, *last = self.attention
        checks.pixel_mask(mask, x.shape[0], x.shape[3:], x.device)
        x = zero_where_hidden(x, mask)
        seen, context = self._normalised(x, mask, context)
        branch = norm(attention(seen, mask, context=context), mask)
        for module in last:
            branch = module(branch)
        x = self.crop(attended(self.shortcut(x), branch), mask)
        mask = None if mask is None else self.crop.mask_after(mask)
        return zero_where_hidden(bottlenecked(x, self.mlp(x, mask)), mask)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any; see :class:`RandomFeatures`."""
        attention = self.attention[2]
        if isinstance(attention, GlobalGroupAttention):
            attention.redraw_features(generator)

    def attention_map(
        self,
        x: Tensor,
        pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
    ) -> Tensor:
        """The weights of the block's attention; see :meth:`GroupAttention.attention_map`.

        In training, batch norms count the call as any other.
        """
        x, context = self._normalised(x, mask, context)
        attention: Any = self.attention[2]
        return attention.attention_map(x, pixel, mask, context=context)

    def _normalised(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What attention sees of the input and of a context."""
        norm, swish, attention, *_ = self.attention
        cast(AttentionLayer, attention).check_context(x, context)
        if context is not None:
            if self.context_norm is None and isinstance(norm, RegularBatchNorm):
                raise ValueError(
                    "context_channels must be given with norm='batch', so that the context's statistics are its own, "
                    "got None and a context"
                )
            context = swish((self.context_norm or norm)(context, mask))
        return swish(norm(x, mask)), context
