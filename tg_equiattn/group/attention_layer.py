"""The base class of lifting, group and global attention layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Phase, Window, between_grids, phases
from ..groups import FiniteGroup, Group
from ..modules import NotScriptable, StoresSettings
from ..shapes import Float
from ..softmax_attention import merge_attentions
from ..tiles import joined
from ..torch_state import Tables, full_precision, is_inference, ordinary_tensors
from .defaults import (
    check_relation,
    check_sides,
    check_stride,
    default_content_heads,
    default_encoding,
    default_strength,
)
from .encodings import (
    CONTENT,
    RELATIONS,
    GroupEncoding,
    Locality,
    RotaryEncoding,
    relation_index,
    rotated_offsets,
)
from .heads import (
    Terms,
    attention_by_position,
    attention_of_heads,
    attention_weights,
    rotary_attention,
)
from .layers import GroupLinear, Masked, Pointwise
from .windows import Checked, Mask, enter, every_second, interleaved, zero_where_masked


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
    if any(not 0 <= n < side for place in several for n, side in zip(place, sides, strict=True)):
        raise ValueError(f"pixel must be in an image of {sides} pixels, counted from 0, got {pixel!r}")
    return several, pixels.ndim == 1


def _geometry(group: FiniteGroup, window: Window) -> Float[Tensor, "H D d"] | Float[Tensor, "H d d"]:
    """Rotated offsets of a window in pixels, float64. A global window, whose offsets depend on the size of the grid,
    gives the matrices of the elements."""
    return group.matrices if window.is_global else rotated_offsets(group.matrices, window.offsets())


def _between(window: Window) -> dict[tuple[bool, bool], list[Phase]]:
    """The phases of a window to keys on a finer or a coarser grid, with pixels on pixels or between them, where the
    window reaches any."""
    flags = () if window.is_global else (False, True)
    parts = {(a, b): phases(window, a, b) for a in flags for b in flags}
    return {grids: some for grids, some in parts.items() if some}


def _geometry_between(group: FiniteGroup, window: Window) -> tuple[Float[Tensor, "H D d"], ...]:
    """Rotated offsets of all phases."""
    offsets = [torch.cat([phase.offsets for phase in parts]) for parts in _between(window).values()]
    return tuple(rotated_offsets(group.matrices, x) for x in offsets)


@checks.arguments
class AttentionLayer(NotScriptable, Masked, StoresSettings):
    """A layer of self-attention or cross attention; see :class:`LiftingAttention` and :class:`GroupAttention`."""

    plain = False  # true to use standard operators of torch only, for exporters
    lifts = False  # true if the input has no group elements
    separates = True  # true if some heads have no content by default
    largest_step = 1  # most pixels between neighbouring offsets of the window

    def __init__(
        self, group: Group, in_channels: checks.Count, out_channels: checks.Count, *,
        heads: checks.Count = 8, head_channels: checks.Count | None = None,
        kernel_size: int | tuple[int, ...] | None = 5, window_shape: str | None = None, padding_mode: str = "mask",
        relation: str = "frame", encoding: str | None = "auto",
        locality: checks.NotNegative | str | None = "auto", content_heads: int | None = None,
        context_channels: checks.Count | None = None, stride: int = 1,
        dropout: checks.Probability = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not self.lifts:
            check_relation(relation)
        self.relation = None if self.lifts else relation
        self._relation = row = RELATIONS[self.relation or "lifting"]
        self.crosses = context_channels is not None  # every call needs a context
        context_channels = in_channels if context_channels is None else context_channels
        self.group, self.in_channels, self.out_channels, self.dropout = group, in_channels, out_channels, dropout
        encoding = default_encoding(encoding, self.relation, kernel_size, locality)
        self.heads, self.context_channels, self.encoding_name = heads, context_channels, encoding
        lattice = bool(group.lattice.all())  # true if all elements map pixels to pixels
        strength = default_strength(locality, lattice, encoding, kernel_size)
        if window_shape is None:
            window_shape = "square" if kernel_size is None or lattice else "disk"
        self.window = Window(group.dim, kernel_size, window_shape, padding_mode)
        check_sides(group, self.window)
        check_stride(stride, self.window, self.crosses)
        self.stride = stride
        arguments = None if row.index is None else self._count_elements()
        if head_channels is None:  # as wide as the output, and a channel for each part of the axial encoding
            head_channels = max(-(-out_channels // heads), group.dim + (arguments is not None))
            head_channels += head_channels % 2 if encoding == "rotary" else 0  # which rotates pairs of channels
        every = not self.separates or kernel_size is None or strength is None
        self.head_channels = head_channels
        self.content_heads = default_content_heads(
            content_heads, heads, strength, self.crosses, heads if every else math.ceil(row.content * heads)
        )
        width = self.content_heads * head_channels
        self.query = self._projection(in_channels, width, kernel_size is None) if width else None
        self.key = self._projection(context_channels, width, kernel_size is None) if width else None
        self.value = self._projection(context_channels, heads * head_channels)
        self.out = Pointwise(heads * head_channels, out_channels)
        self.encoding: nn.Module | None = None
        if width:
            self._start(strength is not None, encoding != "rotary")
            if encoding == "rotary":
                self.encoding = RotaryEncoding(heads, group.dim, head_channels, arguments)
            elif encoding is not None:
                self.encoding = GroupEncoding(encoding, group.dim, head_channels, arguments)
        self.locality: Locality | None = None
        if strength is not None:
            prefers = row.prefers_element
            self.locality = Locality(heads, self.window, strength, elements=arguments, element_preference=prefers)
        self.geometry = Tables(functools.partial(_geometry, group, self.window))
        self.between = {} if self.window.circular else _between(self.window)
        self.geometry_between = Tables(functools.partial(_geometry_between, group, self.window))
        indexed = cast(str, self.relation)
        self.index = None if row.index is None else Tables(functools.partial(relation_index, group, indexed))

    def _count_elements(self) -> int:
        """The number of elements u of the encoding."""
        return len(self.group)

    def _projection(self, in_channels: int, out_channels: int, mixes: bool = True) -> Pointwise | GroupLinear:
        """The projection to values, or to queries and keys. In frames, the projection to values mixes group
        elements. With a global window, those to queries and keys do too, so that a head can compare two elements."""
        if self._relation.mixes_elements and mixes:
            return GroupLinear(self.group, in_channels, out_channels)
        return Pointwise(in_channels, out_channels)

    def _start(self, by_locality: bool, by_tables: bool) -> None:
        """Initialise the projections to queries and keys.

        Outside of frames, queries are scaled down if there is locality, which then determines the weights at the start.
        In frames with a global window, head e compares element h with h u, where u is the e-th element: its keys start
        as the queries of element h u. Features that are equal up to a rotation then have large scores from the first
        step. With rotary positions and ``"relative"``, which compares all elements, keys start as the queries.
        """
        query, key = cast(nn.Module, self.query), cast(nn.Module, self.key)
        if by_tables:
            nn.init.normal_(cast(Tensor, query.bias))  # so that scores depend on offsets where the input is zero
        with torch.no_grad():
            if by_locality and not self._relation.mixes_elements:
                for parameter in query.parameters():
                    parameter.mul_(CONTENT)
            if self.crosses:
                return
            if self.relation == "relative" and not by_tables:
                cast(Tensor, key.weight).copy_(cast(Tensor, query.weight))
            if isinstance(query, GroupLinear):
                table = relation_index(query.group, "relative").to(query.weight.device)  # u^-1 g
                of_heads = query.weight.unflatten(0, (self.content_heads, -1))
                rotated = [weight[..., table[head % len(table)]] for head, weight in enumerate(of_heads)]
                cast(Tensor, key.weight).copy_(torch.cat(rotated))

    def settings(self) -> dict[str, Any]:
        window, isometries = self.window, self.group.isometries
        return {
            "relation": self.relation, "kernel_size": window.kernel_size,
            "group": {"digest": isometries.digest, "text": repr(isometries)},
            "window_shape": None if window.is_global else window.shape,
            "padding_mode": "circular" if window.circular else "mask", "heads": self.heads,
            "encoding": self.encoding_name, "content_heads": self.content_heads,
            "stride": self.stride if self.stride > 1 else None,
        }  # fmt: skip

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Raise ValueError for settings of a layer with locality in one without it, and the reverse."""
        stored, own = f"{prefix}locality.centre" in state_dict, None if self.locality is None else self.locality.start
        if f"{prefix}_extra_state" in state_dict and stored != (own is not None):
            raise ValueError(
                f"locality must be {'a number, for example 4.0' if stored else 'None'}, as in the layer of the "
                f"state_dict, got {own}. Earlier versions had locality by default with kernel_size=None, "
                "too; make such layers with locality=4.0"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def offsets(self, spatial: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Rotated offsets in pixels for a grid of this size, ``(|H|, D, d)``, in float64 by default. For groups of
        scales, H is the group of isometries, since all scales share its offsets."""
        geometry = self.geometry(device, dtype)
        if not self.window.is_global:
            return geometry
        return rotated_offsets(geometry, self.window.offsets(spatial, geometry.device))

    def forward(
        self, x: Tensor, mask: Mask = None, *, context: Tensor | None = None, context_mask: Mask = None
    ) -> Tensor:
        """Attention of the pixels of ``x`` to the pixels of ``x`` or of a context.

        Args:
            x: Features, projected to queries.
            mask: Bool ``(B or 1, *spatial)``, true at valid pixels of ``x``. Numbers of masked pixels have no effect,
                and their outputs are zero. ``None`` means that all pixels are valid.
            context: Features with ``context_channels``, projected to keys and values. They have the image size of x. In
                lifting and group attention within a window without circular padding, x and the context may also have n
                pixels and 2 n or 2 n - 1 pixels along every axis, in either order. With 2 n pixels, those of the
                coarser grid lie between those of the finer one; with 2 n - 1, they lie on every second of them. The
                window then has the keys at up to ``kernel_size / 2`` pixels of the finer grid. With ``encoding=None``
                or ``"rotary"`` the context may have any size. Rotary positions then assume that x and the context show
                the same field of view: their longest sides have equal lengths. ``None`` means x; it is allowed if the
                layer was made without ``context_channels``.
            context_mask: Bool ``(B or 1, *spatial)``, true at valid pixels of the context. Masked pixels are not keys.
                A query without a valid key has zero weights, so its output is the bias of the output projection.
                It must be given with ``mask`` and a context, and must be ``None`` without a context: ``mask`` is then
                the mask of the keys, too.
        """
        x, checked, context, key_mask = self.enter(x, mask, context, context_mask)
        key_pixels = None if key_mask is None else key_mask.pixels
        out = self._attend(x, x if context is None else context, key_pixels, self.dropout if self.training else 0.0)
        return out if isinstance(mask, Checked) else zero_where_masked(out, checked)

    def enter(
        self, x: Tensor, mask: Mask, context: Tensor | None, context_mask: Mask
    ) -> tuple[Tensor, Any, Tensor | None, Any]:
        """Check the arguments of :meth:`forward`. Return features with zeros at masked pixels and checked masks:
        of the queries' pixels, and of the context, which gives the keys. With ``stride=2``, queries are every second
        pixel, and keys are all pixels of the input."""
        axis = 2 if self.lifts else 3
        elements, dim = None if self.lifts else self.group.order, self.window.dim
        checks.features(x, self.in_channels, dim, elements, self.out.weight)
        self.window.check(x.shape[axis:], self.largest_step)
        entered, checked = enter(x, mask, axis)
        if self.stride > 1:
            if context is not None:
                raise ValueError(
                    f"stride must be 1 with a context, got {self.stride}; leave out pixels of the input before the call"
                )
            if any(side % 2 == 0 for side in x.shape[axis:]):
                raise ValueError(
                    f"input sides must be odd with stride=2, got {tuple(x.shape[axis:])}: every second pixel of even "
                    "sides is not symmetric; pool even sides by 2, and call a layer of stride 1 with the pooled "
                    "features, and context=input"
                )
            kept = None if checked is None else Checked(self.mask_after(checked.pixels))
            return every_second(entered, (0,) * dim), kept, entered, checked
        if context is None:
            if self.crosses:
                raise ValueError(
                    f"context must be given, with context_channels={self.context_channels}, got None; for "
                    "self-attention, make the layer with context_channels=None"
                )
            if context_mask is not None:
                raise ValueError("context_mask must be None without context, got a mask; pass it as mask")
            return entered, checked, None, checked
        if not self.content_heads:
            raise ValueError(
                f"context must be None with content_heads=0, got {checks.described(context)}: heads without content "
                "have no queries, so the output would not depend on the input"
            )
        checks.features(context, self.context_channels, dim, elements, self.out.weight, "context")
        if context.shape[0] != x.shape[0] or not self._fits(x.shape[axis:], context.shape[axis:]):
            raise ValueError(
                f"context must have the batch and the pixels of the input, {tuple(x.shape)}, got "
                f"{tuple(context.shape)}; in lifting and group attention, in a window without circular padding, of at "
                "least 3 pixels, one may have n pixels along every axis and the other 2 n or 2 n - 1; with "
                "kernel_size=None and encoding=None or 'rotary' it may have another image size"
            )
        if context_mask is None and mask is not None:
            raise ValueError(
                "context_mask must be given with mask and context, got None; pass context_mask=mask if the context has "
                "the valid pixels of the input, or a mask of ones if all of its pixels are valid"
            )
        return entered, checked, *enter(context, context_mask, axis, "context_mask")

    def _fits(self, pixels: Sequence[int], keys: Sequence[int]) -> bool:
        """True if keys may lie on a grid of this size."""
        by_pairs = isinstance(self.encoding, GroupEncoding) or self.locality is not None
        if tuple(pixels) == tuple(keys) or not by_pairs:
            return True
        grids = between_grids(pixels, keys)
        # all queries need keys, those of each phase of a finer grid too
        return grids in self.between and (grids[0] or len(self.between[grids]) == 2**self.window.dim)

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of the output's valid pixels."""
        return mask if self.stride == 1 else every_second(mask, (0,) * self.window.dim)

    def _attend(self, x: Tensor, context: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
        """Attention with all projections, without checks. Features must be zero at masked pixels."""
        return self.out(self._heads(*self._operands(x, context), key_mask, dropout).flatten(1, 2))

    def _operands(
        self, x: Tensor, context: Tensor
    ) -> tuple[Float[Tensor, "B e C #H *pixels"], Float[Tensor, "B e C #H *keys"], Float[Tensor, "B E C #H *keys"]]:
        """Queries, which are scaled, keys and values. The first e of the E heads have content."""
        query, key, value = self.project(x, context, self.head_channels**-0.5)
        return (query.unsqueeze(3), key.unsqueeze(3), value.unsqueeze(3)) if self.lifts else (query, key, value)

    def project(self, x: Tensor, context: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Project features to queries times a scale, keys and values, each ``(B, heads, head_channels, [|H|,]
        *spatial)``. Without content heads, queries and keys have no heads."""
        context = x if context is None else context
        value = self.value(context).unflatten(1, (self.heads, -1))
        if self.query is None or self.key is None:
            return x[:, :0, None], value[:, :0], value
        split = (self.content_heads, -1)
        return self.query(x, scale).unflatten(1, split), self.key(context).unflatten(1, split), value

    def _terms(self, spatial: tuple[int, ...], device: torch.device, grids: tuple[bool, bool] | None = None) -> Terms:
        """The terms of scores for a grid of this size, or for the phases between two grids. Biases are those of all
        heads."""
        index = None if self.index is None else self.index(device)
        if self.encoding is None and self.locality is None:
            return Terms(None, element_index=index)
        dtype = torch.promote_types(self.out.weight.dtype, torch.float32)
        unit = self.window.scale(spatial)
        if grids is None:
            offsets = self.offsets(spatial, device, dtype)
        else:
            offsets = self.geometry_between(device, dtype)[list(self.between).index(grids)]
        with full_precision(device):
            encodings = (None, None) if self.encoding is None else self.encoding(offsets / unit)
            biases = (None, None) if self.locality is None else self.locality(offsets)
        return Terms(*encodings, *biases, index)  # type: ignore[call-arg]

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout: float, t: int | None = None,
        step: bool = True,
    ) -> Float[Tensor, "B heads channels H *spatial"]:  # fmt: skip
        """Outputs of the heads. They are linear in ``value``, which may have any number of channels. Outputs may be
        sums over query elements; ``t`` chooses one of them. ``step`` is False in ``attention_map``, which must not
        advance the draw of random features."""
        pixels, keys = query.shape[4:], value.shape[4:]
        if isinstance(self.encoding, RotaryEncoding):
            index = None if self.index is None else self.index(value.device)
            matrices = self.geometry(value.device)
            return rotary_attention(query, key, value, self.encoding, matrices, index, key_mask, dropout)
        grids = None if pixels == keys or self.window.is_global else between_grids(pixels, keys)
        terms = self._terms(tuple(keys), value.device, grids)
        if t is not None and terms.element_index is not None:
            query, terms = query[:, :, :, t : t + 1], terms._replace(element_index=terms.element_index[:, t : t + 1])
        if grids is None:
            return self._on_grid(query, key, value, terms, self.window, key_mask, dropout)[0]
        if grids[0] and t is None and terms.element_index is not None and terms.element_index.ndim == 3:
            # outputs are sums over query elements, each with a softmax of its own over the keys of all phases
            each = [self._heads(query, key, value, key_mask, dropout, n, step) for n in range(query.shape[3])]
            return torch.stack(each).sum(0)
        return self._between_grids(query, key, value, terms, grids, key_mask, dropout)

    def _between_grids(
        self, query: Tensor, key: Tensor, value: Tensor, terms: Terms, grids: tuple[bool, bool],
        key_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Attention by phases of the finer grid: of its keys, whose averages are merged, or of its queries."""
        finer_keys, parts, pixels, outs, lses = grids[0], self.between[grids], query.shape[4:], [], []
        if finer_keys and key_mask is None:  # the padding of odd sides is no key
            key_mask = torch.ones(1, *key.shape[4:], dtype=torch.bool, device=key.device)
        for part, of_part in zip(parts, terms.split([part.window.count() for part in parts]), strict=True):
            q, k, v, mask = query, key, value, key_mask
            if finer_keys:
                k, v, mask = (every_second(x, part.first) for x in (key, value, cast(Tensor, key_mask)))
            else:
                q = every_second(query, part.first)
            out, lse = self._on_grid(q, k, v, of_part, part.window, mask, dropout)
            outs.append(out)
            if finer_keys:
                of_heads = [] if lse is None else [lse]
                if self.content_heads < self.heads:
                    bias = cast(Tensor, of_part.space_bias)[self.content_heads :]
                    of_heads.append(bias.logsumexp(-1)[(None, ..., *[None] * len(pixels))])
                lses.append(torch.cat([x.expand(query.shape[0], -1, -1, *pixels) for x in of_heads], 1))
        if not finer_keys:
            return interleaved(outs, pixels)
        with full_precision(value.device):
            out, _ = merge_attentions(torch.stack(outs), torch.stack(lses).unsqueeze(3))
        return out.to(value.dtype)

    def _on_grid(
        self, query: Tensor, key: Tensor, value: Tensor, terms: Terms, window: Window, key_mask: Tensor | None,
        dropout: float,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Outputs of all heads, and log-sum-exps of the heads with content."""
        count, by_content, by_position, rest = self.content_heads, value, value, terms
        outs, lse = [], None
        if count < self.heads:
            by_content, by_position = value.split((count, self.heads - count), 1)
            terms, rest = self._split(terms)
        if count:
            out, lse = attention_of_heads(query, key, by_content, terms, window, key_mask, dropout, self.plain)
            outs.append(out.expand(-1, -1, -1, self.group.order, *out.shape[4:]))  # one element without encoding
        if count < self.heads:
            masked = zero_where_masked(by_position, key_mask)  # biases do not mask keys
            outs.append(attention_by_position(masked, rest, window))
        return joined(outs, 1), lse

    def _split(self, terms: Terms) -> tuple[Terms, Terms]:
        """The terms of heads with content, and those of the other heads."""

        def of(heads: slice) -> Terms:
            group_bias = None if terms.group_bias is None else terms.group_bias[heads]
            return terms._replace(space_bias=cast(Tensor, terms.space_bias)[heads], group_bias=group_bias)

        return of(slice(self.content_heads)), of(slice(self.content_heads, None))

    def attention_map(
        self, x: Tensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor, mask: Mask = None, *,
        context: Tensor | None = None, context_mask: Mask = None,
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
            context_mask: Bool ``(B or 1, *spatial)``, true at valid pixels of the context. It must be given with
                ``mask`` and a context.

        Returns:
            ``(B, heads, |H|, T, S, *spatial)``, or for a list of pixels ``(B, pixels, heads, |H|, T, S, *spatial)``. T
            is ``|H|``, or 1 if each output has one query (``"frame"``, ``"relative"``, lifting, global group
            attention). S is ``|H|``, or 1 for lifting and for ``"frame"``, where s = h. Weights of masked query pixels,
            and of queries without a valid key, are zero. Heads without content also give weights to pixels outside of
            the image and to masked pixels, where values are zero, so near these their other weights sum to less than
            one.
        """
        if is_inference():  # inference mode has no derivatives
            with ordinary_tensors(), torch.no_grad():
                given: Any = (t.pixels if isinstance(t, Checked) else t for t in (x, mask, context, context_mask))
                copies: list[Any] = [t if t is None else t.clone() for t in given]
                return self.attention_map(copies[0], pixel, copies[1], context=copies[2], context_mask=copies[3])
        x, mask, context, key_mask = self.enter(x, mask, context, context_mask)
        several, single = _pixels(pixel, tuple(x.shape[2 if self.lifts else 3 :]))
        key_pixels = None if key_mask is None else key_mask.pixels
        query, key, value = self._operands(x, x if context is None else context)

        def weights(t: int | None) -> Tensor:
            def heads(value: Tensor) -> Tensor:
                return zero_where_masked(self._heads(query, key, value, key_pixels, 0.0, t, step=False), mask)

            return attention_weights(heads, value, self.group.order, several)

        sums = self.index is not None and self.index(x.device).ndim == 3
        maps = torch.stack([weights(t) for t in range(query.shape[3])] if sums else [weights(None)], 4)
        if self._relation.mixes_elements:  # outputs of h depend on values of h only
            maps = maps.diagonal(0, 3, 5).movedim(-1, 3).unsqueeze(5)
        maps = zero_where_masked(maps, key_mask)
        return maps[:, 0] if single else maps

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
            "stride": self.stride if self.stride > 1 else None,
            "locality": None if self.locality is None else self.locality.start,
            "context_channels": self.context_channels if self.crosses else None,
            "relation": None if self.lifts else repr(self.relation),
        }
        more = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}{more}"
