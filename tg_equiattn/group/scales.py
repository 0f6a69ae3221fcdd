"""Lifting and group attention over groups of scales: dilations by 1, 2, 4, ..., each with a finite group."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import checks
from ..grids import Window
from ..groups import DilationGroup, Scales
from ..shapes import Bool
from .attention import GroupAttention, LiftingAttention
from .attention_layer import AttentionLayer
from .heads import Terms, attention_of_heads


@checks.arguments
class _OverScales(AttentionLayer):
    """A layer whose window has the same number of pixels at each scale."""

    separates = False
    group: Any  # the group of scales
    scale_window = 1  # number of scales that one scale attends to

    def __init__(
        self, group: Scales, in_channels: int, out_channels: int, *, kernel_size: int | tuple[int, ...] = 5,
        **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(group.isometries, in_channels, out_channels, kernel_size=kernel_size, **arguments)
        self.group, self.largest_step, self.between = group, 2 ** (group.scales - 1), {}

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"scales": self.group.scales}

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout: float, t: int | None = None,
        step: bool = True,
    ) -> Tensor:  # fmt: skip
        terms = self._terms(tuple(value.shape[4:]), value.device)
        sizes = self.group.scales, self.scale_window
        return _attend(query, key, value, terms, self.window, *sizes, key_mask, dropout, self.plain)


@checks.arguments_of(LiftingAttention, "content_heads", "stride")
class ScaleLiftingAttention(_OverScales, LiftingAttention):
    """Lifting attention over a group of scales. The formula is at :class:`LiftingAttention`; all heads have content.

    Args:
        group: The group of scales, from :func:`tg_equiattn.groups.dyadic`.
        in_channels: Channels of the input.
        out_channels: Channels of the output, for each group element.
        arguments: The further arguments are those of :class:`LiftingAttention`, with a ``kernel_size``. The window of
            scale h has the offsets h D. A context has the image size of the input.

    Shapes:
        ``(B, in_channels, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``. Scales come first in H.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets App. E, Eq. 20, without its factor :math:`1/h^d`, with which the layer is not equivariant.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dyadic
        >>> ScaleLiftingAttention(dyadic(3), 1, 6, heads=2, kernel_size=3)(torch.randn(2, 1, 9, 7)).shape
        torch.Size([2, 6, 3, 9, 7])
    """


@checks.arguments_of(GroupAttention, "content_heads", "stride", "relation")
class ScaleGroupAttention(_OverScales, GroupAttention):
    """Group attention over a group of scales, with relation ``"relative"``. The formula is at :class:`GroupAttention`;
    all heads have content.

    Args:
        group: The group of scales, from :func:`tg_equiattn.groups.dyadic`.
        in_channels: Channels of the input, for each group element.
        out_channels: Channels of the output, for each group element.
        scale_window: Number of scales that one scale attends to, odd, centred at its own. ``None`` means 3, or 1 if
            there is one scale.
        arguments: The further arguments are those of :class:`GroupAttention`, with a ``kernel_size``. The window of
            scale h has the offsets h D. A context has the image size of the input.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``. Scales come first in H.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: GSA-Nets App. E, Eq. 21, without its factor :math:`1/h^{d+1}`, with which the layer is not equivariant.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dyadic
        >>> ScaleGroupAttention(dyadic(3), 6, 6, heads=2, kernel_size=3)(torch.randn(2, 6, 3, 9, 7)).shape
        torch.Size([2, 6, 3, 9, 7])
    """

    def __init__(
        self, group: Scales, in_channels: int, out_channels: int, *, scale_window: int | None = None, **arguments: Any
    ) -> None:
        largest = 2 * group.scales - 1
        scale_window = min(3, largest) if scale_window is None else scale_window
        if scale_window not in range(1, largest + 1, 2):
            raise ValueError(
                f"scale_window must be an odd integer from 1 to {largest} with {group.scales} scales, got "
                f"{scale_window!r}"
            )
        self.scale_window = scale_window  # which decides the number of elements u
        super().__init__(group, in_channels, out_channels, relation="relative", **arguments)

    def _count_elements(self) -> int:
        return self.scale_window * super()._count_elements()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale_window={self.scale_window}"


def _attend(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, window: Window, scales: int, scale_window: int,
    key_mask: Bool[Tensor, "#B *spatial"] | None, dropout: float, plain: bool,
) -> Tensor:  # fmt: skip
    r"""Lifting and group attention over the product of scales :math:`2^j` and a finite group M with elements m and n.

    .. math::
        \mathrm{out}(i, j, m) = \sum_{D, l, n} \mathrm{softmax}_{D, l, n}\big(c\, \langle q(i, j, m),\;
        k(i + 2^j D, l, n) + \rho(m^{-1} D, (l - j, m^{-1} n)) \rangle + b\big)\; v(i + 2^j D, l, n)

    The sum runs over the offsets D of the window and the scales l in ``scale_window`` around j. Queries, keys and
    values have all scales and elements, scales first, or one element for lifting. The terms have U = ``scale_window``
    |M| elements, scales first, and the index of relation "relative" of M.
    """
    elements, reach, outs = len(cast(Tensor, terms.offset_encoding)), scale_window // 2, []
    for scale in range(scales):
        operands, of_scale = (query, key, value), terms
        if terms.element_index is not None:
            keys = range(max(0, scale - reach), min(scales, scale + reach + 1))
            window_of_keys = slice(keys.start * elements, keys.stop * elements)
            index = [terms.element_index + (other - scale + reach) * elements for other in keys]
            of_scale = terms._replace(element_index=torch.cat(index, 1))
            of_query = query[:, :, :, scale * elements : (scale + 1) * elements]
            operands = of_query, key[:, :, :, window_of_keys], value[:, :, :, window_of_keys]
        outs.append(attention_of_heads(*operands, of_scale, window, key_mask, dropout, plain, 2**scale)[0])
    return torch.cat(outs, 3)


def check_scales(group: object, norm: str, **sizes: object) -> None:
    """Raise ValueError for settings that are not equivariant with groups of scales: the norm over all scales, and any
    of the ``sizes`` of pools and crops that is not zero."""
    if not isinstance(group, DilationGroup):
        return
    if norm == "global":
        raise ValueError(
            "norm must be 'batch' or 'layer' for groups of scales (dyadic), got 'global': scaling moves features up "
            "one scale and drops those of the last scale, which changes the mean over all scales"
        )
    for name, size in sizes.items():
        if size:
            raise ValueError(
                f"{name} must be {0 if isinstance(size, int) else ()} for groups of scales (dyadic), got {size!r}: "
                "an image twice as large would need a crop or pool twice as large"
            )
