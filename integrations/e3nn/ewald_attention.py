"""Ewald attention on any irreps."""

from __future__ import annotations

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.functional.waves.lattices import cells_of
from tg_equiattn.nn.not_scriptable import NotScriptable
from tg_equiattn.nn.waves import EwaldNetwork, EwaldOptions
from tg_equiattn.nn.waves.spherical_features import Irrep
from tg_equiattn.precision import full_precision
from tg_equiattn.ragged import Ragged
from tg_equiattn.ranks import Shared

from .layout import Features, check_features, describe


@compile_mode("unsupported")
class EwaldAttention(Shared, NotScriptable, torch.nn.Module):
    r"""Attention in space through Gaussians and smeared Coulomb potentials: molecules, slabs, crystals, any size.

    .. math::

        x'_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        v_j \otimes_w s_c^l\, Y_l(\nabla) K_c(x_i - x_j)

    with queries, keys and values linear maps of the features, inner products over all their irreps, and kernels K of
    learned widths s: :math:`e^{-r^2 / 2 s^2}` or :math:`s\, \mathrm{erf}(r / \sqrt 2 s) / r`. The sum includes the
    node itself and, where a graph repeats, all images of all nodes. Nothing that is learned depends on the size of a
    graph or of its cell: the same layer takes molecules, slabs and crystals, in one batch.

    The output is attention alone, without a residual connection, and extensive: see ``avg_num_nodes``. Equivariant to
    rotations, reflections, translations, permutations; smooth in positions and cells, with derivatives of any order: it
    is for energies, forces and stress. By pairs this is exact; by waves of a cell exact but for ``error`` in what they
    approximate; by waves of a box, around a large open graph, to ``error``. Under autocast it is computed and returned
    in float32.

    What to know of potentials: in crystals a uniform background makes every cell neutral (the wave k = 0 is left out),
    in slabs and open graphs there is none. So where attended values do not sum to zero in every volume, potentials of
    ever larger open graphs grow with the square of their size, and do not tend to those of the crystal.

    From Ewald's sums, with linear-time attention (`Frank et al. <https://arxiv.org/abs/2412.08541>`_) and message
    passing in crystals (`Kosmala et al. <https://arxiv.org/abs/2303.04791>`_) by waves; potentials that end, Vico et
    al. 2016.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        any irreps

    width : float
        of the narrowest kernel, in the unit of positions: about half the reach of the messages beside it. Widths are
        learned, each within an octave of its own between this and ``max_width``

    max_width : float, optional
        of the widest kernel; eight times ``width`` by default

    kernels : int or (int, int)
        how many, half Gaussians and half potentials, or how many of each

    heads : int
        of attention; each has queries, keys and widths of its own, and a share of the values

    lmax : int
        the highest l of spherical harmonics

    avg_num_nodes : float
        of nodes that a node attends to, by which sums are divided: the same for all graphs, so that outputs stay
        extensive

    error : float
        what is promised of sums by waves, relative to the largest value of a kernel

    method : {'auto', 'pairs', 'waves', 'mesh'}
        'auto' takes for every graph by itself what is least work; 'mesh' needs the extra ``mesh``

    max_waves : (int, int, int), optional
        bounds of wave numbers along the lattice vectors a, b, c for the narrowest kernel: an integer above
        :math:`|a| k / 2 \pi`, with k the largest wavenumber, which an error names; given, cells are not read, which
        torch.compile needs

    Examples
    --------
    >>> import torch
    >>> attention = EwaldAttention("16x0e + 8x1o + 4x2e", "16x0e + 8x1o", width=1.0)
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> cell = 4 * torch.eye(3).expand(2, 3, 3)
    >>> pbc = torch.tensor([[False, False, False], [True, True, True]])
    >>> attention(torch.randn(12, 60), torch.randn(12, 3), batch, cell=cell, pbc=pbc).shape
    torch.Size([12, 40])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        *,
        width: float,
        max_width: float | None = None,
        kernels: int | tuple[int, int] = 8,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_waves: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        for name, irreps in (("irreps_in", self.irreps_in), ("irreps_out", self.irreps_out)):
            if not irreps.dim:
                raise ValueError(f"{name} must have at least one irrep, got {irreps}")
        options = EwaldOptions(
            width=width, max_width=max_width, kernels=kernels, heads=heads, lmax=lmax, avg_num_nodes=avg_num_nodes,
            error=error, method=method, max_waves=max_waves,
        )  # fmt: skip
        inside, self._reads = _columns(self.irreps_in)
        outside, self._writes = _columns(self.irreps_out)
        self.attention = EwaldNetwork(inside, outside, _coupling, options, lambda irrep: "irreps_out")
        self._features = Features.of(self.irreps_in)

    def why_not_shared(self) -> str | None:
        return self.attention.options.why_not_shared()

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        batch: Tensor | None = None,
        *,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x : `torch.Tensor`
            features of shape ``(nodes, irreps_in.dim)``

        pos : `torch.Tensor`
            positions of shape ``(nodes, 3)``. Give large coordinates in float64, whatever the features are

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        cell : `torch.Tensor`, optional
            lattice vectors as rows, of shape ``(3, 3)``, ``(graphs, 3, 3)`` or ``(3 graphs, 3)``

        pbc : `torch.Tensor`, optional
            along which of them graphs repeat, bool, of shape ``(3,)``, ``(graphs, 3)`` or ``(3 graphs,)``: three, two
            or none; without it along those that are not zero

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
        pos = checks.positions(pos, (x.shape[0], 3), x, "attention depends on them")
        ragged = Ragged.flat(x, batch, batch_size, max_num_nodes, self.ranks)
        cells = cells_of(cell, pbc, ragged.count, x)
        with full_precision(x.device):
            x = x.to(reference.dtype)
            parts = [torch.cat([x[:, place].unflatten(1, (-1, size)) for place in own], 1).mT
                     for size, own in self._reads]  # fmt: skip
            found = self.attention(parts, pos, ragged, cells)
            out = {}
            for part, (size, own) in zip(found, self._writes, strict=True):
                channels = [(place.stop - place.start) // size for place in own]
                for place, piece in zip(own, part.mT.split(channels, 1), strict=True):
                    out[place.start] = piece.flatten(1)
            return torch.cat([out[start] for start in sorted(out)], 1)

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()

    def __repr__(self) -> str:
        return describe(self)


def _columns(irreps: o3.Irreps) -> tuple[list[Irrep], list[tuple[int, list[slice]]]]:
    """Each degree and parity once, its number of components, and the columns that have it."""
    found: dict[tuple[int, int], list[slice]] = {}
    channels: dict[tuple[int, int], int] = {}
    for (mul, ir), place in zip(irreps, irreps.slices(), strict=True):
        if mul:
            found.setdefault((ir.l, ir.p), []).append(place)
            channels[ir.l, ir.p] = channels.get((ir.l, ir.p), 0) + mul
    kinds = sorted(found)
    return [Irrep(*kind, channels[kind]) for kind in kinds], [(2 * kind[0] + 1, found[kind]) for kind in kinds]


def _coupling(first: int, second: int, out: int) -> Tensor:
    return o3.wigner_3j(first, second, out, dtype=torch.float64)
