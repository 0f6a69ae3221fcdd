r"""Relative positional encodings of group self-attention: functions of the offset rotated to the frame of output
element h, :math:`h^{-1}(x_j - x_i)`, and of a group element u that depends on the relation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import checks
from ..grids import Window
from ..groups import FiniteGroup, check_group
from ..modes import LayerNorm, full_precision

if TYPE_CHECKING:
    from jaxtyping import Float

ENCODINGS = ("axial", "joint")
RELATIONS = ("ge_vit", "lifted", "relative", "gsa")  # relations whose encoding depends on u


def relation_index(group: FiniteGroup, relation: str = "ge_vit") -> Tensor:
    r"""Indices of the group elements u that the group encoding depends on, for each output h, query t and key s.

    ===========  =========================  =====================================  ===========
    relation     u                          source                                 equivariant
    ===========  =========================  =====================================  ===========
    ge_vit       :math:`h^{-1} t s^{-1} t`  GE-ViT Eq. 17                          yes
    lifted       :math:`t^{-1} s`           Group Equivariant Transformers note    yes
    relative     :math:`t^{-1} s`, h = t    pointwise form :math:`g_i^{-1} g_j`    yes
    gsa          :math:`h^{-1} t^{-1} s`    GSA-Nets section 5.2                   **no**
    ===========  =========================  =====================================  ===========

    Args:
        group: The finite group H.
        relation: One of the relations of the table. The default is ``"ge_vit"``.

    Shapes:
        The result is int64 ``(|H|, |H|, |H|)`` over (h, t, s), or ``(|H|, |H|)`` over (t, s) for ``"relative"``. Each
        row along s is a permutation of the group elements.

    Raises:
        ValueError: if ``relation`` is not in the table, or if ``group`` is not a finite group.

    Example:
        >>> from tg_equiattn.groups import cyclic
        >>> relation_index(cyclic(2), "relative").tolist()
        [[0, 1], [1, 0]]
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


def rotated_offsets(
    matrices: Float[Tensor, "frames d d"], window: Window, spatial: tuple[int, ...] | None = None
) -> Float[Tensor, "frames offsets d"]:
    r"""Offsets of a window in pixels, rotated to the frame of each group element: :math:`h^{-1} D`.

    Args:
        matrices: Matrices of the group elements h.
        window: The window with offsets D.
        spatial: Size of the grid. It is needed for a global window only.
    """
    offsets = window.offsets(spatial, matrices.device).to(matrices.dtype)
    return torch.einsum("hyx,ny->hnx", matrices, offsets)  # h^-1 is the transpose


def _coordinate_mlp(in_features: int, out_features: int, hidden: int = 16) -> nn.Sequential:
    """The MLP of the published GSA-Nets and GE-ViT models: 1 or d coordinates -> 16 -> layer norm -> swish -> width.

    The last weights are initialised so that encodings have a variance of about 1, as the table over u has. With torch's
    default initialisation, attention starts as a blur and learns slowly.
    """
    last = nn.Linear(hidden, out_features)
    nn.init.normal_(last.weight, std=(3 / hidden) ** 0.5)
    return nn.Sequential(nn.Linear(in_features, hidden), LayerNorm(hidden), nn.SiLU(), last)


class GroupEncoding(nn.Module):
    r"""Encoding of rotated offsets and group elements u. It runs in the dtype of its parameters, also under autocast.

    .. math:: \rho_{axial} = [\,\mathrm{mlp}_1((h^{-1}D)_1), ..., \mathrm{mlp}_d((h^{-1}D)_d), \mathrm{table}(u)\,],
        \quad \rho_{joint} = \mathrm{mlp}(h^{-1}D) + \mathrm{table}(u)

    - ``"axial"`` (published): one MLP for each rotated axis and a table over u. Each part has its own channels; they
      are split evenly, and the last part takes the remainder.
    - ``"joint"``: the sum of one MLP of the whole offset and a table over u.

    The result is :math:`\rho_{space}` and :math:`\rho_{group}`. Without ``elements``, the second is ``None``.

    Args:
        name: ``"axial"`` or ``"joint"``.
        dim: Number of coordinates d of an offset, 2 or 3.
        channels: Channels of the encoding, the width of a head.
        elements: Number of elements u. ``None`` means that the encoding does not depend on u (frames and lifting).

    Raises:
        ValueError: if ``name`` is not one of these, or if ``channels`` is too small for ``"axial"``, which needs one
            channel for each part.
    """

    def __init__(self, name: str, dim: int, channels: int, elements: int | None) -> None:
        super().__init__()
        checks.choice("encoding", name, ENCODINGS)
        self.name, self.dim, self.channels, self.elements = name, dim, channels, elements
        width = channels
        if name == "axial":
            parts = dim + (elements is not None)
            if channels < parts:
                raise ValueError(
                    f"head_channels must be at least {parts} for the axial encoding, got {channels}; increase it, or "
                    "use encoding='joint'"
                )
            widths = [channels // parts] * (parts - 1) + [channels // parts + channels % parts]
            width = widths[-1]
            self.axes: Any = nn.ModuleList(_coordinate_mlp(1, n) for n in widths[:dim])
        else:
            self.mlp: Any = _coordinate_mlp(dim, channels)
        self.table = None if elements is None else nn.Parameter(torch.randn(elements, width))

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, channels={self.channels}, elements={self.elements}"

    def forward(
        self, offsets: Float[Tensor, "frames offsets dim"]
    ) -> tuple[Float[Tensor, "frames offsets channels"], Float[Tensor, "elements channels"] | None]:
        with full_precision(offsets.device):
            if self.name == "axial":
                points = offsets.flatten(0, 1).to(self.axes[0][0].weight.dtype)
                found = [mlp(points[:, axis : axis + 1]) for axis, mlp in enumerate(self.axes)]
                axial = torch.cat(found, -1).unflatten(0, offsets.shape[:2])
                if self.table is None:
                    return axial, None
                width = self.table.shape[1]
                return nn.functional.pad(axial, (0, width)), nn.functional.pad(self.table, (self.channels - width, 0))
            return self.mlp(offsets.to(self.mlp[0].weight.dtype)), self.table
