"""GE-ViT: a classifier of group self-attention blocks, with the published architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.group.masks import zero_where_masked
from ...groups import DilationGroup, FiniteGroup
from ..modules import StoresSettings
from .attention import GroupAttention, LiftingAttention
from .block import GroupAttentionBlock
from .global_attention import GlobalGroupAttention
from .linear import MaskedSequential, Pointwise
from .norm import make_norm
from .options import AttentionOptions, check_names, check_scales, make_options
from .pooling import GlobalPooling, SpatialMaxPool

SHARED = ("head_channels", "locality", "padding_mode", "dropout", "encoding", "window")
WINDOW = ("content_heads", "scale_window")
EVERYWHERE = ("num_features", "redraw_interval")
PUBLISHED: dict[str, Any] = {
    "heads": 9, "relation": "ge_vit", "norm": "global", "dropout": 0.1,
    "attention": {"encoding": "axial", "window": "square", "locality": None},
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "rotmnist": {
        "in_channels": 1, "num_classes": 10, "channels": (20,) * 5, "pools": (2,), "options": {"crops": (2, 0, 2, 1, 1)}
    },
    "cifar10": {
        "in_channels": 3, "num_classes": 10, "channels": (96, 96, 192, 192, 192, 192), "pools": (2, 4),
        "options": {"input_dropout": 0.3, "pool_dropout": 0.2, "norm_between": True},
    },
    "patchcamelyon": {
        "in_channels": 3, "num_classes": 2, "channels": (24, 48, 48, 96), "pools": (0, 1, 3, 4),
        "options": {"lifting_channels": 12, "crops": (0, 2, 2, 1), "norm_between": True},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The ``options`` of :class:`GEViT`."""

    lifting_channels: int | None = None
    crops: int | Sequence[int] = 0
    input_dropout: float = 0.0
    pool_dropout: float = 0.0
    norm_between: bool = False
    drop_path: float = 0.0
    layer_scale: float | None = None


def _make_attention(kind: Any, *channels: Any, **arguments: Any) -> Any:
    """An attention layer of arguments among which are those of its options."""
    names = [field.name for field in fields(AttentionOptions)]
    options = {name: arguments.pop(name) for name in names if name in arguments}
    return kind(*channels, **arguments, options=options)


@checks.python_numbers
class GEViT(StoresSettings):
    r"""Lifting attention, norm, swish, group attention blocks, a pointwise classifier, pooling over space and group.

    The logits are invariant under the group and, up to borders, crops and pools, under translations. With
    ``trivial(2)`` this is the translation-equivariant baseline Z2_SA; ``cyclic(n)`` gives Rn_SA and ``dihedral(n)``
    RnM_SA.

    Args:
        group: the finite group, or scales times one (:func:`tg_equiattn.groups.dyadic`), without pools and crops then.
        in_channels, num_classes: channels of the images or volumes, and number of logits.
        channels, heads: output width of each block, and heads of every attention layer.
        kernel_size: odd window, or ``None`` for global attention.
        relation: as :class:`GroupAttention`, whose errors are raised.
        pools: blocks after which space is pooled 2 x 2, counted from 1; 0 means after lifting.
        norm: as :class:`GroupAttentionBlock`.
        dropout: probability, in training, of dropping a weight and an output of attention.
        attention: further arguments of the attention layers by name, those of their options among them, except
            ``context_channels``; a ``dropout`` here is that of weights alone. With ``num_features`` (which may be
            ``None``) or ``redraw_interval`` blocks are of :class:`GlobalGroupAttention`.
        options: what the papers' models have, by name: ``lifting_channels``, the width after lifting, by default that
            of the first block; ``crops``, pixels to remove at each side within each block, before its bottleneck, one
            number for all or one a block; ``input_dropout`` of the images; ``pool_dropout`` before pooling;
            ``norm_between``, norm and swish after every block; and ``layer_scale`` and ``drop_path`` of
            :class:`GroupAttentionBlock`, the latter of the last block, where blocks before it leave out their branches
            less often, the first never.

    Shapes:
        ``(B, in_channels, *spatial)`` -> ``(B, num_classes)``. Any size that crops and pools allow; a pool of an odd
        side raises, because the row it leaves out would break the symmetry.

    Source: GE-ViT Fig. 3, GSA-Nets Fig. F.1 and App. F.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> model = GEViT(cyclic(4), 1, 10, channels=(8, 8), heads=2, kernel_size=3)
        >>> model(torch.randn(2, 1, 9, 9)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, group: FiniteGroup | DilationGroup, in_channels: int, num_classes: int, *,
        channels: Sequence[int] = (20,) * 5, heads: int = 8, kernel_size: int | None = 5, relation: str | None = None,
        pools: Sequence[int] = (), norm: str = "batch", dropout: float = 0.0,
        attention: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        more = make_options(Architecture, options)
        checks.positive(num_classes=num_classes)
        checks.probability(
            dropout=dropout, input_dropout=more.input_dropout, pool_dropout=more.pool_dropout, drop_path=more.drop_path
        )
        if isinstance(channels, int) or not channels:
            raise ValueError(f"channels must hold the width of at least one block, got {channels!r}")
        for number, out in enumerate(channels):
            checks.positive(**{f"channels[{number}]": out})
        width = channels[0] if more.lifting_channels is None else more.lifting_channels
        checks.positive(lifting_channels=width)
        crops = more.crops
        margins = [crops] * len(channels) if isinstance(crops, int) else list(crops)
        if len(margins) != len(channels):
            raise ValueError(f"crops must be one number or {len(channels)} (one a block), got {crops!r}")
        if isinstance(pools, int) or not set(pools) <= set(range(len(channels) + 1)):
            raise ValueError(f"pools must be block numbers from 0 to {len(channels)}, got {pools!r}")
        check_scales(group, norm, crops=tuple(filter(None, margins)), pools=tuple(pools))
        given = check_names("attention", attention, (*SHARED, *WINDOW, *EVERYWHERE))
        kind = GlobalGroupAttention if given.keys() & set(EVERYWHERE) else GroupAttention
        inner: dict[str, Any] = {"heads": heads, "kernel_size": kernel_size, "dropout": dropout, **given}
        lifting = {name: value for name, value in inner.items() if name not in WINDOW + EVERYWHERE}
        self.group, self.in_channels, self.num_classes = group, in_channels, num_classes
        self.pools, self.crops = sorted(pools), margins
        self.lifting = MaskedSequential(
            nn.Dropout(more.input_dropout),
            _make_attention(LiftingAttention, group, in_channels, width, **lifting),
            make_norm(norm, width),
            nn.SiLU(),
        )

        def pool() -> list[nn.Module]:
            return [nn.Dropout(more.pool_dropout), SpatialMaxPool(2)]

        stages: list[nn.Module] = pool() if 0 in pools else []
        for number, (out, crop) in enumerate(zip(channels, margins, strict=True), start=1):
            layer = _make_attention(kind, group, width, out, relation=relation, **inner)
            drop_path = more.drop_path * (number - 1) / max(len(channels) - 1, 1)
            residuals: dict[str, Any] = {"drop_path": drop_path, "layer_scale": more.layer_scale}
            stages.append(GroupAttentionBlock(layer, norm=norm, dropout=dropout, crop=crop, **residuals))
            stages += [make_norm(norm, out), nn.SiLU()] if more.norm_between else []
            stages += pool() if number in pools else []
            width = out
        self.blocks = MaskedSequential(*stages)
        self.classifier = Pointwise(width, num_classes)
        self.pooling = GlobalPooling(space="mean", group="max")

    def settings(self) -> dict[str, Any]:
        return {"pools": str(self.pools), "crops": str(self.crops)}

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features where there are any; see :meth:`GlobalGroupAttention.redraw_features`."""
        for layer in self.blocks.modules():
            if isinstance(layer, GlobalGroupAttention):
                layer.redraw_features(generator)

    def features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The regular feature map before the classifier, ``(B, channels[-1], |H|, *spatial)``."""
        if mask is not None:  # before the dropout of what is not there
            checks.pixel_mask(mask, x.shape[0], x.shape[2:], x.device)
            x = zero_where_masked(x, mask)
        return self.blocks(self.lifting(x, mask), mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits; ``mask`` as that of :meth:`LiftingAttention.forward`."""
        scores = self.classifier(self.features(x, mask))
        return self.pooling(scores, None if mask is None else self.blocks.mask_after(mask))

    @classmethod
    def _published(cls, name: str, group: FiniteGroup, overrides: dict[str, Any]) -> GEViT:
        """A published model; mappings among the overrides are added to those it has."""
        settings = PUBLISHED | PRESETS[name]
        for argument in ("attention", "options"):
            overrides[argument] = settings[argument] | dict(overrides.get(argument) or {})
        model = cls(group, **settings | overrides)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):  # of the encodings
                module.eps = 1e-12
        return model

    @classmethod
    def rotmnist(cls, group: FiniteGroup, **overrides: Any) -> GEViT:
        """28 x 28 grey images, 10 classes: 5 blocks of 20 channels, 9 heads, 5 x 5 (GSA-Nets App. F.1).

        44,438 parameters with ``cyclic(4)``, 10 of them the classifier's bias; the published configuration has 44,428.
        Groups of 2 and 3 blocks with a pool between, crops of 2, 0, 2, 1 and 1 pixels as in the published code.
        """
        return cls._published("rotmnist", group, overrides)

    @classmethod
    def cifar10(cls, group: FiniteGroup, **overrides: Any) -> GEViT:
        """32 x 32 colour images, 10 classes: blocks of 96, 96, 192, 192, 192, 192 (GSA-Nets App. F.2).

        Dropout 0.3 on the input and 0.2 before the pools, as the paper's text; the published code exchanges the rates.
        """
        return cls._published("cifar10", group, overrides)

    @classmethod
    def patchcamelyon(cls, group: FiniteGroup, **overrides: Any) -> GEViT:
        """96 x 96 colour images, 2 classes: lifting to 12, blocks of 24, 48, 48, 96 (GSA-Nets App. F.3).

        207,036 parameters with ``cyclic(4)``, 2 of them the classifier's bias; the published configuration has 207,034.
        Pools after lifting and after every group of blocks. The published crops (0, 2, 1, 1) leave 7 x 7 pixels to the
        last pool, which drops a row and with it the symmetry; 0, 2, 2, 1 keep every side even.
        """
        return cls._published("patchcamelyon", group, overrides)
