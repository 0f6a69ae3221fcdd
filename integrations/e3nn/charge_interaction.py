"""Energies of charges, with transfers from features with irreps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.waves.charges import (
    COULOMB_CONSTANT,
    ChargeInteraction,
    ChargeLayer,
    ChargeOutputs,
    PredictedChargeInteraction,
)
from tg_equiattn.tables import Tables

from .layout import Features, check_features

if TYPE_CHECKING:
    from jaxtyping import Int


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
@checks.python_numbers
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
        Largest length of an edge, for transfers.

    avg_num_neighbors : float
        Constant by which transfers are divided, 1 by default.

    dielectric : float
        Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total charge divided
        by the root of this constant.

    coulomb_constant : float
        The constant C, by default in eV Å for charges in units of e.

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
        self,
        charges: Mapping[str, float],
        irreps_in: o3.Irreps | str | None = None,
        *,
        width: float,
        cutoff: float | None = None,
        avg_num_neighbors: float = 1.0,
        dielectric: float = 1.0,
        coulomb_constant: float = COULOMB_CONSTANT,
        error: float = 1e-4,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
    ) -> None:
        irreps = o3.Irreps(irreps_in)
        scalars = irreps.count(o3.Irrep("0e"))
        if irreps.dim and not scalars:
            raise ValueError(f"irreps_in must have scalars 0e, which give transfers, got {irreps}")
        super().__init__(
            charges, width=width, scalars=scalars, cutoff=cutoff, avg_num_neighbors=avg_num_neighbors,
            dielectric=dielectric, coulomb_constant=coulomb_constant, error=error, method=method, max_hkl=max_hkl,
        )  # fmt: skip
        self._set_irreps(irreps)


@compile_mode("unsupported")
@checks.python_numbers
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
        Width s of the kernel, in the unit of positions. Use 0.4 of the message-passing cutoff.

    cutoff : float
        Largest length of an edge, for transfers.

    avg_num_neighbors : float
        Constant by which transfers are divided, 1 by default.

    hidden : int
        Width of the perceptron, 16 by default.

    dielectric : float
        Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total charge divided
        by the root of this constant.

    coulomb_constant : float
        The constant C, by default in eV Å for charges in units of e.

    error : float
        Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by default.

    method : str
        ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in `IrrepsEwaldAttention`.

    max_hkl : sequence of 3 int, optional
        Largest Miller indices along the lattice vectors. If given, cells are not read, which torch.compile needs. The
        default, ``None``, reads cells.

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

    def __init__(
        self,
        names: Sequence[str],
        irreps_in: o3.Irreps | str,
        *,
        width: float,
        cutoff: float,
        avg_num_neighbors: float = 1.0,
        hidden: int = 16,
        dielectric: float = 1.0,
        coulomb_constant: float = COULOMB_CONSTANT,
        error: float = 1e-4,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
    ) -> None:
        irreps = o3.Irreps(irreps_in)
        if not (scalars := irreps.count(o3.Irrep("0e"))):
            raise ValueError(f"irreps_in must have scalars 0e, from which charges are predicted, got {irreps}")
        super().__init__(
            names, width=width, scalars=scalars, cutoff=cutoff, avg_num_neighbors=avg_num_neighbors, hidden=hidden,
            dielectric=dielectric, coulomb_constant=coulomb_constant, error=error, method=method, max_hkl=max_hkl,
        )  # fmt: skip
        self._set_irreps(irreps)


def _scalars(irreps: str) -> Int[Tensor, " columns"]:
    """Columns of the scalars ``0e`` among features."""
    parsed = o3.Irreps(irreps)
    parts = zip(parsed, parsed.slices(), strict=True)
    columns = [torch.arange(part.start, part.stop) for (_, ir), part in parts if ir == o3.Irrep("0e")]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *columns])
