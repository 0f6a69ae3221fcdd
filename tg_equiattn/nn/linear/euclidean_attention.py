"""Euclidean fast attention of scalars and vectors."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

from torch import Tensor

from ...functional.linear.crystals import Crystals
from ...ranks import Shared
from ...sequences import Sequences
from ..hyena.graded_network import GradedNetwork
from ..hyena.grades import Grades, grades_of_channels
from ..hyena.local_context import Edges
from ..hyena.scalar_vector_module import ScalarVectorModule
from ..hyena.shell import Network, TokenShell
from .euclidean_network import EuclideanNetwork, EuclideanOptions
from .spherical_features import Irrep, gaunt_coupling


class _EuclideanOperator(GradedNetwork):
    """Of scalars and polar vectors."""

    def __init__(self, inside: Grades, outside: Grades, options: EuclideanOptions) -> None:
        super().__init__(inside, outside)
        given, wanted = ((Irrep(0, 1, x.scalars), Irrep(1, -1, x.vectors)) for x in (inside, outside))
        self.attention = EuclideanNetwork(given, wanted, gaunt_coupling, options, _name)

    @property
    def reference_parameter(self) -> Tensor:
        return self.attention.reference_parameter

    def shell(self, order: str, out_name: str) -> TokenShell:
        return TokenShell(order, invariants=(), needs_positions=True)

    def forward(
        self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None, crystals: Crystals | None = None
    ) -> Tensor:
        return self.attention(x, pos, sequences, crystals=crystals)


def _name(irrep: Irrep) -> str:
    return ("out_scalars", "out_vectors")[irrep.degree]


class EuclideanFastAttention(Shared, ScalarVectorModule):
    r"""Equivariant attention of point clouds without an order, in time linear in the number of points.

    Query and key are linear maps of the scalars, in pairs of channels of one frequency; values of scalars and vectors.
    With :math:`r = x_i - x_j`, spherical Bessel functions j and harmonics Y, and a linear map W of their products with
    values to scalars and vectors,

    .. math:: \mathrm{out}_i = \frac{1}{\sqrt d} \sum_j \sum_{c, l} a^{c l}_{ij}\, j_l(\omega_c |r|)\;
        W \big[ v_j \otimes Y_l(r) \big]

    with :math:`a` plus or minus :math:`\langle q_i, k_j \rangle_c` for even l and
    :math:`(q^1_i k^2_j - q^2_i k^1_j)_c` for odd l; see :func:`tg_equiattn.functional.euclidean_fast_attention`. Large
    clouds go through plane waves averaged over directions, small ones over all pairs.

    The output is attention alone, without a residual connection. With ``reduce="sum"`` it is extensive, and grows with
    the number of points of a cloud (see ``num_nodes``); with ``"mean"`` it is divided by that. Under autocast it is
    computed and returned in float32. Equivariant to rotations, reflections, translations and permutations, smooth in
    positions, and with derivatives of any order: it is for energies and forces. By pairs this is exact, by directions
    within ``error`` between points no farther apart than ``max_radius``; a wider cloud is warned of, once.

    Args:
        scalar_channels, vector_channels: of the input.
        max_radius: the largest distance of two points of a cloud, in the unit of positions.
        max_frequency: phase of the highest frequency at ``max_radius``, in radians; frequencies are spaced evenly from
            0. More resolves shorter distances, and takes more directions: 86 for pi, 110 for 2 pi, 302 for 4 pi.
        out_scalars, out_vectors: of the output; ``None`` means those of the input.
        heads: of attention. Each has queries and keys of its own, and a share of the values.
        qk_channels: of a head's query and key, even; time is proportional to it.
        qk_lmax: 1 lets vectors have queries and keys, too, contracted in their inner product.
        lmax: the highest degree of harmonics. 0 lets scalars and vectors be found by distance alone.
        learn_frequencies: whether each head learns its own, within 0 and the highest.
        reduce: ``"sum"`` or ``"mean"``.
        num_nodes: of a typical cloud: with ``"sum"``, outputs are divided by it, the same for all clouds: they stay
            extensive, and a new layer's have one scale whatever the number. ``None`` leaves sums as they are.
        method: ``"directions"``, ``"pairs"``, or ``"auto"``: pairs for clouds of fewer than 64 points (counted with
            padding where there is any).
        error: what is promised of the kernels by directions, relative to the largest value of each.
        backend: ``"plain"`` for sums with all features in memory; ``"auto"`` and ``"torch"`` for streamed operators.
        max_wavenumber: of the waves that stand in for directions in clouds with a ``cell``, in radians per unit of
            length; ``None`` for clouds without one. See below.
        process_group: of :mod:`torch.distributed`, among whose processes the points of every cloud are shared (see
            :doc:`/shared_graphs`), flat; ``None`` where all are here.

    A cloud with a cell A, lattice vectors in rows, is attended to with all its images, through the waves that repeat
    with it, :math:`k = 2\pi A^{-1} n`, n integers:

    .. math:: \mathrm{out}_i = \frac{1}{\sqrt d} \frac{6 \pi^2}{k_{max}^3 V} \sum_{0 < |k| < k_{max}} \sum_c f_c(|k|)\;
        W \Big[ \sum_j a^c_{ij}(k \cdot r)\; v_j \otimes Y(k / |k|) \Big]

    with V the volume, :math:`a(\theta)` the product of query and key, of which one is turned by that angle, and f
    learned functions that reach zero at ``max_wavenumber`` with all their derivatives. Equivariant to motions of
    positions and cell together, exactly; invariant under wrapping, under the choice of a cell, under repetition of it;
    smooth in positions and cell, so that stress is the derivative by strain. With ``"mean"`` the number of points takes
    the place of V. Time and memory of a table grow with V, as the number of waves does.

    Shapes:
        ``(B, N, S)``, ``(B, N, V, 3)`` and positions ``(B, N, 3)``, or flat ``(T, S)``, ``(T, V, 3)`` and ``(T, 3)``
        with ``batch``, to scalars and vectors again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: Frank, Chmiela, Müller and Unke, Euclidean Fast Attention (arXiv 2412.08541); waves of crystals as in
    Ewald-based message passing (Kosmala et al., arXiv 2303.04791).

    Example:
        >>> import torch
        >>> attention = EuclideanFastAttention(8, 4, max_radius=2.0)
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
        max_radius: float,
        max_frequency: float = math.pi,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        heads: int = 1,
        qk_channels: int = 16,
        qk_lmax: int = 0,
        lmax: int = 1,
        learn_frequencies: bool = False,
        reduce: str = "sum",
        num_nodes: float | None = None,
        method: str = "auto",
        error: float = 1e-6,
        backend: str = "auto",
        max_wavenumber: float | None = None,
        process_group: Any = None,
    ) -> None:
        inside, outside, _ = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (None, None)
        )
        options = EuclideanOptions(
            max_radius=max_radius, max_frequency=max_frequency, heads=heads, qk_channels=qk_channels, qk_lmax=qk_lmax,
            lmax=lmax, learn_frequencies=learn_frequencies, reduce=reduce, num_nodes=num_nodes,
            method=method, error=error, backend=backend, max_wavenumber=max_wavenumber,
        )  # fmt: skip
        super().__init__(_EuclideanOperator(inside, outside, options))
        self.process_group = process_group

    def why_not_shared(self) -> str | None:
        return cast(_EuclideanOperator, self.module).attention.options.why_not_shared()

    def forward(  # type: ignore[override]
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        pos: Tensor,
        cell: Tensor | None = None,
        wave_numbers: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scalars and vectors of the points.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` where there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` where there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each cloud; what lies beyond is never read, and zero.
            pos: ``(B, N, 3)`` or ``(T, 3)``, relative to the mean of their cloud. Give large coordinates in float64,
                whatever the features are.
            cell: lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``, zeros for clouds that do not repeat; needs
                ``max_wavenumber``.
            wave_numbers: what :func:`tg_equiattn.functional.wave_numbers` finds for ``cell``; given, no values are
                read, which torch.compile needs.
            batch: sorted int64 ``(T,)``, the cloud of each flat point; ``None`` means one.
            batch_size, max_num_nodes: number of flat clouds and a bound of their sizes, read from ``batch`` where not
                given, which torch.compile cannot.
        """
        operator: Any = self.module

        def network(sequences: Sequences, like: Tensor) -> Network:
            return functools.partial(
                operator, crystals=operator.attention.crystals(cell, wave_numbers, sequences, like)
            )

        return self._run(
            network, scalars, vectors, lengths, batch=batch, pos=pos, batch_size=batch_size,
            max_num_nodes=max_num_nodes, ranks=self.ranks,
        )  # fmt: skip
