"""Ewald attention of scalars and vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...encodings.harmonics import solid_harmonics
from ..tokens import read_tokens
from .ewald_layer import EwaldLayer, EwaldSettings, Irrep

if TYPE_CHECKING:
    from jaxtyping import Float


def gaunt_coupling(first: int, second: int, out: int) -> Float[Tensor, "2*first+1 2*second+1 2*out+1"]:
    """The invariant product of three degrees, with norm 1, which is unique. The sum of the degrees must be even and at
    most 5.

    It is the mean over the sphere of products of three harmonics. For these degrees the mean over the corners of an
    icosahedron is the same.
    """
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0.0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    points = torch.cat([torch.tensor(corners, dtype=torch.float64).roll(n, 1) for n in range(3)])
    harmonics = solid_harmonics(points / math.hypot(1, golden), max(first, second, out))
    mean = torch.einsum("ma,mb,mc->abc", *(harmonics[:, n**2 : (n + 1) ** 2] for n in (first, second, out)))
    return mean / mean.norm()


class EwaldAttention(EwaldLayer):
    r"""Global attention in molecules, slabs and crystals of any size, through Gaussian and Coulomb kernels.

    Query, key and value are linear maps of scalars and vectors; inner products are over both. With kernels K of learned
    widths s (:class:`tg_equiattn.functional.Gaussian`, :class:`~tg_equiattn.functional.Coulomb`) and a linear map W of
    products of values with solid harmonics Y to scalars and vectors,

    .. math:: \mathrm{out}_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        W \big[ v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j) \big]

    The sum includes the node itself and, if a graph repeats, all images of all nodes; one batch may hold molecules,
    slabs and crystals. In a new layer queries and keys are near 1, so it computes potentials and fields of its values.
    The output has no residual connection and is extensive: see ``avg_num_nodes``. Equivariant to rotations,
    reflections, translations and permutations; smooth in positions and cells, with derivatives of any order. Direct
    sums are exact. Sums over the reciprocal vectors of a cell have exact symmetries and approximate to ``error``; those
    of a box around a large open graph have symmetries to ``error`` too (:doc:`/crystals`). Under autocast everything is
    computed and returned in float32.

    Args:
        scalar_channels: Scalars of the input.
        vector_channels: Vectors of the input.
        width: Width of the narrowest kernel, in the unit of ``pos``. Use about half of the message-passing cutoff:
            messages already model shorter distances.
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. Each width is learned within an
            octave of its own between the two.
        out_channels: Scalars and vectors of the output. The default, ``None``, means as many as in the input.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        kernels: Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
            ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains
            (:doc:`/crystals`). The layer keeps a copy. The default is ``None``.
        heads: Number of heads, 1 by default, each with its own queries, keys and widths and a share of the values.
        lmax: Highest degree of the solid harmonics, 1 by default.
        avg_num_nodes: Constant by which sums are divided, 1 by default: the number of nodes a node attends to on
            average. It is the same for all graphs.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default. Use 1e-2 to train faster.
        method: ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every graph: direct sums below 4,000 nodes if it
            is open, reciprocal sums if it repeats, and non-uniform transforms if it is larger.
        max_hkl: Largest Miller indices along the lattice vectors a, b, c, for the kernel with the largest cutoff k:
            each above :math:`|a| k / 2 \pi`. If one is too small, an error names what is needed. If given, cells are
            not read, which torch.compile needs. The default, ``None``, reads them.

    Shapes:
        ``(B, N, S)``, ``(B, N, V, 3)`` and positions ``(B, N, 3)``, or flat ``(T, S)``, ``(T, V, 3)`` and ``(T, 3)``
        with ``batch``, to scalars and vectors again. Positions, cells and widths have one unit of length.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: as :func:`tg_equiattn.functional.ewald_attention`.

    Example:
        >>> import torch
        >>> attention = EwaldAttention(8, 4, width=0.5)
        >>> pos = torch.rand(2, 101, 3)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 4, 3), pos=pos)
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 4, 3]))
    """

    coupling = staticmethod(gaunt_coupling)

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        *,
        width: float,
        max_width: float | None = None,
        out_channels: tuple[int, int] | None = None,
        num_gaussians: int = 4,
        num_coulomb: int = 4,
        kernels: nn.Module | None = None,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
    ) -> None:
        in_channels = _channels("scalar_channels, vector_channels", (scalar_channels, vector_channels))
        out_channels = in_channels if out_channels is None else _channels("out_channels", out_channels)
        settings = EwaldSettings(
            width, max_width, num_gaussians, num_coulomb, kernels, heads, lmax, avg_num_nodes, error, method, max_hkl
        )
        super().__init__(_rows(in_channels), _rows(out_channels), "out_channels", settings)
        self.in_channels, self.out_channels = in_channels, out_channels

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"in_channels": self.in_channels, "out_channels": self.out_channels}

    def forward(
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        pos: Tensor,
        batch: Tensor | None = None,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scalars and vectors of the nodes.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``. ``None`` if there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``. ``None`` if there are no vector channels.
            lengths: int64 ``(B,)``, the number of nodes of each padded graph. Padding is never read; its output is 0.
            pos: ``(B, N, 3)`` or ``(T, 3)``. Give large coordinates in float64, whatever the features are.
            batch: Sorted int64 ``(T,)``, the graph of each flat node. ``None`` means one graph.
            cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
            pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat: three, two or none.
                ``None`` means all that are not zero.
            batch_size: Number of flat graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
            max_num_nodes: Bound of the number of nodes of a flat graph. ``None`` reads it from ``batch``.
        """
        shape, scalars, vectors, node_batch = read_tokens(
            scalars, vectors, self.in_channels, self.octaves, lengths, batch, batch_size, max_num_nodes,
            self.ranks,
        )  # fmt: skip
        pos = checks.positions(pos, (*shape, 3), scalars, "attention depends on them").reshape(-1, 3)
        out = self.attend(torch.cat([scalars, vectors.mT.flatten(1)], 1), pos, node_batch, cell, pbc)
        scalars, vectors = out.split([self.out_channels[0], 3 * self.out_channels[1]], 1)
        vectors = vectors.unflatten(1, (3, self.out_channels[1])).mT.contiguous()
        return scalars.reshape(*shape, scalars.shape[1]), vectors.view(*shape, *vectors.shape[1:])

    def extra_repr(self) -> str:
        return f"{self.in_channels} -> {self.out_channels}, width={self.width}, kernels={self.counts}"


def _rows(channels: tuple[int, int]) -> list[Irrep]:
    return [irrep for irrep in (Irrep(0, 1, channels[0]), Irrep(1, -1, channels[1])) if irrep.channels]


def _channels(name: str, given: tuple[int, int]) -> tuple[int, int]:
    fits = isinstance(given, (tuple, list)) and len(given) == 2
    if not fits or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given) or not any(given):
        raise ValueError(f"{name} must be two numbers from 0 on, not both 0, got {given!r}")
    return given[0], given[1]
