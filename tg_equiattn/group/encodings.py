r"""Relations of group elements, and terms of attention scores that depend on relative positions.

Encodings are functions of the offset rotated to the frame of output element h, :math:`h^{-1}(x_j - x_i)`, and of a
group element u that depends on the relation. Locality is a score of position alone; with it each head starts at its own
offset, like a tap of a convolution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..grids import Window
from ..groups import FiniteGroup, Group
from ..modules import LayerNorm
from ..shapes import Float, Num
from ..torch_state import by_form, full_precision, is_autocast

ENCODINGS = ("axial", "joint")  # of offsets; rotary positions have a class of their own
CONTENT = 0.3  # initial scale of queries with locality, so that positions determine the weights at the start
CONTRAST = 2.0  # initial score of the preferred group element above that of the others


@dataclass(frozen=True)
class Relation:
    """The group elements that attend to each other, a row of :data:`RELATIONS`.

    Attributes:
        index: function of a group that gives the element u of the encoding for each output h, query t and key s;
            ``None`` if encodings do not depend on elements.
        mixes_elements: true if a linear map of values mixes elements. If not, attention does.
        content: share of the heads that have content by default, within a window and with locality.
        prefers_element: true if each head starts with a preference for one group element.
        equivariant: false if a layer with this relation is not equivariant.
    """

    index: Callable[[FiniteGroup], Tensor] | None = None
    mixes_elements: bool = False
    content: float = 1.0
    prefers_element: bool = False
    equivariant: bool = True


def _relative(group: FiniteGroup) -> Tensor:
    return group.cayley[group.inverse]  # t^-1 s


def _lifted(group: FiniteGroup) -> Tensor:
    return _relative(group).expand(len(group), -1, -1).contiguous()


def _ge_vit(group: FiniteGroup) -> Tensor:
    every = torch.arange(len(group), device="cpu")
    right = group.cayley[group.cayley[:, group.inverse], every[:, None]]  # t s^-1 t
    return group.cayley[group.inverse[:, None, None], right]


def _gsa(group: FiniteGroup) -> Tensor:
    return group.cayley[group.inverse[:, None, None], _relative(group)]


RELATIONS = {
    "lifting": Relation(content=1 / 8),
    "frame": Relation(mixes_elements=True, content=1 / 2),
    "ge_vit": Relation(_ge_vit),
    "lifted": Relation(_lifted),
    "relative": Relation(_relative, prefers_element=True),
    "gsa": Relation(_gsa, equivariant=False),
}
INDEXED = tuple(name for name, relation in RELATIONS.items() if relation.index)


@checks.arguments
def relation_index(group: Group, relation: str = "ge_vit") -> Tensor:
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
    checks.choice("relation", relation, INDEXED)
    index: Any = RELATIONS[relation].index
    return index(group)


def rotated_offsets(
    matrices: Float[Tensor, "frames d d"], offsets: Num[Tensor, "offsets d"]
) -> Float[Tensor, "frames offsets d"]:
    r"""Offsets D, rotated to the frame of each group element h: :math:`h^{-1} D`."""
    return torch.einsum("hyx,ny->hnx", matrices, offsets.to(matrices.dtype))  # h^-1 is the transpose


def _coordinate_mlp(in_features: int, out_features: int, hidden: int = 16) -> nn.Sequential:
    """The MLP of the published GSA-Nets and GE-ViT models: 1 or d coordinates -> 16 -> layer norm -> swish -> width.

    The last weights are initialised so that encodings have a variance of about 1, as the table over u has. With torch's
    default initialisation, attention starts as a blur and learns slowly.
    """
    last = nn.Linear(hidden, out_features)
    nn.init.normal_(last.weight, std=(3 / hidden) ** 0.5)
    return nn.Sequential(nn.Linear(in_features, hidden), LayerNorm(hidden), nn.SiLU(), last)


class GroupEncoding(nn.Module):
    r"""Encoding of rotated offsets and group elements u. It runs in the dtype of its parameters.

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

    def forward(
        self, offsets: Float[Tensor, "frames offsets dim"]
    ) -> tuple[Float[Tensor, "frames offsets channels"], Float[Tensor, "elements channels"] | None]:
        if self.name != "axial":
            return self.mlp(offsets.to(self.mlp[0].weight.dtype)), self.table
        points = offsets.flatten(0, 1).to(self.axes[0][0].weight.dtype)
        parts = [mlp(points[:, axis : axis + 1]) for axis, mlp in enumerate(self.axes)]
        axial = torch.cat(parts, -1).unflatten(0, offsets.shape[:2])
        if self.table is None:
            return axial, None
        width = self.table.shape[1]
        return F.pad(axial, (0, width)), F.pad(self.table, (self.channels - width, 0))

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, channels={self.channels}, elements={self.elements}"


class RotaryEncoding(nn.Module):
    r"""Rotary positions in the frame of each group element: angles by which pairs of channels of queries and keys are
    rotated.

    .. math:: \theta_{ep}(h, x) = \omega_{ep} \cdot (h^{-1} x)

    The score of a query at x_i and a key at x_j of element h then depends on :math:`h^{-1}(x_j - x_i)` only.
    Frequencies :math:`\omega` of head e and pair p are learned, in radians per unit of x. Those of half of the pairs of
    each head start at zero: these pairs first compare content alone, at all distances.

    With ``elements``, keys of all group elements meet a query of element h: the embedding ``table[u]`` is added to the
    key of element s before it is rotated, where u is the element of the relation, :math:`h^{-1} s`.

    Args:
        heads: Number of heads.
        dim: Number of coordinates d of a position, 2 or 3.
        channels: Channels of a head, at least 2. The last one of an odd number is not rotated.
        elements: Number of elements u. ``None`` means that there are no embeddings (frames and lifting).

    Raises:
        ValueError: if ``channels`` is less than 2.

    Source: Su et al., RoFormer (2021); Heo et al. (2024, arXiv:2403.13298) for images with learned frequencies; in
    frames: Platonic Transformers (2025, arXiv:2510.03511).
    """

    def __init__(self, heads: int, dim: int, channels: int, elements: int | None = None) -> None:
        super().__init__()
        if channels < 2:
            raise ValueError(
                "head_channels must be at least 2 for rotary positions, which rotate pairs of channels, got "
                f"{channels}; increase it, or use another encoding"
            )
        pairs = channels // 2
        start = torch.randn(heads, pairs, dim)
        start[:, (pairs + 1) // 2 :] = 0
        self.frequencies = nn.Parameter(start)
        self.table = None if elements is None else nn.Parameter(torch.randn(elements, channels))

    def forward(
        self, positions: Float[Tensor, "*any dim"], matrices: Float[Tensor, "H dim dim"]
    ) -> Float[Tensor, "*any H heads pairs"]:
        with full_precision(positions.device):
            omega = torch.einsum("hyx,epx->yhep", matrices, self.frequencies.to(matrices.dtype))  # omega . h^-1 x
            return (positions.to(matrices.dtype) @ omega.flatten(1)).unflatten(-1, omega.shape[1:])

    def extra_repr(self) -> str:
        heads, pairs, dim = self.frequencies.shape
        return f"heads={heads}, dim={dim}, channels={2 * pairs}"


def rotated(x: Float[Tensor, "*any C"], angles: Float[Tensor, "*any C/2"]) -> Float[Tensor, "*any C"]:
    """Rotate the pairs of neighbouring channels of x by angles, in their dtype. The result has the dtype of x."""
    width = 2 * angles.shape[-1]
    with full_precision(x.device):
        pairs = x[..., :width].to(angles.dtype).unflatten(-1, (-1, 2))
        out = _rotated_pairs(pairs, angles).flatten(-2).to(x.dtype)
    if width == x.shape[-1]:
        return out
    return torch.cat([out, x[..., width:].expand(*out.shape[:-1], -1)], -1)


def _by_parts(pairs: Float[Tensor, "*any 2"], angles: Float[Tensor, "*any"]) -> Float[Tensor, "*any 2"]:
    (a, b), cos, sin = pairs.unbind(-1), angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1)


def _by_complex_numbers(pairs: Float[Tensor, "*any 2"], angles: Float[Tensor, "*any"]) -> Float[Tensor, "*any 2"]:
    if pairs.stride(-1) != 1 or any(n % 2 for n in (*pairs.stride()[:-1], pairs.storage_offset())):
        pairs = pairs.contiguous()  # complex numbers are aligned
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(angles.cos(), angles.sin()))


_rotated_pairs = by_form(_by_parts, _by_complex_numbers)  # compilers and exporters lack complex numbers


def _elements(
    x: Float[Tensor, "H B tokens heads C"], basis: Float[Tensor, "H H"], angles: Float[Tensor, "... tokens some C/2"],
    count: int,
) -> Float[Tensor, "H B tokens heads C"]:  # fmt: skip
    """Transform Fourier coefficients to group elements, and rotate the first ``count`` heads. Angles repeat."""
    first, others = (basis @ x.flatten(1)).view(x.shape).tensor_split((count,), 3)
    pairs = first.unflatten(3, (-1, angles.shape[3]))
    return torch.cat([rotated(pairs, angles.unsqueeze(3)).flatten(3, 4).to(x.dtype), others], 3)


class _Elements(torch.autograd.Function):
    """In place, so that heads that are not rotated are not copied, and the input is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, basis: Tensor, phases: Tensor, count: int) -> Tensor:
        out = (basis @ x.flatten(1)).view(x.shape)
        _pairs(out, phases, count).mul_(phases)
        ctx.save_for_backward(out, basis, phases)
        ctx.count = count
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (out, basis, phases), count, to_phases = ctx.saved_tensors, ctx.count, None
        grad = grad.contiguous()
        if ctx.needs_input_grad[2]:
            product = _pairs(out, phases, count).conj() * _pairs(grad, phases, count)
            total = torch.view_as_complex(
                torch.view_as_real(product).sum(3, keepdim=True).sum_to_size(*phases.shape, 2)
            )
            to_phases = total * phases  # the input is the output, rotated back
        back = grad.clone()
        _pairs(back, phases, count).mul_(phases.conj())
        return (basis.T @ back.view(len(basis), -1)).view(out.shape), None, to_phases, None


def _pairs(x: Tensor, phases: Tensor, count: int) -> Tensor:
    """The pairs of channels of the first heads as complex numbers: a view."""
    return torch.view_as_complex(x[..., :count, :].view(*x.shape[:3], -1, *phases.shape[4:], 2))


def _in_place(x: Tensor, basis: Tensor, angles: Tensor, count: int) -> Tensor:
    if x.dtype != angles.dtype or x.shape[-1] % 2 or is_autocast(x):
        return _elements(x, basis, angles, count)
    return _Elements.apply(x, basis, torch.complex(angles.cos(), angles.sin()).unsqueeze(3), count)


rotated_elements = by_form(_elements, _in_place)


def starting_offsets(heads: int, window: Window, elements: int = 1) -> list[tuple[tuple[int, ...], int, int]]:
    """The initial offset, preferred group element and round of each head; no two heads have the same three.

    Head e starts at the e-th nearest offset of the window (ties in the order of coordinates) and prefers the element e
    modulo ``elements``. When all offsets are used, heads start again at the nearest offset, with the next element
    there. When all pairs of an offset and an element are used, the next round begins; its locality strength is half as
    large.

    Args:
        heads: Number of heads.
        window: The window of attention. With a global window, offsets come from a cube around the pixel.
        elements: Number of group elements that heads may prefer. The default 1 means no preference.
    """
    if window.is_global:
        radius = math.ceil(heads ** (1 / window.dim))  # a cube of this radius contains the nearest offsets
        offsets = list(itertools.product(range(-radius, radius + 1), repeat=window.dim))
    else:
        offsets = [tuple(offset) for offset in window.offsets().tolist()]
    offsets = sorted(offsets, key=lambda offset: (sum(n * n for n in offset), offset))[:heads]
    repeats = (divmod(head, len(offsets)) for head in range(heads))
    return [(offsets[n], (n + repeat) % elements, repeat // elements) for repeat, n in repeats]


class Locality(nn.Module):
    r"""Learned scores of each head that depend on rotated offsets and group elements, but not on content.

    .. math:: l_e(h^{-1}D, u) = -\alpha_e\, |h^{-1}D - \Delta_e|^2 + w_e[u]

    D are offsets in pixels. Head e learns a locality strength :math:`\alpha_e \ge 0` in 1 / pixel^2, a centre
    :math:`\Delta_e` in pixels and a preference :math:`w_e[u]` for each group element u. Each head starts at its own
    offset (:func:`starting_offsets`).

    With one head for each offset and element, large :math:`\alpha` and large differences of w, relative attention is a
    group convolution. At the border they differ: the softmax weights the nearest pixel of the image, while a
    convolution sees zeros.

    ``forward`` takes rotated offsets in pixels and returns scores and preferences; preferences are ``None`` without
    ``elements``.

    Args:
        heads: Number of heads.
        window: The window of attention.
        locality_strength: Initial :math:`\alpha` of the first round of heads, in 1 / pixel^2, not negative.
        elements: Number of group elements u. ``None`` means no preferences w (frames and lifting).
        element_preference: Whether each head starts with a preference for one group element. Otherwise w starts at
            zero. The default is False.

    Source: Cordonnier et al., On the relationship between self-attention and convolutional layers (2020), Theorem 1;
    d'Ascoli et al., ConViT (2021), for the initial values. Both are without a group.
    """

    def __init__(
        self, heads: int, window: Window, locality_strength: float, *, elements: int | None = None,
        element_preference: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.elements, self.start = heads, elements, locality_strength
        offsets, preferred, rounds = zip(
            *starting_offsets(heads, window, elements if elements and element_preference else 1), strict=True
        )
        self.locality_strength = nn.Parameter(torch.tensor([locality_strength / 2.0**n for n in rounds]))
        self.centre = nn.Parameter(self.locality_strength.new_tensor(offsets))
        self.preference: nn.Parameter | None = None
        if elements:
            self.preference = nn.Parameter(self.locality_strength.new_zeros(heads, elements))
            if element_preference:
                with torch.no_grad():
                    self.preference[range(heads), list(preferred)] = CONTRAST

    def forward(
        self, offsets: Float[Tensor, "frames offsets d"]
    ) -> tuple[Float[Tensor, "heads frames offsets"], Float[Tensor, "heads elements"] | None]:
        dtype = torch.promote_types(self.locality_strength.dtype, torch.float32)  # float16 overflows
        locality_strength, centre = self.locality_strength.to(dtype), self.centre.to(dtype)
        # this absolute value has a gradient at zero, so that alpha can leave zero
        factor = -F.leaky_relu(locality_strength, -1.0)
        distance = (offsets.to(dtype) - centre[:, None, None]).square().sum(-1)
        return factor[:, None, None] * distance, self.preference

    def extra_repr(self) -> str:
        return f"heads={self.heads}, locality_strength={self.start}, elements={self.elements}"


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of a model that should not decay: frequencies of rotary positions, and strengths, offsets
    and elements of locality.

    Weight decay pulls these to zero, where heads do not see positions, or all look at the same pixel. The names are
    those of ``model.named_parameters()``. A model that has the method ``no_weight_decay`` of timm can return this set.

    Args:
        model (torch.nn.Module): Any module, also one of escnn.

    Example:
        >>> import torch
        >>> from tg_equiattn.groups import cyclic
        >>> from tg_equiattn.nn import GroupAttention
        >>> model = torch.nn.Sequential(GroupAttention(cyclic(4), 8, 8))
        >>> names = no_weight_decay(model)
        >>> sorted(names)
        ['0.locality.centre', '0.locality.locality_strength']
        >>> constant = [p for name, p in model.named_parameters() if name in names]
        >>> others = [p for name, p in model.named_parameters() if name not in names]
        >>> optimizer = torch.optim.AdamW([{"params": others}, {"params": constant, "weight_decay": 0.0}])
    """
    kinds = (Locality, RotaryEncoding)
    places = {place: part for place, part in model.named_modules() if isinstance(part, kinds)}
    names = {f"{place}.{name}".lstrip(".") for place, part in places.items() for name, _ in part.named_parameters()}
    return {name for name in names if name.rpartition(".")[2] != "table"}  # embeddings of group elements
