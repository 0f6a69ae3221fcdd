r"""Relative positional encodings of group self-attention, at :math:`h^{-1}(x_j - x_i)`, the offset seen from output
element h, and at a group element u that depends on the ``relation``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Window
from ..groups import FiniteGroup, check_group
from ..modes import LayerNorm, full_precision

ENCODINGS = ("axial", "joint", "full")
RELATIONS = ("ge_vit", "lifted", "relative", "gsa")  # of the group encoding, which frames have none of


def relation_index(group: FiniteGroup, relation: str = "ge_vit") -> Tensor:
    r"""The argument u of the group encoding for each output h, query t and key s, as element indices.

    ===========  =========================  =====================================  ===========
    relation     u                          source                                 equivariant
    ===========  =========================  =====================================  ===========
    ge_vit       :math:`h^{-1} t s^{-1} t`  GE-ViT Eq. 17                          yes
    lifted       :math:`t^{-1} s`           Group Equivariant Transformers note    yes
    relative     :math:`t^{-1} s`, h = t    pointwise form :math:`g_i^{-1} g_j`    yes
    gsa          :math:`h^{-1} t^{-1} s`    GSA-Nets section 5.2                   **no**
    ===========  =========================  =====================================  ===========

    Returns:
        int64 ``(|H|, |H|, |H|)`` over (h, t, s), or ``(|H|, |H|)`` over (t, s) for ``"relative"``. Along s every row
        is a permutation of the group.

    Raises:
        ValueError: for an unknown relation, or a group that is not finite.
    """
    check_group(group)
    checks.choice("relation", relation, RELATIONS)
    every, inverse, product = torch.arange(len(group), device="cpu"), group.inverse, group.cayley
    relative = product[inverse[:, None], every]  # t^-1 s
    if relation == "relative":
        return relative
    if relation == "lifted":
        return relative.expand(len(group), -1, -1).contiguous()
    if relation == "gsa":
        return product[inverse[:, None, None], relative]
    return product[inverse[:, None, None], product[product[every[:, None], inverse], every[:, None]]]


def rotated_offsets(matrices: Tensor, window: Window, spatial: tuple[int, ...] | None = None) -> Tensor:
    r"""Offsets in pixels seen from every element, :math:`h^{-1} D`.

    Args:
        matrices: ``(|H|, d, d)`` float64 elements of the group.
        spatial: the grid's size, for a global window.

    Returns:
        ``(|H|, D, d)`` float64.
    """
    offsets = window.offsets(spatial, matrices.device).to(matrices.dtype)
    return torch.einsum("hyx,ny->hnx", matrices, offsets)  # h^-1 is the transpose


def _coordinate_mlp(in_features: int, out_features: int, hidden: int = 16) -> nn.Sequential:
    """1 or d coordinates -> 16 -> layer norm -> swish -> width, as in the published GSA-Nets and GE-ViT models; with
    last weights by which encodings have about the variance of the table over u, 1: torch's own start is a blur, which
    attention is slow to leave."""
    last = nn.Linear(hidden, out_features)
    nn.init.normal_(last.weight, std=(3 / hidden) ** 0.5)
    return nn.Sequential(nn.Linear(in_features, hidden), LayerNorm(hidden), nn.SiLU(), last)


class GroupEncoding(nn.Module):
    r"""Of rotated offsets and group elements u, in the dtype of its parameters whatever autocast says.

    ``"axial"`` is one MLP per rotated axis and a table over u, each on channels of its own, split evenly, the remainder
    going to the last part (the published encoding); ``"joint"`` one MLP of the whole offset plus a table over u;
    ``"full"`` one MLP of offset and u together, u entering the hidden layer by a table. That does not split into a sum,
    so attention takes the direct formula.

    .. math:: \rho_{axial} = [\,\mathrm{mlp}_1((h^{-1}D)_1), ..., \mathrm{mlp}_d((h^{-1}D)_d), \mathrm{table}(u)\,],
        \quad \rho_{joint} = \mathrm{mlp}(h^{-1}D) + \mathrm{table}(u), \quad \rho_{full} = \mathrm{mlp}(h^{-1}D, u)

    Args:
        elements: size of the table over u, or ``None`` without one (lifting).

    Shapes:
        ``(|H|, D, dim)`` offsets -> :math:`\rho_{space}` ``(|H|, D, channels)``, of ``"full"`` ``(|H|, D, elements,
        channels)``, and :math:`\rho_{group}` ``(elements, channels)``, or ``None`` without elements and of ``"full"``.
    """

    def __init__(self, name: str, dim: int, channels: int, elements: int | None) -> None:
        super().__init__()
        checks.choice("encoding", name, ENCODINGS)
        self.name, self.dim, self.channels, self.elements = name, dim, channels, elements
        width = channels if name == "joint" else 16
        if name == "axial":
            parts = dim + (elements is not None)
            if channels < parts:
                raise ValueError(f"head_channels must be at least {parts} for the axial encoding, got {channels}")
            widths = [channels // parts] * (parts - 1) + [channels // parts + channels % parts]
            self.axes, width = nn.ModuleList(_coordinate_mlp(1, n) for n in widths[:dim]), widths[-1]
        else:
            self.mlp = _coordinate_mlp(dim, channels)
        self.table = None if elements is None else nn.Parameter(torch.randn(elements, width))

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, channels={self.channels}, elements={self.elements}"

    def forward(self, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        with full_precision(offsets.device):
            offsets = offsets.to(next(self.parameters()).dtype)
            if self.name == "axial":
                axial = torch.cat([mlp(offsets[..., axis, None]) for axis, mlp in enumerate(self.axes)], -1)
                if self.table is None:
                    return axial, None
                width = self.table.shape[1]
                return nn.functional.pad(axial, (0, width)), nn.functional.pad(self.table, (self.channels - width, 0))
            if self.name == "joint" or self.table is None:
                return self.mlp(offsets), self.table
            first, norm, activation, last = self.mlp
            return last(activation(norm(first(offsets)[:, :, None] + self.table))), None
