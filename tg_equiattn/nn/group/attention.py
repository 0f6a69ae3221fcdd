"""Lifting and group self-attention layers."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings import CONTENT, Locality, make_encoding, relation_index, rotated_offsets
from ...functional.group.attention import check_window_backend, checked_group_attention
from ...grids import Neighbourhood
from ...groups import FiniteGroup, check_group
from ..not_scriptable import NotScriptable
from .pointwise import Pointwise


def _fitting_shape(group: FiniteGroup, kernel_size: int | None) -> str:
    """A disk where the group has elements that do not map a square window to itself."""
    return "square" if kernel_size is None or bool(group.lattice.all()) else "disk"


def _fitting_sharpness(group: FiniteGroup, locality: float | str | None) -> float | None:
    """Where elements do not map pixels to pixels, broad places, which lie between pixels as well as on them."""
    if locality == "auto":
        return 4.0 if bool(group.lattice.all()) else 1.0
    if isinstance(locality, str):
        raise ValueError(f"locality must be 'auto', None or a finite number of at least 0, got {locality!r}")
    return locality


class _Attention(NotScriptable, nn.Module):
    """Projections, encoding and tables that lifting and group attention share."""

    geometry: Tensor
    index: Tensor

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int,
        head_channels: int | None,
        kernel_size: int | None,
        encoding: str,
        encoding_eps: float,
        neighbourhood: str | None,
        locality: float | str | None,
        preferring: bool,
        dropout: float,
        scale: float | None,
        backend: str,
        elements: int | None,
    ) -> None:
        super().__init__()
        check_group(group)
        checks.positive(in_channels=in_channels, out_channels=out_channels, heads=heads)
        head_channels = max(out_channels // 2, group.dim + 1) if head_channels is None else head_channels
        checks.positive(head_channels=head_channels)
        checks.probability(dropout=dropout)
        checks.scale(scale)
        checks.positive_number(encoding_eps=encoding_eps)
        self.group, self.in_channels, self.out_channels = group, in_channels, out_channels
        self.heads, self.head_channels = heads, head_channels
        locality = _fitting_sharpness(group, locality)
        shape = _fitting_shape(group, kernel_size) if neighbourhood is None else neighbourhood
        self.neighbourhood = Neighbourhood(group.dim, kernel_size, shape)
        check_window_backend(backend, self.neighbourhood)
        self.dropout, self.scale, self.encoding_name, self.backend = dropout, scale, encoding, backend
        self.query = Pointwise(in_channels, heads * head_channels)
        self.key = Pointwise(in_channels, heads * head_channels)
        self.value = Pointwise(in_channels, heads * head_channels)
        self.out = Pointwise(heads * head_channels, out_channels)
        # a pixel where x = 0, too, looks at some places more than at others
        nn.init.normal_(cast(Tensor, self.query.bias))
        if locality is not None:
            with torch.no_grad():
                for parameter in self.query.parameters():
                    parameter.mul_(CONTENT)
        self.encoding = make_encoding(encoding, group.dim, head_channels, elements, encoding_eps)
        self.locality = (
            None
            if locality is None
            else Locality(heads, self.neighbourhood, locality, elements=elements, preferring=preferring)
        )
        exact = group.matrices if kernel_size is None else rotated_offsets(group.matrices, self.neighbourhood)
        self.register_buffer("geometry", exact.to(self.out.weight.device), persistent=False)

    def _apply(self, fn, recurse=True):
        """Geometry goes where parameters go and stays float64: rounded offsets of two elements no longer agree."""
        exact = self.geometry
        super()._apply(fn, recurse)
        self.geometry = exact.to(self.geometry.device)
        return self

    def offsets(self, spatial: tuple[int, ...]) -> Tensor:
        """Offsets seen from every element, ``(|H|, D, d)`` float64, for a grid of this size."""
        if self.neighbourhood.is_global:
            return rotated_offsets(self.geometry, self.neighbourhood, spatial)
        return self.geometry

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, heads, head_channels, [|H|,] *spatial)``."""
        query, key, value = (p(x).unflatten(1, (self.heads, -1)) for p in (self.query, self.key, self.value))
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """From features with a group axis to the output's."""
        spatial = tuple(query.shape[4:])
        offsets = self.offsets(spatial)
        rho_space, rho_group = self.encoding(offsets)
        if rho_group is None and rho_space.ndim == 3:  # lifting: one element
            rho_group = rho_space.new_zeros(1, self.head_channels)
        space_bias = group_bias = None
        if self.locality is not None:
            space_bias, group_bias = self.locality(offsets * self.neighbourhood.scale(spatial))
        out = checked_group_attention(
            query, key, value, rho_space, rho_group, self.index, neighbourhood=self.neighbourhood,
            space_bias=space_bias, group_bias=group_bias, scale=self.scale,
            dropout=self.dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip
        return self.out(out.flatten(1, 2))

    def extra_repr(self) -> str:
        window = "" if self.neighbourhood.is_global else f", neighbourhood={self.neighbourhood.shape!r}"
        locality = "" if self.locality is None else f", locality={self.locality.start}"
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return (
            f"{self.group!r}, {self.in_channels}, {self.out_channels}, heads={self.heads}, "
            f"head_channels={self.head_channels}, kernel_size={self.neighbourhood.kernel_size}{window}, "
            f"encoding={self.encoding_name!r}{locality}{backend}"
        )


class LiftingAttention(_Attention):
    r"""Lifting self-attention: images or volumes in, regular features of a finite group out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_{j \in \eta(i)}
        \mathrm{softmax}_j\big(c\,\langle q_i,\; k_j + \rho(h^{-1}(x_j - x_i)) \rangle + l(h^{-1}(x_j - x_i))\big)\; v_j

    with the locality l of the head.

    Args:
        group: the finite group H; its dimension (2 or 3) is that of the input.
        in_channels: channels of the input.
        out_channels: channels of the output.
        heads: attention heads. With locality each starts at a place of its own: nine fill a 3 x 3 window.
        head_channels: width of a head; ``None`` means half of ``out_channels``, as published.
        kernel_size: odd side of the window in pixels, or ``None`` for global attention at any image size. A window may
            be larger than the image; outside is masked, as at any border.
        encoding: ``"axial"``, ``"joint"`` or ``"full"``; see :mod:`tg_equiattn.encodings`.
        encoding_eps: of the layer norm in the encoding's MLP; the published models have 1e-12.
        neighbourhood: ``"square"`` or ``"disk"``; ``None`` means the disk where the group has elements that do not map
            the pixel grid to itself (rotations by 45 degrees), which a square window serves badly, and the square
            elsewhere. Global attention has none.
        locality: sharpness in 1 / pixel^2 by which every head looks at a place of its own at the start, not negative;
            ``"auto"`` means 4, and 1 for groups with elements that do not map the pixel grid to itself, which turn
            broad places better; ``None`` leaves attention to content and encoding alone, as the papers. See
            :class:`tg_equiattn.encodings.Locality`.
        dropout: probability of dropping an attention weight in training.
        scale: c; ``None`` means :math:`1/\sqrt{\mathrm{head\_channels}}` (the published code uses the input width).
        backend: ``"torch"``, ``"triton"`` (windows only, on CUDA), ``"plain"`` or ``"auto"``; see
            :func:`~tg_equiattn.functional.group_attention`.

    Shapes:
        ``(B, in_channels, H, W)`` or ``(B, in_channels, D, H, W)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: GSA-Nets Eq. 14; GE-ViT Eq. 14.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import dihedral
        >>> layer = LiftingAttention(dihedral(4), 3, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 3, 9, 7)).shape
        torch.Size([2, 20, 8, 9, 7])
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        encoding: str = "axial",
        encoding_eps: float = 1e-5,
        neighbourhood: str | None = None,
        locality: float | str | None = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            encoding=encoding, encoding_eps=encoding_eps, neighbourhood=neighbourhood, locality=locality,
            preferring=False, dropout=dropout, scale=scale, backend=backend, elements=None,
        )  # fmt: skip
        nothing = torch.zeros(len(group), 1, 1, dtype=torch.int64, device=self.out.weight.device)
        self.register_buffer("index", nothing, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        checks.features(x, self.in_channels, self.group.dim, None, self.out.weight)
        self.neighbourhood.check(x.shape[2:])
        return self._attend(*(projected.unsqueeze(3) for projected in self.project(x)))


class GroupAttention(_Attention):
    r"""Group self-attention: regular features of a finite group in and out.

    .. math::
        \mathrm{out}(i, h) = W_o \big\Vert_{\mathrm{heads}} \sum_t \sum_{(j,s)} \mathrm{softmax}_{(j,s)}\big(
        c\,\langle q(i,t),\; k(j,s) + \rho(h^{-1}(x_j - x_i), u) \rangle + l(h^{-1}(x_j - x_i), u)\big)\; v(j, s)

    with the locality l of the head.

    Args:
        relation: which group element u the encoding sees: ``"ge_vit"`` (:math:`h^{-1}ts^{-1}t`), ``"lifted"``
            (:math:`t^{-1}s`), ``"relative"`` (:math:`t^{-1}s` with h = t only, :math:`|H|` times cheaper), or ``"gsa"``
            (:math:`h^{-1}t^{-1}s`), which is **not equivariant**, is kept to reproduce the comparison, and warns.
        group, in_channels, out_channels, heads, head_channels, kernel_size: as :class:`LiftingAttention`.
        encoding, encoding_eps, neighbourhood, dropout, scale, backend: as :class:`LiftingAttention`.
        locality: as :class:`LiftingAttention`; with ``"relative"`` a head prefers a group element at the start, too.

    Shapes:
        ``(B, in_channels, |H|, *spatial)`` -> ``(B, out_channels, |H|, *spatial)``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: GSA-Nets Eq. 16; GE-ViT Eq. 16-17. u comes from the Cayley table, so the layer is equivariant for dihedral
    groups as well, where the published code of both papers is not.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> layer = GroupAttention(cyclic(4), 20, 20, heads=2, kernel_size=5)
        >>> layer(torch.randn(2, 20, 4, 9, 7)).shape
        torch.Size([2, 20, 4, 9, 7])
    """

    def __init__(
        self,
        group: FiniteGroup,
        in_channels: int,
        out_channels: int,
        *,
        heads: int = 8,
        head_channels: int | None = None,
        kernel_size: int | None = 5,
        relation: str = "ge_vit",
        encoding: str = "axial",
        encoding_eps: float = 1e-5,
        neighbourhood: str | None = None,
        locality: float | str | None = "auto",
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        check_group(group)
        super().__init__(
            group, in_channels, out_channels, heads=heads, head_channels=head_channels, kernel_size=kernel_size,
            encoding=encoding, encoding_eps=encoding_eps, neighbourhood=neighbourhood, locality=locality,
            preferring=relation == "relative", dropout=dropout, scale=scale, backend=backend, elements=len(group),
        )  # fmt: skip
        self.relation = relation
        index = relation_index(group, relation).to(self.out.weight.device)
        self.register_buffer("index", index, persistent=False)
        if relation == "gsa":
            warnings.warn(
                "relation='gsa' (GSA-Nets section 5.2) is not equivariant; it is kept to reproduce the comparison, "
                "use 'ge_vit', 'lifted' or 'relative' otherwise",
                stacklevel=2,
            )

    def forward(self, x: Tensor) -> Tensor:
        checks.features(x, self.in_channels, self.group.dim, len(self.group), self.out.weight)
        self.neighbourhood.check(x.shape[3:])
        return self._attend(*self.project(x))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relation={self.relation!r}"
