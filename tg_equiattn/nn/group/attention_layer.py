"""The base class of lifting, group and global attention layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.group import GroupEncoding, rotated_offsets
from ...encodings.locality import Locality
from ...functional.group.attention import group_attention_impl, scaled_attention_impl
from ...functional.group.masks import attention_weights, zero_where_masked
from ...functional.group.separable import separable_attention_impl
from ...functional.tiles import joined
from ...grids import Window
from ...groups import DilationGroup, FiniteGroup, check_group
from ...tables import Tables
from ..modules import NotScriptable, StoresSettings
from .defaults import (
    check_encoding,
    default_content_heads,
    default_head_channels,
    default_locality,
    default_relation,
    default_scale_window,
)
from .linear import Masked, Pointwise
from .relations import make_relation

if TYPE_CHECKING:
    from jaxtyping import Float


def _pixels(pixel: object, sides: tuple[int, ...]) -> tuple[list[list[int]], bool]:
    """Check the indices of one or several pixels. Return them as a list, and whether a single pixel was given."""
    try:
        pixels = torch.as_tensor(pixel, device="cpu")  # type: ignore[call-overload]
    except (TypeError, ValueError, RuntimeError):
        pixels = torch.zeros(0)
    whole = not pixels.is_floating_point() and pixels.dtype != torch.bool
    if not whole or pixels.ndim not in (1, 2) or pixels.shape[-1] != len(sides) or not len(pixels):
        raise ValueError(f"pixel must be {len(sides)} integers, or a list of such pixels, got {pixel!r}")
    several = pixels.view(-1, len(sides)).tolist()
    if any(not 0 <= n < side for one in several for n, side in zip(one, sides, strict=True)):
        raise ValueError(f"pixel must be in an image of {sides} pixels, counted from 0, got {pixel!r}")
    return several, pixels.ndim == 1


def _geometry(group: FiniteGroup, window: Window) -> Float[Tensor, "H D d"] | Float[Tensor, "H d d"]:
    """Rotated offsets of a window in pixels, float64. A global window, whose offsets depend on the size of the grid,
    gives the matrices of the elements."""
    return group.matrices if window.is_global else rotated_offsets(group.matrices, window)


@checks.python_numbers
class AttentionLayer(NotScriptable, Masked, StoresSettings):
    """A layer of self-attention or cross attention; see :class:`LiftingAttention` and :class:`GroupAttention`."""

    plain = False  # true to use standard operators of torch only, for exporters
    lifts = False  # true if the input has no group elements
    separable = False  # true if some heads have no content by default

    def __init__(
        self, group: FiniteGroup | DilationGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int | None = 5, window_shape: str | None = None,
        padding_mode: str = "mask", relation: str | None = None, encoding: str | None = "axial",
        locality: float | str | None = "auto", content_heads: int | None = None, scale_window: int | None = None,
        context_channels: int | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_group(group, scales=True)
        self.relation = None if self.lifts else default_relation(group, relation)
        self.scale_window = default_scale_window(group, kernel_size, scale_window)
        checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads)
        self.crosses = context_channels is not None  # every call needs a context
        context_channels = in_channels if context_channels is None else context_channels
        checks.positive(context_channels=context_channels)
        checks.probability(dropout=dropout)
        self.group, self.in_channels, self.out_channels, self.dropout = group, in_channels, out_channels, dropout
        self.heads, self.context_channels = heads, context_channels
        lattice = bool(group.isometries.lattice.all())  # true if all elements map pixels to pixels
        check_encoding(encoding, kernel_size, locality)
        strength = default_locality(locality, lattice, encoding)
        if window_shape is None:
            window_shape = "square" if kernel_size is None or lattice else "disk"
        self.window = Window(group.dim, kernel_size, window_shape, padding_mode)
        self._relation = make_relation(self.relation, group, self.scale_window, kernel_size is None)
        parts = group.dim + (self._relation.arguments is not None)  # number of parts of the axial encoding
        self.head_channels = default_head_channels(head_channels, heads, out_channels, parts)
        head_channels = self.head_channels
        separable = self.separable and self._relation.separates_heads and kernel_size is not None
        self.content_heads = default_content_heads(
            content_heads, heads, self._relation.separates_heads, strength, separable=separable
        )
        if self.crosses and not self.content_heads:
            raise ValueError(
                "content_heads must be at least 1 with a context, got 0: heads without content have no queries, so the "
                "output would not depend on the input"
            )
        width = self.content_heads * head_channels
        self.query = self._relation.matching(in_channels, width) if width else None
        self.key = self._relation.matching(context_channels, width) if width else None
        self.value = self._relation.valuing(context_channels, heads * head_channels)
        self.out = Pointwise(heads * head_channels, out_channels)
        self.encoding_name = encoding
        self.encoding: nn.Module | None = None
        if self.query is not None and self.key is not None:
            self._relation.start(self.query, self.key, self.content_heads, strength is not None, self.crosses)
            if encoding is not None:
                self.encoding = GroupEncoding(encoding, group.dim, head_channels, self._relation.arguments)
        self.locality: Locality | None = None
        if strength is not None:
            arguments, prefers = self._relation.arguments, self._relation.prefers_element
            self.locality = Locality(heads, self.window, strength, elements=arguments, element_preference=prefers)
        self.geometry = Tables(functools.partial(_geometry, group.isometries, self.window))
        self.index = self._relation.index()

    def settings(self) -> dict[str, Any]:
        window, isometries = self.window, self.group.isometries
        return {
            "relation": self.relation, "kernel_size": window.kernel_size,
            "group": {"digest": isometries.digest, "text": repr(isometries)},
            "scales": getattr(self.group, "scales", None), "window_shape": None if window.is_global else window.shape,
            "padding_mode": "circular" if window.circular else "mask", "heads": self.heads,
            "encoding": self.encoding_name, "content_heads": self.content_heads,
        }  # fmt: skip

    def offsets(self, spatial: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Rotated offsets in pixels for a grid of this size, ``(|H|, D, d)``, in float64 by default. For groups of
        scales, H is the group of isometries, since all scales share its offsets."""
        geometry = self.geometry(device, dtype)
        return rotated_offsets(geometry, self.window, spatial) if self.window.is_global else geometry

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the pixels of ``x`` to the pixels of ``x`` or of a context.

        Args:
            x: Features, projected to queries.
            mask: Bool ``(B or 1, *spatial)``, true at valid pixels of ``x``. Numbers of masked pixels have no effect,
                and their outputs are zero. ``None`` means that all pixels are valid.
            context: Features with ``context_channels``, projected to keys and values. They have the image size of x;
                with ``encoding=None`` they may have another size. ``None`` means x; it is allowed if the layer was made
                without ``context_channels``.
            context_mask: Bool ``(B or 1, *spatial)``, true at valid pixels of the context. Masked pixels are not keys.
                A query without a valid key has zero weights, so its output is the bias of the output projection.
                ``None`` means ``mask``, which is the mask of the keys without a context, too.
        """
        context_mask = self.mask_of_context(x, mask, context, context_mask)
        x, context = self._features(x, mask, context, context_mask)
        out = self._attend(x, context, context_mask, self.dropout if self.training else 0.0)
        return zero_where_masked(out, mask)

    def _attend(self, x: Tensor, context: Tensor | None, key_mask: Tensor | None, dropout: float) -> Tensor:
        """Attention with all projections, without checks. Features must be zero at masked pixels."""
        index = None if self.index is None else self.index(x.device)
        out = self._weigh(*self._operands(x, context), index, key_mask, dropout)
        return self.out(out.flatten(1, 2))

    def attention_map(
        self, x: Tensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor, mask: Tensor | None = None, *,
        context: Tensor | None = None, context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        r"""Attention weights of chosen query pixels, without dropout. It does not work in torch.compile or torch.vmap.

        .. math:: \mathrm{head}(i, h) = \sum_t \sum_{(j,s)} \mathrm{map}_i[h, t, s, j]\; v(j, s)

        Here h, t and s are output, query and key elements. The weights are computed as derivatives of the outputs of a
        head by its values. They sum to one over key elements s and pixels j.

        Args:
            x: Features, projected to queries.
            pixel: Indices of the query pixel along the spatial axes, ``(row, column)`` or ``(depth, row, column)``, or
                a list of such pixels.
            mask: Bool ``(B or 1, *spatial)``, true at valid pixels of ``x``. ``None`` means that all pixels are valid.
            context: Features with ``context_channels``, projected to keys and values. ``None`` means x.
            context_mask: Bool ``(B or 1, *spatial)``, true at valid pixels of the context. ``None`` means ``mask``.

        Returns:
            ``(B, heads, |H|, T, S, *spatial)``, or for a list of pixels ``(B, pixels, heads, |H|, T, S, *spatial)``. T
            is ``|H|``, or 1 if each output has one query (``"frame"``, ``"relative"``, lifting, global group
            attention). S is ``|H|``, or 1 for lifting and for ``"frame"``, where s = h. Weights of masked query pixels,
            and of queries without a valid key, are zero. Heads without content also give weights to pixels outside of
            the image, where values are zero, so near the border their weights inside the image sum to less than one.
        """
        if torch.is_inference_mode_enabled():  # inference mode has no derivatives
            with torch.inference_mode(False), torch.no_grad():
                mask, context, context_mask = (None if t is None else t.clone() for t in (mask, context, context_mask))
                return self.attention_map(x.clone(), pixel, mask, context=context, context_mask=context_mask)
        context_mask = self.mask_of_context(x, mask, context, context_mask)
        query, key, value = self._operands(*self._features(x, mask, context, context_mask))
        table = None if self.index is None else self.index(x.device)
        several, one = _pixels(pixel, tuple(query.shape[4:]) if self.query is not None else tuple(value.shape[4:]))

        def of_query_elements(t: slice) -> Tensor:
            summed = table is not None and table.ndim == 3
            index, part = (table[:, t], query[:, :, :, t]) if summed and table is not None else (table, query)

            def weigh(value: Tensor) -> Tensor:
                return zero_where_masked(self._weigh(part, key, value, index, context_mask, 0.0, step=False), mask)

            return attention_weights(weigh, value, len(self.group), several)

        count = query.shape[3] if table is not None and table.ndim == 3 else 1
        maps = torch.stack([of_query_elements(slice(t, t + 1)) for t in range(count)], 4)
        if self.relation == "frame":  # outputs of h depend on values of h only
            maps = maps.diagonal(0, 3, 5).movedim(-1, 3).unsqueeze(5)
        maps = zero_where_masked(maps, context_mask)
        return maps[:, 0] if one else maps

    def mask_of_context(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor | None:
        """The mask of the keys. Raise ValueError if a required context is missing, or if the context or its mask does
        not fit the input."""
        if context is None:
            if self.crosses:
                raise ValueError(
                    f"context must be given, with context_channels={self.context_channels}, got None; for "
                    "self-attention, make the layer with context_channels=None"
                )
            if context_mask is not None:
                raise ValueError("context_mask must be None without context, got a mask; pass it as mask")
            return mask
        if not self.content_heads:
            raise ValueError(
                f"context must be None with content_heads=0, got {checks.described(context)}: heads without content "
                "have no queries, so the output would not depend on the input"
            )
        elements, dim = len(self.group) if self._relation.input_has_elements else None, self.window.dim
        checks.features(context, self.context_channels, dim, elements, self.out.weight, "context")
        by_content = self.encoding is None and self.locality is None
        if context.shape[0] != x.shape[0] or (context.shape[2:] != x.shape[2:] and not by_content):
            raise ValueError(
                f"context must have the batch and the pixels of the input, {tuple(x.shape)}, got "
                f"{tuple(context.shape)}; with kernel_size=None and encoding=None it may have another image size"
            )
        spatial = tuple(context.shape[-dim:])
        if context_mask is None and mask is not None and tuple(mask.shape[1:]) != spatial:
            raise ValueError(
                f"context_mask must be given if mask, {tuple(mask.shape)}, does not fit the context, "
                f"{tuple(context.shape)}, got None"
            )
        name, context_mask = ("mask", mask) if context_mask is None else ("context_mask", context_mask)
        checks.pixel_mask(context_mask, context.shape[0], spatial, context.device, name)
        return context_mask

    def _features(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Check the input. Return its features and the features of the context, both zero at masked pixels."""
        elements = len(self.group) if self._relation.input_has_elements else None
        checks.features(x, self.in_channels, self.window.dim, elements, self.out.weight)
        spatial = x.shape[-self.window.dim :]
        self.window.check(spatial, 2 ** (getattr(self.group, "scales", 1) - 1))
        checks.pixel_mask(mask, x.shape[0], spatial, x.device)
        context = None if context is None else zero_where_masked(context, context_mask)
        return zero_where_masked(x, mask), context

    def _operands(
        self, x: Tensor, context: Tensor | None
    ) -> tuple[Float[Tensor, "B e C #H *pixels"], Float[Tensor, "B e C #H *keys"], Float[Tensor, "B E C #H *keys"]]:
        """Queries, keys and values. The first e of the E heads have content."""
        query, key, value = self.project(x, context)
        return (query.unsqueeze(3), key.unsqueeze(3), value.unsqueeze(3)) if self.lifts else (query, key, value)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project features to queries, keys and values, each ``(B, heads, head_channels, [|H|,] *spatial)``. Without
        content heads, queries and keys have no heads."""
        context = x if context is None else context
        value = self.value(context).unflatten(1, (self.heads, -1))
        if self.query is None or self.key is None:
            return value[:, :0], value[:, :0], value
        split = (self.content_heads, -1)
        return self.query(x).unflatten(1, split), self.key(context).unflatten(1, split), value

    def _scores(self, spatial: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
        """Encodings of offsets and of elements, and biases of offsets and of elements, for a grid of this size. Each is
        None if the layer does not have it."""
        if self.encoding is None and self.locality is None:
            return None, None, None, None
        dtype = torch.promote_types(self.out.weight.dtype, torch.float32)
        offsets, unit = self.offsets(spatial, device, dtype), self.window.scale(spatial)
        rho = (None, None) if self.encoding is None else self.encoding(offsets / unit)
        return *rho, *((None, None) if self.locality is None else self.locality(offsets))

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, key_mask: Tensor | None, dropout: float,
        step: bool = True,
    ) -> Float[Tensor, "B heads channels H *spatial"]:  # fmt: skip
        """Outputs of the heads. They are linear in ``value``, which may have any number of channels. With ``step``, a
        layer in training counts the call as a step."""
        offset_encoding, element_encoding, space_bias, group_bias = self._scores(tuple(value.shape[4:]), value.device)
        count, parts = self.content_heads, []
        if isinstance(self.group, DilationGroup):
            return scaled_attention_impl(
                query, key, value, offset_encoding, element_encoding, index, self.window, space_bias, group_bias,
                dropout, key_mask, self.plain, self.group.scales, self.scale_window,
            )  # fmt: skip
        if count:
            bias = space_bias if space_bias is None else space_bias[:count]
            out, _ = group_attention_impl(
                query, key, value[:, :count], offset_encoding, element_encoding, index, self.window, bias, group_bias,
                dropout, key_mask, self.plain,
            )  # fmt: skip
            parts.append(out.expand(-1, -1, -1, len(self.group), *out.shape[4:]))  # one element without encoding
        if count < self.heads:
            masked = zero_where_masked(value[:, count:], key_mask)  # biases do not mask keys
            parts.append(separable_attention_impl(masked, space_bias[count:], self.window))
        return joined(parts, 1)

    def extra_repr(self) -> str:
        window = self.window
        shown = {
            "heads": self.heads,
            "head_channels": self.head_channels,
            "kernel_size": "None" if window.is_global else window.kernel_size,
            "window_shape": None if window.is_global else repr(window.shape),
            "padding_mode": "'circular'" if window.circular else None,
            "encoding": repr(self.encoding_name),
            "content_heads": self.content_heads if self.content_heads < self.heads else None,
            "scale_window": None if self.lifts else self.scale_window,
            "locality": None if self.locality is None else self.locality.start,
            "context_channels": self.context_channels if self.crosses else None,
            "relation": None if self.lifts else repr(self.relation),
        }
        more = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}{more}"
