"""What lifting, group and global group attention layers share."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import relation_index, rotated_offsets
from ...encodings.group import make_encoding
from ...encodings.locality import CONTENT, Locality
from ...functional.group.attention import checked_group_attention
from ...functional.group.dilation import checked_dilation_attention
from ...functional.group.frames import checked_frame_attention, checked_separable
from ...functional.group.masks import attention_weights, zero_where_hidden
from ...grids import Neighbourhood
from ...groups import DilationGroup, FiniteGroup, check_group
from ..modules import NotScriptable
from .linear import GroupLinear, Pointwise
from .masked import Masked
from .options import AttentionOptions, default_content, default_scale_window, default_sharpness


def _pixels(pixel: object, sides: tuple[int, ...]) -> tuple[list[list[int]], bool]:
    """Indices of pixels of an image, and whether one alone was given; ValueError for what are none."""
    try:
        pixels = torch.as_tensor(pixel, device="cpu")  # type: ignore[call-overload]
    except (TypeError, ValueError, RuntimeError):
        pixels = torch.zeros(0)
    whole = not pixels.is_floating_point() and pixels.dtype != torch.bool
    if not whole or pixels.ndim not in (1, 2) or pixels.shape[-1] != len(sides) or not len(pixels):
        raise ValueError(f"pixel must be {len(sides)} whole numbers, or several times so many, got {pixel!r}")
    several = pixels.view(-1, len(sides)).tolist()
    if any(not 0 <= n < side for place in several for n, side in zip(place, sides, strict=True)):
        raise ValueError(f"pixel must be in an image of {sides} pixels, got {pixel!r}")
    return several, pixels.ndim == 1


class AttentionLayer(NotScriptable, Masked, nn.Module):
    """A layer of self-attention or cross attention; ``relation`` is None where it lifts."""

    geometry: Tensor
    index: Tensor
    plain = False  # whether it runs on torch's standard operators alone, for tracers

    def __init__(
        self,
        group: FiniteGroup | DilationGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int,
        head_channels: int | None,
        kernel_size: int | None,
        relation: str | None,
        locality: float | str | None,
        padding_mode: str,
        dropout: float,
        options: AttentionOptions,
    ) -> None:
        super().__init__()
        check_group(group, scales=True)
        self.scale_window = default_scale_window(group, kernel_size, options.scale_window)
        checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads)
        head_channels = max(out_channels // 2, group.dim + 1) if head_channels is None else head_channels
        self.crosses = options.context_channels is not None  # keys are of a context, always
        context_channels = in_channels if options.context_channels is None else options.context_channels
        checks.positive(head_channels=head_channels, context_channels=context_channels)
        checks.probability(dropout=dropout)
        self.group, self.in_channels, self.out_channels, self.relation = group, in_channels, out_channels, relation
        self.heads, self.head_channels, self.context_channels = heads, head_channels, context_channels
        self.frames, self.dropout, self.encoding_name = relation == "frame", dropout, options.encoding
        self._elements = elements = None if relation is None else len(group)  # of the input; None where it has none
        if elements is not None and self.scale_window is not None:
            elements = len(group.isometries) * self.scale_window  # seen from one of them, whose scale is zero
        locality = default_sharpness(group.isometries, locality)
        shape = options.neighbourhood
        if shape is None:
            shape = "square" if kernel_size is None or bool(group.isometries.lattice.all()) else "disk"
        self.neighbourhood = Neighbourhood(group.dim, kernel_size, shape, padding_mode)
        self.content_heads = default_content(heads, options.content_heads, self.frames, kernel_size, locality)
        width = self.content_heads * head_channels
        linear: Any = functools.partial(GroupLinear, group.isometries) if self.frames else Pointwise
        compares = self.frames and kernel_size is None  # an element with others
        matching = linear if compares else Pointwise
        self.query = matching(in_channels, width) if width else None
        self.key = matching(context_channels, width) if width else None
        self.value = linear(context_channels, heads * head_channels)
        self.out = Pointwise(heads * head_channels, out_channels)
        self.encoding: nn.Module | None = None
        elements = None if self.frames else elements
        if self.query is not None:
            # a pixel where x = 0, too, looks at some places more than at others
            nn.init.normal_(cast(Tensor, self.query.bias))
            if locality is not None and not self.frames:
                with torch.no_grad():
                    for parameter in self.query.parameters():
                        parameter.mul_(CONTENT)
            if compares and not self.crosses:
                self._compare_turned()
            self.encoding = make_encoding(options.encoding, group.dim, head_channels, elements)
        self.locality: Locality | None = None
        if locality is not None:
            preferring = relation == "relative"
            self.locality = Locality(heads, self.neighbourhood, locality, elements=elements, preferring=preferring)
        exact = group.isometries.matrices
        exact = exact if kernel_size is None else rotated_offsets(exact, self.neighbourhood)
        self.register_buffer("geometry", exact.to(self.out.weight.device), persistent=False)
        if relation is None or self.frames:
            index = torch.zeros(len(group.isometries), 1, *([1] if relation is None else []), dtype=torch.int64)
        else:
            index = relation_index(group.isometries, relation)
        self.register_buffer("index", index.to(self.out.weight.device), persistent=False)

    @torch.no_grad()
    def _compare_turned(self) -> None:
        """Start with keys that are the queries of another element: head e compares h with h u, u the e-th element, so
        that what is alike up to a turn has large scores from the first step."""
        query, key = cast(GroupLinear, self.query), cast(GroupLinear, self.key)
        table = relation_index(self.group.isometries, "relative")  # u^-1 g
        weight = query.weight.unflatten(0, (self.content_heads, -1))
        turned = [one[..., table[head % len(table)].to(one.device)] for head, one in enumerate(weight)]
        key.weight.copy_(torch.cat(turned))

    def _apply(self, fn, recurse=True):
        """Geometry goes where parameters go and stays float64: rounded offsets of two elements no longer agree."""
        exact = self.geometry
        super()._apply(fn, recurse)
        self.geometry = exact.to(self.geometry.device)
        return self

    def _geometry(self) -> dict[str, Any]:
        """What weights are for, as JSON has it; with scales, whatever their number."""
        exact = (1e6 * self.group.isometries.matrices).round().long().flatten().tolist()
        digest = hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]
        size, group = self.neighbourhood.kernel_size, repr(self.group.isometries)
        return {"relation": self.relation, "kernel_size": size, "group": group, "elements": digest}

    def get_extra_state(self) -> Tensor:
        """Relation, kernel size and group, for the checkpoint: JSON as bytes, since some tools take tensors alone."""
        return torch.tensor(list(json.dumps(self._geometry()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """ValueError for weights of a layer of another relation, kernel size or group."""
        saved, mine = json.loads(bytes(state.tolist())), self._geometry()
        for name in ("relation", "kernel_size", "group"):
            same = saved["elements"] == mine["elements"] if name == "group" else saved[name] == mine[name]
            if not same:
                raise ValueError(
                    f"state_dict must be of a layer with {name}={mine[name]!r}, as this one, got {saved[name]!r}"
                )

    def offsets(self, spatial: tuple[int, ...]) -> Tensor:
        """Offsets seen from every element, ``(|H|, D, d)`` float64, for a grid of this size; with scales those of the
        isometries, which all scales share."""
        if self.neighbourhood.is_global:
            return rotated_offsets(self.geometry, self.neighbourhood, spatial)
        return self.geometry

    def forward(self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: features, which the queries are of.
            mask: bool ``(B, *spatial)`` or ``(1, *spatial)``, true where there are pixels; the others are no keys,
                whatever they hold, and their outputs are zero.
            context: features of the same grid, with ``context_channels``, which keys and values are of; ``None`` means
                those of x, where ``context_channels`` were not given.
        """
        query, key, value = self._operands(x, mask, context)
        out = self._weigh(query, key, value, self.index, mask, self.dropout if self.training else 0.0)
        return zero_where_hidden(self.out(out.flatten(1, 2)), mask)

    def attention_map(
        self,
        x: Tensor,
        pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
    ) -> Tensor:
        r"""The attention weights of chosen pixels, without dropout; not within torch.compile or torch.vmap.

        They are those of :meth:`forward`, whose heads are linear in the values: the derivatives of outputs by values.
        With output elements h, query elements t and key elements s they sum to one over (s, pixels), and

        .. math:: \mathrm{head}(i, h) = \sum_t \sum_{(j,s)} \mathrm{map}_i[h, t, s, j]\; v(j, s) .

        Args:
            x, mask, context: as :meth:`forward`'s.
            pixel: indices along the spatial axes, ``(row, column)`` or ``(depth, row, column)``; or several of them.

        Returns:
            ``(B, heads, |H|, T, S, *spatial)``, or with several pixels ``(B, pixels, heads, |H|, T, S, *spatial)``. T
            is ``|H|``, and 1 with one query for each output (``"frame"``, ``"relative"``, lifting, global group
            attention); S is ``|H|``, and 1 for lifting and for ``"frame"``, where s = h. Zeros for a pixel that the
            mask leaves out. Heads that look by place alone have weights that reach out of the image, where values are
            zero: what is within sums to less than one there.

        Raises:
            ValueError: for a pixel that is not in the image, and as :meth:`forward`.
        """
        if torch.is_inference_mode_enabled():  # which has no derivatives
            with torch.inference_mode(False), torch.no_grad():
                mask, context = (None if t is None else t.clone() for t in (mask, context))
                return self.attention_map(x.clone(), pixel, mask, context=context)
        query, key, value = self._operands(x, mask, context)
        several, one = _pixels(pixel, tuple(value.shape[4:]))

        def of_query_elements(t: slice) -> Tensor:
            index = self.index if self.index.ndim == 2 else self.index[:, t]
            part = query if self.index.ndim == 2 else query[:, :, :, t]
            return attention_weights(
                lambda v: self._weigh(part, key, v, index, mask, 0.0), value, len(self.group), several
            )

        count = 1 if self.index.ndim == 2 else query.shape[3]
        maps = torch.stack([of_query_elements(slice(t, t + 1)) for t in range(count)], 4)
        if self.frames:  # which see values of their own element alone
            maps = maps.diagonal(0, 3, 5).movedim(-1, 3).unsqueeze(5)
        maps = zero_where_hidden(maps, mask)
        return maps[:, 0] if one else maps

    def _operands(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, heads, head_channels, |H| or 1, *spatial)``, of checked input."""
        checks.features(x, self.in_channels, self.neighbourhood.dim, self._elements, self.out.weight)
        spatial = x.shape[-self.neighbourhood.dim :]
        self.neighbourhood.check(spatial)
        if isinstance(self.group, DilationGroup) and self.neighbourhood.circular:
            self._check_circular(spatial, 2 ** (self.group.scales - 1))
        checks.pixel_mask(mask, x.shape[0], spatial, x.device)
        x = zero_where_hidden(x, mask)
        self.check_context(x, context)
        context = None if context is None else zero_where_hidden(context, mask)
        query, key, value = self.project(x, context)
        if self._elements is None:
            query, key, value = (t.unsqueeze(3) for t in (query, key, value))
        return query, key, value

    def _check_circular(self, spatial: Sequence[int], largest: int) -> None:
        """ValueError unless windows go around an image at its largest scale, too."""
        if any(side % largest for side in spatial):
            raise ValueError(
                f"input sides must be multiples of the largest scale, {largest}, with padding_mode='circular', got "
                f"{tuple(spatial)}"
            )
        self.neighbourhood.check([side // largest for side in spatial])

    def check_context(self, x: Tensor, context: Tensor | None) -> None:
        """ValueError unless a context is there where there has to be one, and fits the input."""
        if context is None and self.crosses:
            raise ValueError(f"context must be given, with context_channels={self.context_channels}, got None")
        if context is None:
            return
        checks.features(
            context, self.context_channels, self.neighbourhood.dim, self._elements, self.out.weight, "context"
        )
        if context.shape[0] != x.shape[0] or context.shape[2:] != x.shape[2:]:
            raise ValueError(
                f"context must have the batch and the pixels of the input, {tuple(x.shape)}, got {tuple(context.shape)}"
            )

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, heads, head_channels, [|H|,] *spatial)``."""
        context = x if context is None else context
        value = self.value(context).unflatten(1, (self.heads, -1))
        if self.query is None or self.key is None:
            return value[:, :0], value[:, :0], value
        query, key = (
            p(source).unflatten(1, (self.content_heads, -1)) for p, source in ((self.query, x), (self.key, context))
        )
        return query, key, value

    def _scores(self, spatial: tuple[int, ...]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """rho_space and rho_group, and biases of offsets and of the group, for a grid of this size."""
        offsets = self.offsets(spatial)
        rho_space, rho_group = cast(nn.Module, self.encoding)(offsets)
        if rho_group is None and rho_space.ndim == 3:  # lifting: one element
            rho_group = rho_space.new_zeros(1, self.head_channels)
        if self.locality is None:
            return rho_space, rho_group, None, None
        return rho_space, rho_group, *self.locality(offsets * self.neighbourhood.scale(spatial))

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, index: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        """What heads put out, ``(B, heads, channels, |H|, *spatial)``: linear in the value, which may have any number
        of channels."""
        scales = isinstance(self.group, DilationGroup)
        if self.frames or (self.relation is None and not scales):  # pixels of one element, seen from each one's frame
            return self._weigh_frames(query, key, value, mask, dropout)
        rho_space, rho_group, space_bias, group_bias = self._scores(tuple(query.shape[4:]))
        options = {"space_bias": space_bias, "group_bias": group_bias, **self._options(mask, dropout)}
        if scales:
            options |= {"scales": self.group.scales, "scale_window": self.scale_window}
            return checked_dilation_attention(query, key, value, rho_space, rho_group, index, **options)
        return checked_group_attention(query, key, value, rho_space, rho_group, index, **options)[0]

    def _options(self, mask: Tensor | None, dropout: float) -> dict[str, Any]:
        """What every kernel takes."""
        backend = "plain" if self.plain else "auto"
        return {"neighbourhood": self.neighbourhood, "dropout": dropout, "mask": mask, "backend": backend}

    def _weigh_frames(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """The heads that look by content, and behind them those that look by place alone."""
        spatial, count, parts = tuple(value.shape[4:]), self.content_heads, []
        offsets, bias = self.offsets(spatial), None
        if self.locality is not None:
            bias, _ = self.locality(offsets * self.neighbourhood.scale(spatial))
        if self.encoding is not None:
            rho_space, _ = self.encoding(offsets)
            out, _ = checked_frame_attention(
                query, key, value[:, :count], rho_space, space_bias=None if bias is None else bias[:count],
                **self._options(mask, dropout),
            )  # fmt: skip
            parts.append(out)
        if bias is not None and count < self.heads:
            there = zero_where_hidden(value[:, count:], mask)  # a bias is everywhere
            parts.append(checked_separable(there, bias[count:], self.neighbourhood, mask))
        return torch.cat(parts, 1)

    def extra_repr(self) -> str:
        window = "" if self.neighbourhood.is_global else f", neighbourhood={self.neighbourhood.shape!r}"
        circular = ", padding_mode='circular'" if self.neighbourhood.circular else ""
        context = "" if not self.crosses else f", context_channels={self.context_channels}"
        locality = "" if self.locality is None else f", locality={self.locality.start}"
        scales = "" if self.scale_window is None or self._elements is None else f", scale_window={self.scale_window}"
        content = f", content_heads={self.content_heads}" if self.content_heads < self.heads else ""
        relation = "" if self.relation is None else f", relation={self.relation!r}"
        return (
            f"{self.group!r}, {self.in_channels}, {self.out_channels}, heads={self.heads}, "
            f"head_channels={self.head_channels}, kernel_size={self.neighbourhood.kernel_size}{window}"
            f"{circular}, encoding={self.encoding_name!r}{content}{scales}{locality}{context}{relation}"
        )
