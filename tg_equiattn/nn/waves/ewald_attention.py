"""Ewald attention of scalars and vectors."""

from __future__ import annotations

from torch import Tensor

from ... import checks
from ..tokens import read_tokens
from .ewald_network import EwaldLayer, EwaldNetwork, EwaldOptions
from .spherical_features import Irrep, gaunt_coupling


class EwaldAttention(EwaldLayer):
    r"""Attention in space through Gaussians and smeared Coulomb potentials: molecules, slabs, crystals, any size.

    Query, key and value are linear maps of scalars and vectors; inner products are of both. With kernels K of learned
    widths s (:class:`tg_equiattn.functional.EwaldKernels`) and a linear map W of products of values with solid
    harmonics Y to scalars and vectors,

    .. math:: \mathrm{out}_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        W \big[ v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j) \big]

    The sum includes the node itself and, where a graph repeats, all images of all nodes; one batch may hold molecules,
    slabs and crystals. A new layer gives potentials and fields of its values: queries and keys are near 1. The output
    has no residual connection and is extensive: see ``avg_num_nodes``. Equivariant to rotations, reflections,
    translations and permutations; smooth in positions and cells, with derivatives of any order. By pairs it is exact;
    by waves of a cell exact but for ``error`` in what they approximate; by waves of a box, around a large open graph,
    to ``error`` (:doc:`/crystals`). Under autocast it is computed and returned in float32.

    Args:
        scalar_channels, vector_channels: of the input.
        width, max_width: of the narrowest kernel, about half the cutoff of the messages beside it, and of the widest,
            ``None`` for 8 ``width``, in the unit of positions. Each width has its own octave between them.
        out_channels: scalars and vectors of the output; ``None`` means those of the input.
        kernels: how many, half Gaussians and half potentials, or numbers of each and, third, of ripples: Gaussians
            times cosines of the distance, whose wavelengths reach down to 4/3 ``width``.
        heads, lmax: heads, each with own queries, keys and widths and a share of values; highest degree of harmonics.
        avg_num_nodes: nodes that a node attends to, by which sums are divided, the same for all graphs.
        error: what is promised of sums by waves, relative to the largest value of a kernel.
        method: ``"pairs"``, ``"waves"``, ``"mesh"`` (which needs the extra ``mesh``), or ``"auto"``: for every graph by
            itself whichever is least work (:func:`tg_equiattn.functional.ewald_attention`).
        max_waves: three integers, along the lattice vectors a, b, c, that bound those of waves of the narrowest kernel:
            each above :math:`|a| k / 2 \pi`, with k the largest wavenumber, which an error names; given, cells are
            not read, which torch.compile needs.

    Shapes:
        ``(B, N, S)``, ``(B, N, V, 3)`` and positions ``(B, N, 3)``, or flat ``(T, S)``, ``(T, V, 3)`` and ``(T, 3)``
        with ``batch``, to scalars and vectors again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: that of :func:`tg_equiattn.functional.ewald_attention`.

    Example:
        >>> import torch
        >>> attention = EwaldAttention(8, 4, width=0.5)
        >>> pos = torch.rand(2, 101, 3)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 4, 3), pos=pos)
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 4, 3]))
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        *,
        width: float,
        max_width: float | None = None,
        out_channels: tuple[int, int] | None = None,
        kernels: int | tuple[int, ...] = 8,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_waves: tuple[int, int, int] | None = None,
    ) -> None:
        given = _channels("scalar_channels, vector_channels", (scalar_channels, vector_channels))
        wanted = given if out_channels is None else _channels("out_channels", out_channels)
        options = EwaldOptions(width, max_width, kernels, heads, lmax, avg_num_nodes, error, method, max_waves)
        inside, outside = ([Irrep(0, 1, own[0]), Irrep(1, -1, own[1])] for own in (given, wanted))
        super().__init__(EwaldNetwork(inside, outside, gaunt_coupling, options, "out_channels"))
        self.in_channels, self.out_channels = given, wanted

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
            scalars, vectors: ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)``; ``None`` where
                there are no such channels.
            lengths: int64 ``(B,)``, the own length of each graph; what lies beyond is never read, and zero.
            pos: ``(B, N, 3)`` or ``(T, 3)``. Give large coordinates in float64, whatever the features are.
            batch: sorted int64 ``(T,)``, the graph of each flat node; ``None`` means one.
            cell, pbc: lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``; bool ``(3,)`` or ``(B, 3)``, along which of
                them graphs repeat: three, two or none; ``None`` for those that are not zero.
            batch_size, max_num_nodes: number of flat graphs and a bound of their sizes, read from ``batch`` where not
                given, which torch.compile cannot.
        """
        reference = self.attention.octaves
        shape, scalars, vectors, ragged = read_tokens(
            scalars, vectors, self.in_channels, reference, lengths, batch, batch_size, max_num_nodes, self.ranks
        )
        pos = checks.positions(pos, (*shape, 3), scalars, "attention depends on them").reshape(-1, 3)
        scalars, vectors = self.attention([scalars[..., None], vectors], pos, ragged, cell, pbc)
        return scalars.reshape(*shape, scalars.shape[1]), vectors.contiguous().view(*shape, *vectors.shape[1:])

    def extra_repr(self) -> str:
        options = self.attention.options
        return f"{self.in_channels} -> {self.out_channels}, width={options.width}, kernels={options.kernels}"


def _channels(name: str, given: tuple[int, int]) -> tuple[int, int]:
    fits = isinstance(given, (tuple, list)) and len(given) == 2
    if not fits or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given) or not any(given):
        raise ValueError(f"{name} must be two numbers from 0 on, not both 0, got {given!r}")
    return given[0], given[1]
