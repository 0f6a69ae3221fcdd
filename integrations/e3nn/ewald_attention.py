"""Ewald attention on any irreps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.ewald.charges import (
    Charge,
    ChargeInteraction,
    ChargeLayer,
    ChargeOutputs,
    PredictedChargeInteraction,
)
from tg_equiattn.ewald.ewald_layer import EwaldLayer, Irrep
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.shapes import Float, Int
from tg_equiattn.torch_state import Tables

from .layout import Features, IrrepsLike, check_features, describe


def _coupling(first: int, second: int, out: int) -> Float[Tensor, "2*first+1 2*second+1 2*out+1"]:
    return o3.wigner_3j(first, second, out, dtype=torch.float64)


@compile_mode("unsupported")
@checks.arguments_of(EwaldLayer)
class IrrepsEwaldAttention(EwaldLayer):
    r"""Global attention in molecules, slabs and crystals of any size, through Gaussian and Coulomb kernels.

    .. math::

        \mathrm{out}_i = \frac{1}{\bar N} \sum_j \sum_{c, l} g_{c l}\, \langle q_i, k_j \rangle_c\;
        W \big[ v_j \otimes s_c^l\, Y_l(\nabla) K_c(x_i - x_j) \big]

    This is :class:`tg_equiattn.nn.EwaldAttention`, which describes accuracy, symmetries and sources, on any irreps.
    Queries, keys and values are linear maps of the features, inner products are over all their irreps, and products of
    values with solid harmonics Y are Clebsch-Gordan products. K are kernels of learned widths s.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        Irreps of the input.

    irreps_out : `e3nn.o3.Irreps`
        Irreps of the output. Products of the input with harmonics up to ``lmax`` have to reach each of them.

    width : float
        Width of the narrowest kernel, in the unit of positions. Use about half of the message-passing cutoff: messages
        already model shorter distances.

    max_width : float, optional
        Width of the widest kernel. The default, ``None``, means 8 ``width``. It is at least twice ``width``. Each width
        is learned within an octave of its own between the two.

    num_gaussians : int
        Number of Gaussian kernels, 4 by default.

    num_coulomb : int
        Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.

    kernels : torch.nn.Module, optional
        Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
        ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains. The layer
        keeps a copy. The default is ``None``.

    heads : int
        Number of heads, 1 by default, each with its own queries and keys and a share of the values. They share kernels.

    lmax : int
        Highest degree of the solid harmonics, 1 by default.

    output_scale : float
        Constant by which sums are divided, 1 by default, the same for all graphs. Use the size of outputs that a new
        layer has with 1: terms have different signs and sizes, so it is not the number of nodes.

    error : float
        Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by default. Use
        1e-2 to train faster.

    method : str
        ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over reciprocal
        vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra ``nufft``. ``"auto"``,
        the default, chooses for every graph: direct sums if it is open, and reciprocal sums if it repeats. In a wide
        cell with few nodes, parts of kernels that decay fast are summed over pairs and their nearest images. From some
        thousand nodes on, non-uniform transforms are used where they are installed and faster.

    max_hkl : sequence of 3 int, optional
        Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. If given, cells
        are not read, which torch.compile needs. The default, ``None``, reads them.

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

    coupling = staticmethod(_coupling)

    def __init__(self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, **settings: Any) -> None:
        irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        super().__init__(_rows(irreps_in), _rows(irreps_out), "irreps_out", **settings)
        self.irreps_in, self.irreps_out = irreps_in, irreps_out
        self.columns_in = Tables(functools.partial(_columns, str(irreps_in)))
        self.columns_out = Tables(functools.partial(_columns, str(irreps_out), inverse=True))
        self._features = Features.of(irreps_in)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"irreps_in": str(self.irreps_in), "irreps_out": str(self.irreps_out)}

    def forward(
        self, x: Tensor, pos: Tensor, batch: Tensor | None = None, *, cell: Tensor | None = None,
        pbc: Tensor | None = None, batch_size: int | None = None, max_num_nodes: int | None = None,
    ) -> Tensor:  # fmt: skip
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

        batch_size : int, optional
            number of graphs; read from ``batch`` if not given, which torch.compile cannot, and for which CUDA waits

        max_num_nodes : int, optional
            bound of the number of nodes of a graph; read from ``batch`` if not given

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        return self.evaluate(x, pos, batch, cell, pbc, batch_size, max_num_nodes)

    def evaluate(
        self, x: Tensor, pos: Tensor, batch: Tensor | None, cell: Tensor | None = None, pbc: Tensor | None = None,
        batch_size: int | None = None, max_num_nodes: int | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        """:meth:`forward`, with more arguments for :meth:`attend`."""
        check_features("x", x, self._features, self.octaves)
        pos = checks.positions(pos, (x.shape[0], 3), x, "attention depends on them")
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes)
        x = self.attend(x.index_select(1, self.columns_in(x.device)), pos, node_batch, cell, pbc, **more)
        return x.index_select(1, self.columns_out(x.device))

    def __repr__(self) -> str:
        return describe(self)


def _rows(irreps: o3.Irreps) -> list[Irrep]:
    """The irreps that have channels, each degree and parity once, in rising order."""
    kinds = sorted({(ir.l, ir.p) for mul, ir in irreps if mul})
    return [Irrep(*kind, irreps.count(o3.Irrep(*kind))) for kind in kinds]


def _columns(irreps: str, inverse: bool = False) -> Int[Tensor, " columns"]:
    """The column in features for each column of rows (of `EwaldLayer`), or the inverse permutation."""
    parsed, parts = o3.Irreps(irreps), []
    each = list(zip(parsed, parsed.slices(), strict=True))
    for row in _rows(parsed):
        same = [(mul, where) for (mul, ir), where in each if (ir.l, ir.p) == row[:2]]
        columns = torch.cat([torch.arange(where.start, where.stop).view(mul, row.size) for mul, where in same])
        parts.append(columns.T.flatten())
    columns = torch.cat(parts)
    return columns.argsort() if inverse else columns


class _ReadsScalars(ChargeLayer):
    """A layer of charges that reads the scalars ``0e`` of features with irreps."""

    irreps_in: o3.Irreps

    def _set_irreps(self, irreps: o3.Irreps) -> None:
        self.irreps_in, self._features = irreps, Features.of(irreps)
        self.columns = Tables(functools.partial(_scalars, str(irreps)))

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"irreps_in": str(self.irreps_in)}

    def forward(
        self, elements: Tensor, pos: Tensor, batch: Tensor | None = None, *, features: Tensor | None = None, **more: Any
    ) -> ChargeOutputs:
        """Evaluate: :meth:`tg_equiattn.nn.ChargeInteraction.forward`, with features of shape
        ``(nodes, irreps_in.dim)``."""
        if features is not None:
            features = self.scalars_of(features)
        return super().forward(elements, pos, batch, features=features, **more)

    def scalars_of(self, features: Tensor) -> Tensor:
        """The scalars that the layer reads, among features of shape ``(nodes, irreps_in.dim)``."""
        check_features("features", features, self._features, self.offsets)
        return features.index_select(1, self.columns(features.device))


@compile_mode("unsupported")
@checks.arguments_of(ChargeInteraction, "scalars")
class IrrepsChargeInteraction(_ReadsScalars, ChargeInteraction):
    r"""Energies of charges of elements, dipoles and Born effective charges, in molecules, slabs and crystals.

    .. math:: E = \frac{C}{2} \sum_{ij} S_i S_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}, \qquad
        S_i = \lambda q_{z_i} + \sum_j t_{ji}

    This is :class:`tg_equiattn.nn.ChargeInteraction`, which describes the formula, with transfers t from the scalars
    ``0e`` of features with irreps. Energies and charges are scalars ``0e``, dipoles are vectors ``1o``, and Born
    effective charges are matrices of two vectors, in x, y, z order.

    Parameters
    ----------
    charges : dict of str to float
        Charge of each element by its name. The order of the names is that of the numbers in ``elements``. Charges that
        give the right forces in a crystal are Born effective charges divided by the root of ``dielectric``. NaN means
        that a charge is missing: graphs with this element are refused.

    irreps_in : `e3nn.o3.Irreps`, optional
        Irreps of features, of which the scalars ``0e`` give transfers. Without irreps, the default, charges are held.

    width : float
        Width s of the kernel, in the unit of positions. Use 0.4 of the message-passing cutoff, so that the kernel does
        not compete with messages.

    cutoff : float, optional
        Largest length of an edge, for transfers. It is needed with ``irreps_in``.

    avg_num_neighbors : float
        Constant by which transfers are divided, 1 by default.

    dielectric : float
        Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total charge divided
        by the root of this constant.

    error : float
        Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by default.

    method : str
        ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in `IrrepsEwaldAttention`.

    max_hkl : sequence of 3 int, optional
        Largest Miller indices along the lattice vectors. If given, cells are not read, which torch.compile needs. The
        default, ``None``, reads them.

    Examples
    --------
    >>> import torch
    >>> salt = IrrepsChargeInteraction({"Na": 0.68, "Cl": -0.68}, "8x0e + 4x1o", width=2.0, cutoff=5.0)
    >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.8]])
    >>> edge_index = torch.tensor([[0, 1], [1, 0]])
    >>> edge_vectors = pos[edge_index[1]] - pos[edge_index[0]]
    >>> out = salt(torch.tensor([0, 1]), pos, features=torch.randn(2, 20), edge_index=edge_index,
    ...            edge_vectors=edge_vectors)
    >>> out.energies.shape, out.dipole.shape
    (torch.Size([2]), torch.Size([1, 3]))
    """

    def __init__(
        self, charges: Mapping[str, Charge], irreps_in: IrrepsLike | None = None, **settings: Any
    ) -> None:  # fmt: skip
        irreps = o3.Irreps(irreps_in)
        scalars = irreps.count(o3.Irrep("0e"))
        if irreps.dim and not scalars:
            raise ValueError(f"irreps_in must have scalars 0e, which give transfers, got {irreps}")
        super().__init__(charges, scalars=scalars, **settings)
        self._set_irreps(irreps)


@compile_mode("unsupported")
@checks.arguments_of(PredictedChargeInteraction, "scalars")
class IrrepsPredictedChargeInteraction(_ReadsScalars, PredictedChargeInteraction):
    r"""Energies of charges that are predicted from features and sum to the total charge of each graph.

    .. math:: E = \frac{C}{2} \sum_{ij} S_i S_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}, \qquad
        S_i = q_i + \frac{w_i}{\sum_j w_j} \Big( \frac{Q}{\sqrt\epsilon} - \sum_j q_j \Big)

    This is :class:`tg_equiattn.nn.PredictedChargeInteraction`, which describes the formula, with charges q and weights
    w of the scalars ``0e`` of features with irreps.

    Parameters
    ----------
    names : sequence of str
        Names of the elements, in the order of the numbers in ``elements``.

    irreps_in : `e3nn.o3.Irreps`
        Irreps of features, of which the scalars ``0e`` are read.

    width : float
        Width s of the kernel, in the unit of positions. Use 0.6 of the message-passing cutoff.

    cutoff : float
        Largest length of an edge, for transfers and for the energy that is taken off. Edges must be all pairs up to
        this length.

    avg_num_neighbors : float
        Constant by which transfers are divided, 1 by default.

    dielectric : float
        Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total charge divided
        by the root of this constant.

    error : float
        Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by default.

    method : str
        ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in `IrrepsEwaldAttention`.

    max_hkl : sequence of 3 int, optional
        Largest Miller indices along the lattice vectors. If given, cells are not read, which torch.compile needs. The
        default, ``None``, reads cells.

    exclude_near : bool
        True, the default, takes the energy between near nodes off again, which messages can learn. False keeps it.

    Examples
    --------
    >>> import torch
    >>> layer = IrrepsPredictedChargeInteraction(["H", "O"], "8x0e + 4x1o", width=2.0, cutoff=5.0)
    >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> edge_index = torch.tensor([[0, 1], [1, 0]])
    >>> edges = {"edge_index": edge_index, "edge_vectors": pos[edge_index[1]] - pos[edge_index[0]]}
    >>> features, charge = torch.randn(2, 20), torch.tensor([-1.0])
    >>> out = layer(torch.tensor([1, 0]), pos, features=features, total_charge=charge, **edges)
    >>> round(float(out.charges.detach().sum()), 5)
    -1.0
    """

    def __init__(self, names: Sequence[str], irreps_in: IrrepsLike, **settings: Any) -> None:
        irreps = o3.Irreps(irreps_in)
        if not (scalars := irreps.count(o3.Irrep("0e"))):
            raise ValueError(f"irreps_in must have scalars 0e, from which charges are predicted, got {irreps}")
        super().__init__(names, scalars=scalars, **settings)
        self._set_irreps(irreps)


def _scalars(irreps: str) -> Int[Tensor, " columns"]:
    """Columns of the scalars ``0e`` among features."""
    parsed = o3.Irreps(irreps)
    parts = zip(parsed, parsed.slices(), strict=True)
    columns = [torch.arange(part.start, part.stop) for (_, ir), part in parts if ir == o3.Irrep("0e")]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *columns])
