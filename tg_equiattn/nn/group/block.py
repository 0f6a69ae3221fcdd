"""The pre-activation residual block of group self-attention networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from ... import checks
from ...functional.group.windows import Checked, Mask, zero_where_masked
from ..modules import StoresSettings
from ..performer.random_features import DrawsFeatures
from .attention import GlobalGroupAttention, GroupAttention
from .attention_layer import AttentionLayer
from .defaults import check_scales
from .layers import Masked, MaskedSequential, SpatialCrop, call_masked, make_norm
from .linear import Pointwise


@checks.python_numbers
class GroupAttentionBlock(Masked, DrawsFeatures, StoresSettings):
    r"""Norm, swish, group attention, norm, swish, dropout, shortcut; then a pointwise bottleneck, norm, shortcut.

    .. math::
        y &= \mathrm{crop}\big(\mathrm{shortcut}(x)
            + \mathrm{drop}(\sigma(\mathrm{norm}(\mathrm{attn}(\sigma(\mathrm{norm}(x))))))\big) \\
        z &= y + \mathrm{norm}(W_2\, \sigma(\mathrm{norm}(W_1\, y)))

    The shortcut is the identity, or a pointwise map if the number of channels changes. :math:`\sigma` is swish, and the
    bottleneck :math:`W_1, W_2` has half the channels. A context also goes through a norm and swish. It has its own norm
    if the attention was made with ``context_channels``, which ``norm="batch"`` requires; otherwise it shares the norm
    of x.

    Args:
        attention: A :class:`GroupAttention` or a :class:`GlobalGroupAttention`. It determines group and channels.
        norm: Normalisation. ``"batch"`` (the default) has one mean and variance for each channel, as
            ``torch.nn.BatchNorm1d``; it trains best, and in eval mode it does not mix pixels. ``"layer"`` is
            :class:`RegularLayerNorm`. ``"global"`` is the published :class:`RegularGlobalNorm`, which mixes all pixels
            of an image and is not allowed for groups of scales. To share the statistics of ``"batch"`` between
            processes, use ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``; the model then does not support masks.
        dropout: Probability of dropping an output of the attention in training.
        crop: Number of pixels to remove at each side before the bottleneck. It must be 0 for groups of scales.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial - 2 crop)``, with the channels of the
        attention.

    Raises:
        ValueError: if an argument is not allowed, or if ``norm`` or ``crop`` does not fit a group of scales.

    Source: GSA-Nets Fig. F.1, with the order of the published code.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> from tg_equiattn.nn import GroupAttention
        >>> attention = GroupAttention(cyclic(4), 3, 5, heads=2, kernel_size=3)
        >>> block = GroupAttentionBlock(attention, norm="layer", crop=1)
        >>> block(torch.randn(2, 3, 4, 9, 7)).shape
        torch.Size([2, 5, 4, 7, 5])
    """

    def __init__(
        self, attention: GroupAttention | GlobalGroupAttention, *, norm: str = "batch", dropout: float = 0.0,
        crop: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(attention, (GroupAttention, GlobalGroupAttention)):
            raise ValueError(
                f"attention must be a GroupAttention or a GlobalGroupAttention, got {type(attention).__name__}"
            )
        if attention.stride > 1:
            raise ValueError(
                f"attention must have stride=1 in a block, whose shortcut keeps all pixels, got {attention.stride}; "
                "put the attention with a stride before the block"
            )
        checks.probability(dropout=dropout)
        check_scales(attention.group, norm, crop=crop)
        in_channels, out_channels = attention.in_channels, attention.out_channels
        self.norm = norm
        self.attention = nn.Sequential(
            make_norm(norm, in_channels),
            nn.SiLU(),
            attention,
            make_norm(norm, out_channels),
            nn.SiLU(),
            nn.Dropout(dropout),
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
        self.context_norm = make_norm(norm, attention.context_channels) if attention.crosses else None

    def settings(self) -> dict[str, Any]:
        return {"norm": self.norm, "crop": self.crop.margin}

    def mask_after(self, mask: Tensor) -> Tensor:
        return self.crop.mask_after(mask)

    def forward(
        self, x: Tensor, mask: Mask = None, *, context: Tensor | None = None, context_mask: Mask = None
    ) -> Tensor:
        """Apply the block.

        Args:
            x: Features of the input.
            mask: Bool ``(B or 1, *spatial)``, true at valid pixels of ``x``. Masked pixels have no effect on other
                pixels, and their outputs are zero. ``None`` means that all pixels are valid.
            context: Features with ``context_channels``, from which the attention makes keys and values. ``None`` means
                x.
            context_mask: Bool ``(B or 1, *spatial)``, true at valid pixels of the context. Masked pixels are not keys.
                A query without a valid key has zero weights. ``None`` means ``mask``.
        """
        _, _, attention, norm, swish, drop = self.attention
        x, checked, *of_keys = cast(AttentionLayer, attention).enter(x, mask, context, context_mask)
        normalised, *of_keys = self._normalised(x, checked, *of_keys)
        attended = attention(normalised, checked, context=of_keys[0], context_mask=of_keys[1])
        x = self.shortcut(x) + drop(swish(call_masked(norm, attended, checked)))
        x = self.crop(zero_where_masked(x, checked))
        after = None if checked is None else Checked(self.crop.mask_after(checked.pixels))
        out = x + self.mlp(x, after)
        return out if isinstance(mask, Checked) else zero_where_masked(out, after)

    def attention_map(
        self, x: Tensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor, mask: Mask = None, *,
        context: Tensor | None = None, context_mask: Mask = None,
    ) -> Tensor:  # fmt: skip
        """Attention weights of chosen query pixels in the block's attention; arguments and result are those of
        :meth:`GroupAttention.attention_map`. In training mode, the call updates the statistics of batch norms."""
        attention: Any = self.attention[2]
        x, checked, *of_keys = attention.enter(x, mask, context, context_mask)
        x, context, key_mask = self._normalised(x, checked, *of_keys)
        return attention.attention_map(x, pixel, checked, context=context, context_mask=key_mask)

    def _normalised(
        self, x: Tensor, mask: Checked | None, context: Tensor | None, context_mask: Checked | None
    ) -> tuple[Tensor, Tensor | None, Checked | None]:
        """Apply norm and swish to the input and to the context of the attention; the last result is the mask of the
        context."""
        norm, swish, *_ = self.attention
        if context is None:
            return swish(call_masked(norm, x, mask)), None, None
        if self.context_norm is None and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                "context_channels must be given with norm='batch', got None and a context; make the attention with "
                "context_channels, so that the context has its own statistics, or use norm='layer'"
            )
        context = swish(call_masked(self.context_norm or norm, context, context_mask))
        return swish(call_masked(norm, x, mask)), context, context_mask
