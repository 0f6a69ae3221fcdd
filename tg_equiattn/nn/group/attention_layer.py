"""What lifting, group and global attention layers share."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.group import GroupEncoding, relation_index, rotated_offsets
from ...encodings.locality import CONTENT, Locality
from ...functional.group.attention import group_attention_impl
from ...functional.group.dilation import dilation_attention_impl
from ...functional.group.masks import attention_weights, zero_where_masked
from ...functional.group.separable import separable_attention_impl
from ...grids import Neighbourhood
from ...groups import DilationGroup, FiniteGroup, check_group
from ...tables import Tables
from ..modules import NotScriptable, StoresSettings
from .linear import GroupLinear, Masked, Pointwise
from .options import SHARED, AttentionOptions, default_relation, default_scale_window, make_options


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


def _geometry(group: FiniteGroup, neighbourhood: Neighbourhood) -> Tensor:
    """Offsets of a window seen from every element, in float64; of all pixels, whose offsets depend on the grid, the
    elements themselves."""
    return group.matrices if neighbourhood.is_global else rotated_offsets(group.matrices, neighbourhood)


def _index(group: FiniteGroup, relation: str | None) -> Tensor:
    """The group element u of each output, query and key element; zero where there is no group encoding."""
    if relation is None:  # lifting
        return torch.zeros(len(group), 1, 1, dtype=torch.int64)
    if relation == "frame":
        return torch.zeros(len(group), 1, dtype=torch.int64)
    return relation_index(group, relation)


@checks.python_numbers
class AttentionLayer(NotScriptable, Masked, StoresSettings):
    """A layer of self-attention or cross attention; see :class:`LiftingAttention` and :class:`GroupAttention`."""

    plain = False  # whether it runs on torch's standard operators alone, for tracers
    lifts = False
    separable = False  # whether by default some heads look by place alone
    allowed: tuple[str, ...] = SHARED  # among the options

    def __init__(
        self, group: FiniteGroup | DilationGroup, in_channels: int, out_channels: int, *, heads: int = 8,
        head_channels: int | None = None, kernel_size: int | None = 5, relation: str | None = None,
        locality: float | str | None = "auto", padding_mode: str = "mask", dropout: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_group(group, scales=True)
        self.relation = None if self.lifts else default_relation(group, relation)
        self.options = make_options(AttentionOptions, options, self.allowed)
        self.scale_window = default_scale_window(group, kernel_size, self.options.scale_window)
        checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads)
        head_channels = max(out_channels // 2, group.dim + 1) if head_channels is None else head_channels
        context_channels = self.options.context_channels
        self.crosses = context_channels is not None  # keys are of a context, always
        context_channels = in_channels if context_channels is None else context_channels
        checks.positive(head_channels=head_channels, context_channels=context_channels)
        checks.probability(dropout=dropout)
        self.group, self.in_channels, self.out_channels, self.dropout = group, in_channels, out_channels, dropout
        self.heads, self.head_channels, self.context_channels = heads, head_channels, context_channels
        self.frames, isometries = self.relation == "frame", group.isometries
        self._elements = elements = None if self.lifts else len(group)  # of the input; None where it has none
        if elements is not None and self.scale_window is not None:
            elements = len(isometries) * self.scale_window  # seen from one of them, whose scale is zero
        elements = None if self.frames else elements
        lattice = bool(isometries.lattice.all())  # whether elements map pixels to pixels
        sharpness = (4.0 if lattice else 1.0) if locality == "auto" else locality
        if isinstance(sharpness, str):
            raise ValueError(f"locality must be 'auto', None or a finite number of at least 0, got {locality!r}")
        shape = "square" if kernel_size is None or lattice else "disk"
        shape = shape if self.options.neighbourhood is None else self.options.neighbourhood
        self.neighbourhood = Neighbourhood(group.dim, kernel_size, shape, padding_mode)
        some = self.separable and self.frames and kernel_size is not None and sharpness is not None
        content = self.options.content_heads
        if content is not None and not self.frames:
            raise ValueError(f"content_heads must be None but for relation 'frame', got {content!r}")
        content = (-(-heads // 8) if some else heads) if content is None else content
        if type(content) is not int or not 0 <= content <= heads:
            raise ValueError(f"content_heads must be an integer from 0 to heads={heads}, got {content!r}")
        if content < heads and sharpness is None:
            raise ValueError(
                f"content_heads must be heads={heads} without locality, by which the others look, got {content}"
            )
        self.content_heads = content  # heads that look by content
        width = self.content_heads * head_channels
        linear: Any = functools.partial(GroupLinear, isometries) if self.frames else Pointwise
        compares = self.frames and kernel_size is None  # an element with others
        matching = linear if compares else Pointwise
        self.query = matching(in_channels, width) if width else None
        self.key = matching(context_channels, width) if width else None
        self.value = linear(context_channels, heads * head_channels)
        self.out = Pointwise(heads * head_channels, out_channels)
        self.encoding: nn.Module | None = None
        if self.query is not None and self.key is not None:
            # a pixel where x = 0, too, looks at some places more than at others
            nn.init.normal_(cast(Tensor, self.query.bias))
            with torch.no_grad():
                if sharpness is not None and not self.frames:
                    for parameter in self.query.parameters():
                        parameter.mul_(CONTENT)
                if compares and not self.crosses:
                    # keys start as the queries of another element: head e compares h with h u, u the e-th element, so
                    # that what is alike up to a turn has large scores from the first step
                    table = relation_index(isometries, "relative").to(self.query.weight.device)  # u^-1 g
                    weight = self.query.weight.unflatten(0, (self.content_heads, -1))
                    turned = [one[..., table[head % len(table)]] for head, one in enumerate(weight)]
                    self.key.weight.copy_(torch.cat(turned))
            self.encoding = GroupEncoding(self.options.encoding, group.dim, head_channels, elements)
        self.locality: Locality | None = None
        if sharpness is not None:
            preferring = self.relation == "relative"
            self.locality = Locality(heads, self.neighbourhood, sharpness, elements=elements, preferring=preferring)
        self.geometry = Tables(functools.partial(_geometry, isometries, self.neighbourhood))
        self.index = Tables(functools.partial(_index, isometries, self.relation))
        if self.relation == "gsa":
            warnings.warn(
                "relation='gsa' (GSA-Nets section 5.2) is not equivariant; it is kept to reproduce the comparison, "
                "use 'frame', 'ge_vit', 'lifted' or 'relative' otherwise",
                stacklevel=2,
            )

    def settings(self) -> dict[str, Any]:
        """Any number of scales may share weights, so the group is compared without them."""
        window, isometries = self.neighbourhood, self.group.isometries
        return {
            "relation": self.relation, "kernel_size": window.kernel_size,
            "group": (isometries.digest, repr(isometries)),
            "neighbourhood": None if window.is_global else window.shape,
            "padding_mode": "circular" if window.circular else "mask", "heads": self.heads,
            "encoding": self.options.encoding, "content_heads": self.content_heads,
        }  # fmt: skip

    def offsets(self, spatial: tuple[int, ...], device: torch.device) -> Tensor:
        """Offsets seen from every element, ``(|H|, D, d)`` float64, for a grid of this size; with scales those of the
        isometries, which all scales share."""
        geometry = self.geometry(device)
        return rotated_offsets(geometry, self.neighbourhood, spatial) if self.neighbourhood.is_global else geometry

    def forward(self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: features, which the queries are of.
            mask: bool ``(B or 1, *spatial)``, true where there are pixels; the others are no keys, whatever they
                hold, and their outputs are zero.
            context: features of the same grid, with ``context_channels``, which keys and values are of; ``None`` means
                those of x, where ``context_channels`` were not given.
        """
        query, key, value = self._operands(x, mask, context)
        out = self._weigh(query, key, value, self.index(x.device), mask, self.dropout if self.training else 0.0)
        return zero_where_masked(self.out(out.flatten(1, 2)), mask)

    def attention_map(
        self, x: Tensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor, mask: Tensor | None = None, *,
        context: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        r"""The attention weights of chosen pixels, without dropout; not within torch.compile or torch.vmap.

        The derivatives of a head's outputs by its values, which it is linear in. With output elements h, query elements
        t and key elements s they sum to one over (s, pixels), and

        .. math:: \mathrm{head}(i, h) = \sum_t \sum_{(j,s)} \mathrm{map}_i[h, t, s, j]\; v(j, s) .

        Args:
            x, mask, context: as :meth:`forward`'s.
            pixel: indices along the spatial axes, ``(row, column)`` or ``(depth, row, column)``; or several of them.

        Returns:
            ``(B, heads, |H|, T, S, *spatial)``, or with several pixels ``(B, pixels, heads, |H|, T, S, *spatial)``. T
            is ``|H|``, and 1 with one query for each output (``"frame"``, ``"relative"``, lifting, global group
            attention); S is ``|H|``, and 1 for lifting and for ``"frame"``, where s = h. Zeros for a pixel that the
            mask leaves out. Weights of heads that look by place alone reach out of the image, where values are zero:
            what is within sums to less than one.
        """
        if torch.is_inference_mode_enabled():  # which has no derivatives
            with torch.inference_mode(False), torch.no_grad():
                mask, context = (None if t is None else t.clone() for t in (mask, context))
                return self.attention_map(x.clone(), pixel, mask, context=context)
        query, key, value = self._operands(x, mask, context)
        table = self.index(x.device)
        several, one = _pixels(pixel, tuple(value.shape[4:]))

        def of_query_elements(t: slice) -> Tensor:
            index = table if table.ndim == 2 else table[:, t]
            part = query if table.ndim == 2 else query[:, :, :, t]
            weigh = functools.partial(self._weigh, part, key, index=index, mask=mask, dropout=0.0)
            return attention_weights(weigh, value, len(self.group), several)

        count = 1 if table.ndim == 2 else query.shape[3]
        maps = torch.stack([of_query_elements(slice(t, t + 1)) for t in range(count)], 4)
        if self.frames:  # which see values of their own element alone
            maps = maps.diagonal(0, 3, 5).movedim(-1, 3).unsqueeze(5)
        maps = zero_where_masked(maps, mask)
        return maps[:, 0] if one else maps

    def _operands(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, heads, head_channels, |H| or 1, *spatial)``, of checked input."""
        checks.features(x, self.in_channels, self.neighbourhood.dim, self._elements, self.out.weight)
        spatial = x.shape[-self.neighbourhood.dim :]
        self.neighbourhood.check(spatial)
        if isinstance(self.group, DilationGroup) and self.neighbourhood.circular:
            largest = 2 ** (self.group.scales - 1)  # at which windows go around the image, too
            if any(side % largest for side in spatial):
                raise ValueError(
                    f"input sides must be multiples of the largest scale, {largest}, with padding_mode='circular', got "
                    f"{tuple(spatial)}"
                )
            self.neighbourhood.check([side // largest for side in spatial])
        checks.pixel_mask(mask, x.shape[0], spatial, x.device)
        self.check_context(x, context)
        context = None if context is None else zero_where_masked(context, mask)
        query, key, value = self.project(zero_where_masked(x, mask), context)
        return (query.unsqueeze(3), key.unsqueeze(3), value.unsqueeze(3)) if self.lifts else (query, key, value)

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
        split = (self.content_heads, -1)
        return self.query(x).unflatten(1, split), self.key(context).unflatten(1, split), value

    def _scores(self, spatial: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
        """rho_space and rho_group, and biases of offsets and of the group, for a grid of this size; None where there
        are none."""
        offsets = self.offsets(spatial, device)
        rho = (None, None) if self.encoding is None else self.encoding(offsets)
        scale = self.neighbourhood.scale(spatial)
        return *rho, *((None, None) if self.locality is None else self.locality(offsets * scale))

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, index: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        """What heads put out, ``(B, heads, channels, |H|, *spatial)``: linear in the value, which may have any number
        of channels."""
        rho_space, rho_group, space_bias, group_bias = self._scores(tuple(value.shape[4:]), value.device)
        options, biases = self._options(mask, dropout), {"space_bias": space_bias, "group_bias": group_bias}
        if isinstance(self.group, DilationGroup):
            if rho_group is None and rho_space.ndim == 3:  # lifting: one element
                rho_group = rho_space.new_zeros(1, self.head_channels)
            options |= {"scales": self.group.scales, "scale_window": self.scale_window, **biases}
            return dilation_attention_impl(query, key, value, rho_space, rho_group, index, **options)
        if not self.lifts and not self.frames:
            return group_attention_impl(query, key, value, rho_space, rho_group, index, **options, **biases)[0]
        count, parts = self.content_heads, []  # pixels of one element, seen from each one's frame
        if rho_space is not None:
            options["space_bias"] = None if space_bias is None else space_bias[:count]
            parts.append(group_attention_impl(query, key, value[:, :count], rho_space, None, None, **options)[0])
        if count < self.heads:  # the others, by place alone
            there = zero_where_masked(value[:, count:], mask)  # a bias is everywhere
            parts.append(separable_attention_impl(there, space_bias[count:], self.neighbourhood, mask))
        return torch.cat(parts, 1)

    def _options(self, mask: Tensor | None, dropout: float) -> dict[str, Any]:
        """What every kernel takes."""
        return {"neighbourhood": self.neighbourhood, "dropout": dropout, "mask": mask, "plain": self.plain}

    def extra_repr(self) -> str:
        window = self.neighbourhood
        shown = {
            "heads": self.heads,
            "head_channels": self.head_channels,
            "kernel_size": "None" if window.is_global else window.kernel_size,
            "neighbourhood": None if window.is_global else repr(window.shape),
            "padding_mode": "'circular'" if window.circular else None,
            "encoding": repr(self.options.encoding),
            "content_heads": self.content_heads if self.content_heads < self.heads else None,
            "scale_window": None if self.lifts else self.scale_window,
            "locality": None if self.locality is None else self.locality.start,
            "context_channels": self.context_channels if self.crosses else None,
            "relation": None if self.lifts else repr(self.relation),
        }
        more = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"{self.group!r}, {self.in_channels}, {self.out_channels}{more}"
