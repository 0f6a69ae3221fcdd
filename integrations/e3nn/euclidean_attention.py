"""Euclidean fast attention on any irreps."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn.nn.hyena import TokenShell
from tg_equiattn.nn.linear import EuclideanNetwork, EuclideanOptions, Irrep
from tg_equiattn.nn.not_scriptable import NotScriptable
from tg_equiattn.ranks import Shared
from tg_equiattn.sequences import Sequences

from .layout import Features, check_features, describe


@compile_mode("unsupported")
class EuclideanFastAttention(Shared, NotScriptable, torch.nn.Module):
    r"""Equivariant attention of point clouds without an order, in time linear in the number of points.

    Query and key are linear maps of the input, in pairs of channels of one frequency; values have irreps of the input.
    With :math:`r = x_i - x_j`, spherical Bessel functions j and a tensor product with spherical harmonics Y,

    .. math::

        x'_i = \frac{1}{\sqrt d} \sum_j \sum_{c, l} a^{c l}_{ij}\, j_l(\omega_c |r|)\; v_j \otimes_w Y_l(r)

    where :math:`a` is plus or minus :math:`\langle q_i, k_j \rangle_c` for even l and
    :math:`(q^1_i k^2_j - q^2_i k^1_j)_c` for odd l: see :func:`tg_equiattn.functional.euclidean_fast_attention`. Large
    graphs go through plane waves averaged over directions, small ones over all pairs.

    The output is attention alone, without a residual connection. With ``reduce='sum'`` it is extensive, and grows with
    the number of nodes (see ``num_nodes``); with ``'mean'`` it is divided by that. Under autocast it is computed and
    returned in float32. Equivariant to rotations, reflections, translations and permutations, smooth in positions, and
    with derivatives of any order: it is for energies and forces. By pairs this is exact, by directions within ``error``
    between nodes no farther apart than ``max_radius``; a wider graph is warned of, once.

    From the `Euclidean Fast Attention <https://arxiv.org/abs/2412.08541>`_ paper.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        any irreps

    max_radius : float
        the largest distance of two nodes of a graph, in the unit of positions

    max_frequency : float
        phase of the highest frequency at ``max_radius``, in radians. More resolves shorter distances, and takes more
        directions: 86 for pi, 110 for 2 pi, 302 for 4 pi

    qk_channels : int
        of a head's query and key, of each irrep, even; time is proportional to it

    qk_lmax : int
        the highest l of queries and keys, contracted in inner products

    lmax : int
        the highest l of spherical harmonics

    heads : int
        of attention; each has queries and keys of its own, and a share of the values

    learn_frequencies : bool
        whether each head learns its own, within 0 and the highest; otherwise they are spaced evenly

    reduce : {'sum', 'mean'}
        of what comes from a graph's nodes

    num_nodes : float, optional
        of a typical graph: with 'sum', outputs are divided by it, the same for all graphs: they stay extensive, and
        a new layer's have one scale whatever the number

    method : {'auto', 'directions', 'pairs'}
        'auto' takes pairs for graphs of fewer than 64 nodes (where ``max_num_nodes`` is given, that decides for all)

    error : float
        what is promised of the kernels by directions, relative to the largest value of each

    backend : {'auto', 'torch', 'plain'}
        'plain' for sums with all features in memory; the others for streamed operators

    max_wavenumber : float, optional
        of graphs with a ``cell``, in radians per unit of length: they are attended to with all their images, through
        the waves that repeat with the cell, weighed by learned functions of the wavenumber that end there smoothly;
        see :class:`tg_equiattn.nn.EuclideanFastAttention`

    process_group : torch.distributed.ProcessGroup, optional
        whose processes share the nodes of every graph, see :doc:`/shared_graphs`; ``max_num_nodes`` is not used then

    Examples
    --------
    >>> import torch
    >>> attention = EuclideanFastAttention("16x0e + 8x1o + 4x2e", "16x0e + 8x1o", max_radius=3.0)
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> attention(torch.randn(12, 60), torch.randn(12, 3), batch).shape
    torch.Size([12, 40])
    """

    rows_in: Tensor
    columns_out: Tensor

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        *,
        max_radius: float,
        max_frequency: float = math.pi,
        qk_channels: int = 16,
        qk_lmax: int = 0,
        lmax: int = 1,
        heads: int = 1,
        learn_frequencies: bool = False,
        reduce: str = "sum",
        num_nodes: float | None = None,
        method: str = "auto",
        error: float = 1e-6,
        backend: str = "auto",
        max_wavenumber: float | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        for name, irreps in (("irreps_in", self.irreps_in), ("irreps_out", self.irreps_out)):
            if not irreps.dim:
                raise ValueError(f"{name} must have at least one irrep, got {irreps}")
        options = EuclideanOptions(
            max_radius=max_radius, max_frequency=max_frequency, heads=heads, qk_channels=qk_channels, qk_lmax=qk_lmax,
            lmax=lmax, learn_frequencies=learn_frequencies, reduce=reduce, num_nodes=num_nodes,
            method=method, error=error, backend=backend, max_wavenumber=max_wavenumber,
        )  # fmt: skip
        (inside, rows), (outside, columns) = _by_irrep(self.irreps_in), _by_irrep(self.irreps_out)
        self.attention = EuclideanNetwork(inside, outside, _coupling, options, lambda irrep: "irreps_out")
        self.process_group = process_group
        self.shell = TokenShell("input", invariants=(), needs_positions=True)
        self._features = Features.of(self.irreps_in)
        self.register_buffer("rows_in", rows, persistent=False)
        self.register_buffer("columns_out", columns.argsort(), persistent=False)

    def why_not_shared(self) -> str | None:
        return self.attention.options.why_not_shared()

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        batch: Tensor | None = None,
        *,
        cell: Tensor | None = None,
        wave_numbers: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x : `torch.Tensor`
            features of shape ``(nodes, irreps_in.dim)``

        pos : `torch.Tensor`
            positions of shape ``(nodes, 3)``, relative to the mean of their graph. Give large coordinates in float64,
            whatever the features are

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        cell : `torch.Tensor`, optional
            lattice vectors as rows, of shape ``(3, 3)`` or ``(graphs, 3, 3)``, zeros for graphs that do not repeat;
            needs ``max_wavenumber``

        wave_numbers : `torch.Tensor`, optional
            what :func:`tg_equiattn.functional.wave_numbers` finds for ``cell``; given, no values are read, which
            torch.compile needs

        batch_size, max_num_nodes : int, optional
            number of graphs, and a bound of their sizes; read from ``batch`` where not given, which torch.compile
            cannot, and which waits for the device on CUDA

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        reference = self.attention.reference_parameter
        check_features("x", x, self._features, reference)
        sequences = Sequences.from_batch(x, batch, batch_size, max_num_nodes, self.ranks)
        rows = x.T.index_select(0, self.rows_in)
        crystals = self.attention.crystals(cell, wave_numbers, sequences, x)
        network = functools.partial(self.attention, crystals=crystals)
        out = self.shell.run(network, rows, pos, sequences, reference=reference)
        return out.index_select(0, self.columns_out).T

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()

    def __repr__(self) -> str:
        return describe(self)


def _by_irrep(irreps: o3.Irreps) -> tuple[list[Irrep], Tensor]:
    """Each degree and parity once, and for each row the column it is: by irrep, then component, then channel."""
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for (mul, ir), part in zip(irreps, irreps.slices(), strict=True):
        if mul:
            columns.setdefault((ir.l, ir.p), []).append(torch.arange(part.start, part.stop).view(mul, ir.dim))
    merged = {kind: torch.cat(columns[kind]) for kind in sorted(columns)}
    found = [Irrep(degree, parity, len(places)) for (degree, parity), places in merged.items()]
    return found, torch.cat([places.T.flatten() for places in merged.values()])


def _coupling(first: int, second: int, out: int) -> Tensor:
    return o3.wigner_3j(first, second, out, dtype=torch.float64)
