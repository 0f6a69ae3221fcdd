"""The residual block of group attention, and classifiers of images and volumes: lifting, blocks, invariant pooling."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from .. import checks
from ..groups import AnyGroup, DilationGroup, FiniteGroup, Group
from ..linear.random_features import DrawsFeatures
from ..modules import StoresSettings
from . import layers
from .attention import GlobalGroupAttention, GroupAttention, LiftingAttention
from .attention_layer import AttentionLayer
from .scales import ScaleGroupAttention, ScaleLiftingAttention, check_scales
from .windows import Checked, Mask, enter, leave, zero_where_masked


@checks.arguments
class GroupAttentionBlock(layers.Masked, DrawsFeatures, StoresSettings):
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
        attention: A :class:`GroupAttention` with ``stride=1``, or a :class:`GlobalGroupAttention`. It determines group
            and channels.
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
        self, attention: GroupAttention | GlobalGroupAttention, *, norm: str = "batch",
        dropout: checks.Probability = 0.0, crop: checks.Whole = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if attention.stride > 1:
            raise ValueError(
                f"attention must have stride=1 in a block, whose shortcut keeps all pixels, got {attention.stride}; "
                "put the attention with a stride before the block"
            )
        check_scales(attention.group, norm, crop=crop)
        in_channels, out_channels = attention.in_channels, attention.out_channels
        self.norm = norm
        self.attention = nn.Sequential(
            layers.make_norm(norm, in_channels),
            nn.SiLU(),
            attention,
            layers.make_norm(norm, out_channels),
            nn.SiLU(),
            nn.Dropout(dropout),
        )
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else layers.Pointwise(in_channels, out_channels)
        self.crop = layers.SpatialCrop(crop)
        hidden = max(out_channels // 2, 1)
        self.mlp = layers.MaskedSequential(
            layers.Pointwise(out_channels, hidden),
            layers.make_norm(norm, hidden),
            nn.SiLU(),
            layers.Pointwise(hidden, out_channels),
            layers.make_norm(norm, out_channels),
        )
        self.context_norm = layers.make_norm(norm, attention.context_channels) if attention.crosses else None

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
                A query without a valid key has zero weights. It must be given with ``mask`` and a context.
        """
        _, _, attention, norm, swish, drop = self.attention
        x, checked, *of_keys = cast(AttentionLayer, attention).enter(x, mask, context, context_mask)
        normalised, *of_keys = self._normalised(x, checked, *of_keys)
        attended = attention(normalised, checked, context=of_keys[0], context_mask=of_keys[1])
        x = self.shortcut(x) + drop(swish(layers.call_masked(norm, attended, checked)))
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
            return swish(layers.call_masked(norm, x, mask)), None, None
        if self.context_norm is None and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                "context_channels must be given with norm='batch', got None and a context; make the attention with "
                "context_channels, so that the context has its own statistics, or use norm='layer'"
            )
        context = swish(layers.call_masked(self.context_norm or norm, context, context_mask))
        return swish(layers.call_masked(norm, x, mask)), context, context_mask


# arguments that GEViT alone has
PUBLISHED = "lifting_channels", "norm_between", "crops", "dropout", "input_dropout", "pool_dropout"


@checks.arguments
class Classifier(StoresSettings):
    """Lifting attention, norm, swish, group attention blocks, a pointwise classifier, pooling over space and group. See
    :class:`GroupTransformer` and :class:`GEViT`, which have some of the arguments each."""

    def __init__(
        self, group: AnyGroup, in_channels: int, num_classes: checks.Count, *,
        channels: Sequence[checks.Count] = (20,) * 5, lifting_channels: checks.Count | None = None, heads: int = 8,
        kernel_size: int | tuple[int, ...] | None = 5, relation: str | None = None, norm: str = "batch",
        norm_between: bool = False, pools: Sequence[int] = (), crops: checks.Whole | Sequence[checks.Whole] = 0,
        dropout: checks.Probability = 0.0, input_dropout: checks.Probability = 0.0,
        pool_dropout: checks.Probability = 0.0, attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not channels:
            raise ValueError(f"channels must hold the width of at least one block, got {channels!r}")
        width = channels[0] if lifting_channels is None else lifting_channels
        margins = [crops] * len(channels) if isinstance(crops, int) else list(crops)
        if len(margins) != len(channels):
            raise ValueError(f"crops must be one number or {len(channels)} (one for each block), got {crops!r}")
        if not set(pools) <= set(range(len(channels) + 1)):
            raise ValueError(f"pools must be block numbers from 0 to {len(channels)}, got {pools!r}")
        check_scales(group, norm, pools=tuple(pools))
        settings: dict[str, Any] = {"heads": heads, "kernel_size": kernel_size, "dropout": dropout}
        settings |= attn_kwargs or {}
        scales = isinstance(group, DilationGroup)
        layer: Any = ScaleGroupAttention if scales else GroupAttention
        lift: Any = ScaleLiftingAttention if scales else LiftingAttention
        taken = inspect.signature(lift).parameters
        if "context_channels" in settings:
            raise ValueError("attn_kwargs must not have context_channels: the model has no context")
        lifting: dict[str, Any] = {name: value for name, value in settings.items() if name in taken}
        if relation is not None:
            settings["relation"] = relation
        self.group, self.in_channels, self.num_classes = group, in_channels, num_classes
        self.pools, self.crops = sorted(pools), margins
        self.lifting = layers.MaskedSequential(
            nn.Dropout(input_dropout),
            lift(group, in_channels, width, **self._width_of_heads(group, width) | lifting),
            layers.make_norm(norm, width),
            nn.SiLU(),
        )

        def pool() -> list[nn.Module]:
            return [nn.Dropout(pool_dropout), layers.SpatialMaxPool(2)]

        stages: list[nn.Module] = pool() if 0 in pools else []
        for number, (out, crop) in enumerate(zip(channels, margins, strict=True), start=1):
            attention = layer(group, width, out, **self._width_of_heads(group, out) | settings)
            stages.append(GroupAttentionBlock(attention, norm=norm, dropout=dropout, crop=crop))
            stages += [layers.make_norm(norm, out), nn.SiLU()] if norm_between else []
            stages += pool() if number in pools else []
            width = out
        self.blocks = layers.MaskedSequential(*stages)
        self.classifier = layers.Pointwise(width, num_classes)
        self.pooling = layers.GlobalPooling(space="mean", group="max")

    def _width_of_heads(self, group: FiniteGroup | DilationGroup, channels: int) -> dict[str, Any]:
        """The ``head_channels`` of an attention layer with this output, if they are not the layer's default."""
        return {}

    def settings(self) -> dict[str, Any]:
        return {"pools": self.pools}

    def features(self, x: Tensor, mask: Mask = None) -> Tensor:
        """The regular feature map before the classifier, ``(B, channels[-1], |H|, *spatial)``."""
        x, checked = enter(x, mask, 2)  # dropout of the input must not see masked pixels
        out = self.blocks(self.lifting(x, checked), checked)
        return out if checked is None else leave(out, self.blocks.mask_after(checked.pixels))

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        """Logits.

        Args:
            x: Images or volumes, ``(B, in_channels, *spatial)``.
            mask: Bool ``(B or 1, *spatial)``, true where there are pixels. Masked pixels change no result.
        """
        scores = self.classifier(self.features(x, mask))
        return self.pooling(scores, None if mask is None else layers.mask_after(self.blocks, mask))


@checks.arguments_of(Classifier, *PUBLISHED)
class GroupTransformer(Classifier):
    r"""Lifting attention, norm, swish, group attention blocks, a pointwise classifier, pooling over space and group.

    The logits are invariant under the group and, up to borders and pools, under translations. With
    ``trivial(2)`` the model is equivariant to translations alone.

    Args:
        group: The finite group, or scales times one (:func:`tg_equiattn.groups.dyadic`), then with a ``kernel_size``
            and without pools and ``norm="global"``.
        in_channels: Channels of the images or volumes.
        num_classes: Number of logits.
        channels: Output channels of each block; their number is the number of blocks.
        heads: Attention heads of every layer.
        kernel_size: Odd side of the windows in pixels, a side for each axis, or ``None`` for attention to all pixels.
        relation: Which group elements meet in the blocks, as in :class:`GroupAttention`. ``None`` means ``"frame"``.
            Groups of scales always have ``"relative"``, and refuse other values than ``None``.
        norm: Normalization of :class:`GroupAttentionBlock`: ``"batch"``, ``"layer"`` or ``"global"``.
        pools: Blocks after which space is max-pooled 2 x 2, counted from 1; 0 means after lifting.
        attn_kwargs: Further arguments of the attention layers of the blocks, except ``context_channels`` and
            ``stride=2``. The lifting layer gets those that :class:`LiftingAttention` has.

    Shapes:
        ``(B, in_channels, *spatial)`` -> ``(B, num_classes)``. Pools must leave pixels. A pool refuses an odd
        side, because the row it would leave out breaks the symmetry.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: the architecture of GSA-Nets Fig. F.1 and GE-ViT Fig. 3, which :class:`GEViT` is exactly.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> model = GroupTransformer(cyclic(4), 1, 10, channels=(8, 8), heads=2, kernel_size=3)
        >>> model(torch.randn(2, 1, 9, 9)).shape
        torch.Size([2, 10])
    """

    old_arguments: ClassVar = dict.fromkeys(PUBLISHED, "GEViT, the papers' model, has it") | {
        "attn_type": "make GroupAttentionBlock with a GlobalGroupAttention",
        "dropout": "attn_kwargs={'dropout': ...} drops attention weights, and GEViT outputs of attention, too",
    }


EPS = 1e-12  # of the published norms in encodings


@checks.arguments_of(Classifier, "relation", "norm", "attn_kwargs")
class GEViT(Classifier):
    r"""The published GE-ViT: :class:`GroupTransformer` with relation ``"ge_vit"`` and global norms.

    Heads have half of the output channels of their layer, encodings are axial, windows square, and there is no
    locality. The logits are invariant under the group and, up to borders, crops and pools, under translations.
    ``cyclic(n)`` gives the papers' Rn_SA, ``dihedral(n)`` gives RnM_SA, and ``trivial(2)`` gives Z2_SA. The presets
    :meth:`rotmnist`, :meth:`cifar10` and :meth:`patchcamelyon` are the papers' models. For new work,
    :class:`GroupTransformer` with its defaults is faster and trains better.

    Args:
        group: The finite group.
        in_channels: Channels of the images or volumes.
        num_classes: Number of logits.
        channels: Output channels of each block; their number is the number of blocks.
        lifting_channels: Output channels of the lifting layer. ``None`` means those of the first block.
        heads: Attention heads of every layer.
        kernel_size: Odd side of the windows in pixels, a side for each axis, or ``None`` for attention to all pixels.
        norm_between: Whether a norm and a swish follow every block.
        pools: Blocks after which space is max-pooled 2 x 2, counted from 1; 0 means after lifting.
        crops: Pixels to remove at each side within each block: one number for all blocks, or one for each.
        dropout: Probability, in training, of dropping an attention weight and an output of attention.
        input_dropout: Probability of dropping a number of the input in training.
        pool_dropout: Probability of dropping a number before each pool in training.

    Shapes:
        ``(B, in_channels, *spatial)`` -> ``(B, num_classes)``. A pool refuses an odd side, because the row it would
        leave out breaks the symmetry.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GE-ViT Fig. 3 (arXiv:2306.06722), GSA-Nets Fig. F.1 and App. F (arXiv:2010.00977).

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> model = GEViT.rotmnist(cyclic(4), channels=(8,) * 5, heads=2)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, group: Group, in_channels: int, num_classes: int, *, heads: int = 9, dropout: float = 0.1,
        **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            group, in_channels, num_classes, heads=heads, dropout=dropout, relation="ge_vit", norm="global",
            attn_kwargs={"encoding": "axial", "window_shape": "square", "locality": None}, **arguments,
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):  # all of them are in encodings
                module.eps = EPS

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"eps": EPS}

    def _width_of_heads(self, group: FiniteGroup | DilationGroup, channels: int) -> dict[str, Any]:
        return {"head_channels": max(channels // 2, group.dim + 1)}

    @classmethod
    def rotmnist(cls, group: FiniteGroup, **kwargs: Any) -> GEViT:
        """28 x 28 grey images, 10 classes: 5 blocks of 20 channels, 9 heads, 5 x 5 (GSA-Nets App. F.1).

        44,438 parameters with ``cyclic(4)``, 10 of them the classifier's bias; the published configuration has 44,428.
        Groups of 2 and 3 blocks with a pool between, crops of 2, 0, 2, 1 and 1 pixels as in the published code.
        Arguments of :class:`GEViT` in ``kwargs`` replace those of the preset.
        """
        preset: dict[str, Any] = {"channels": (20,) * 5, "pools": (2,), "crops": (2, 0, 2, 1, 1)}
        return cls(group, **{"in_channels": 1, "num_classes": 10} | preset | kwargs)

    @classmethod
    def cifar10(cls, group: FiniteGroup, **kwargs: Any) -> GEViT:
        """32 x 32 colour images, 10 classes: blocks of 96, 96, 192, 192, 192, 192 (GSA-Nets App. F.2).

        Dropout 0.3 on the input and 0.2 before the pools, as the paper's text; the published code exchanges the rates.
        Arguments of :class:`GEViT` in ``kwargs`` replace those of the preset.
        """
        preset: dict[str, Any] = {"channels": (96, 96, 192, 192, 192, 192), "pools": (2, 4), "norm_between": True}
        preset |= {"input_dropout": 0.3, "pool_dropout": 0.2}
        return cls(group, **{"in_channels": 3, "num_classes": 10} | preset | kwargs)

    @classmethod
    def patchcamelyon(cls, group: FiniteGroup, **kwargs: Any) -> GEViT:
        """96 x 96 colour images, 2 classes: lifting to 12, blocks of 24, 48, 48, 96 (GSA-Nets App. F.3).

        207,036 parameters with ``cyclic(4)``, 2 of them the classifier's bias; the published configuration has 207,034.
        Pools after lifting and after every group of blocks. The published crops (0, 2, 1, 1) leave 7 x 7 pixels to the
        last pool, which drops a row and with it the symmetry; 0, 2, 2, 1 keep every side even. Arguments of
        :class:`GEViT` in ``kwargs`` replace those of the preset.
        """
        preset: dict[str, Any] = {"channels": (24, 48, 48, 96), "lifting_channels": 12, "pools": (0, 1, 3, 4)}
        preset |= {"crops": (0, 2, 2, 1), "norm_between": True}
        return cls(group, **{"in_channels": 3, "num_classes": 2} | preset | kwargs)
