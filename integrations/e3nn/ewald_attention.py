"""Ewald attention on any irreps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.modules import NotScriptable, reset_children
from tg_equiattn.nn.waves.ewald_network import EwaldNetwork
from tg_equiattn.nn.waves.options import EwaldOptions
from tg_equiattn.nn.waves.spherical_features import Irrep
from tg_equiattn.node_batch import NodeBatch
from tg_equiattn.ranks import Shared
from tg_equiattn.tables import Tables

from .layout import Features, check_features, describe


@compile_mode("unsupported")
@checks.python_numbers
class IrrepsEwaldAttention(Shared, NotScriptable, torch.nn.Module):
    r"""Global attention in molecules, slabs and crystals of any size, through Gaussian and Coulomb kernels.

    :class:`tg_equiattn.nn.EwaldAttention`, where the formula, its accuracy, errors and sources are, on any irreps:
    queries, keys and values are linear maps of the features, inner products are over all their irreps, and products of
    values with harmonics are Clebsch-Gordan products.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        any irreps

    width : float
        width of the narrowest kernel, in the unit of positions; use about half of the message-passing cutoff, as
        messages already model shorter distances

    max_width : float, optional
        width of the widest kernel, by default 8 ``width``; each width is learned within an octave of its own

    num_gaussians : int
        number of Gaussian kernels

    num_coulomb : int
        number of Coulomb kernels, which decay as 1 / r

    num_oscillating : int
        number of oscillating Gaussians, for properties that alternate with the distance; their wavelengths are learned
        and reach down to 4/3 ``width``

    heads : int
        number of heads, each with its own queries, keys and widths and a share of the values

    lmax : int
        highest l of the spherical harmonics

    avg_num_nodes : float
        constant by which sums are divided: the number of nodes a node attends to on average

    error : float
        promised error of sums over reciprocal vectors, relative to the largest value of a kernel

    method : str
        ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, which takes for every graph what needs least time

    max_hkl : sequence of 3 int, optional
        largest Miller indices of the kernel with the largest cutoff; if given, cells are not read, which torch.compile
        needs

    Examples
    --------
    >>> import torch
    >>> attention = IrrepsEwaldAttention("16x0e + 8x1o + 4x2e", "16x0e + 8x1o", width=1.0)
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
        num_gaussians: int = 4,
        num_coulomb: int = 4,
        num_oscillating: int = 0,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        options = EwaldOptions(
            width, max_width, num_gaussians, num_coulomb, num_oscillating, heads, lmax, avg_num_nodes, error, method,
            max_hkl,
        )  # fmt: skip
        inside, outside = _rows("irreps_in", self.irreps_in), _rows("irreps_out", self.irreps_out)
        self.attention = EwaldNetwork(inside, outside, _coupling, options, "irreps_out")
        self.columns_in = Tables(functools.partial(_columns, str(self.irreps_in)))
        self.columns_out = Tables(functools.partial(_places, str(self.irreps_out)))
        self._features = Features.of(self.irreps_in)

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
            positions of shape ``(nodes, 3)``; give large coordinates in float64, whatever the features are

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        cell : `torch.Tensor`, optional
            lattice vectors as rows, of shape ``(3, 3)``, ``(graphs, 3, 3)`` or ``(3 graphs, 3)``

        pbc : `torch.Tensor`, optional
            bool of shape ``(3,)``, ``(graphs, 3)`` or ``(3 graphs,)``, the lattice vectors along which graphs repeat:
            three, two or none; by default all that are not zero

        batch_size, max_num_nodes : int, optional
            number of graphs, and a bound of their sizes; read from ``batch`` if not given, which torch.compile cannot,
            and which waits for the device on CUDA

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        check_features("x", x, self._features, self.attention.octaves)
        pos = checks.positions(pos, (x.shape[0], 3), x, "attention depends on them")
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes, self.ranks)
        x = self.attention(x.index_select(1, self.columns_in(x.device)), pos, node_batch, cell, pbc)
        return x.index_select(1, self.columns_out(x.device))

    def why_not_shared(self) -> str | None:
        return self.attention.options.why_not_shared

    def reset_parameters(self) -> None:
        reset_children(self)

    def __repr__(self) -> str:
        return describe(self)


def _rows(name: str, irreps: o3.Irreps) -> list[Irrep]:
    """Each degree and parity that has channels, once, in rising order."""
    kinds = sorted({(ir.l, ir.p) for mul, ir in irreps if mul})
    if not kinds:
        raise ValueError(f"{name} must have at least one irrep, got {irreps}")
    return [Irrep(*kind, irreps.count(o3.Irrep(*kind))) for kind in kinds]


def _columns(irreps: str) -> Tensor:
    """The column of a feature for each number of a row."""
    parsed, found = o3.Irreps(irreps), []
    parts = list(zip(parsed, parsed.slices(), strict=True))
    for own in _rows("irreps", parsed):
        same = [(mul, part) for (mul, ir), part in parts if (ir.l, ir.p) == own[:2]]
        columns = torch.cat([torch.arange(part.start, part.stop).view(mul, own.size) for mul, part in same])
        found.append(columns.T.flatten())
    return torch.cat(found)


def _places(irreps: str) -> Tensor:
    """The inverse of :func:`_columns`."""
    return _columns(irreps).argsort()


def _coupling(first: int, second: int, out: int) -> Tensor:
    return o3.wigner_3j(first, second, out, dtype=torch.float64)
