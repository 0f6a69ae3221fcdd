"""Energies of charges that interact by a smeared Coulomb kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks
from ...modes import full_precision
from ...node_batch import NodeBatch
from .cells import cells_of
from .ewald_attention import check_method, ewald_attention_impl
from .kernels import Coulomb, Interaction, Product

if TYPE_CHECKING:
    from jaxtyping import Float


def charge_energies(
    charges: Tensor,
    pos: Tensor,
    batch: Tensor | None = None,
    *,
    width: float,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    method: str = "auto",
    error: float = 1e-4,
    max_hkl: Sequence[int] | None = None,
    batch_size: int | None = None,
    max_num_nodes: int | None = None,
) -> Tensor:
    r"""Energies of nodes with charges q, in units of charge² / length. The energy of a graph is their sum.

    .. math:: E_i = \frac{q_i}{2} \sum_j q_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}

    The sum includes the node itself, with :math:`q_i^2 / \sqrt{2 \pi} s`, and, in graphs that repeat, all images of
    each node. So the energy of a graph is a sum of squares over waves and never negative. In crystals k = 0 is left
    out: a uniform background makes every cell neutral, and the surface term of a dipole is left out too. The energy of
    a charged cell therefore depends on its volume by a term that decays as 1 / L with its side L.

    Args:
        charges: Charges ``(T,)``.
        pos: Positions ``(T, 3)``. Give large coordinates in float64, whatever the dtype of the charges is.
        batch: Sorted int64 ``(T,)``, the graph of each node. ``None`` means one graph.
        width: Width s of the kernel, in the unit of positions. At distances beyond 3 s it is 1 / r.
        cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``, in the unit of positions.
        pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat. ``None`` means all that are not
            zero.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :func:`ewald_attention`.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel.
        max_hkl: Largest Miller indices along the three lattice vectors. If given, cells are not read, which
            torch.compile needs.
        batch_size: Number of graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
        max_num_nodes: Bound of the number of nodes of a graph. ``None`` reads it from ``batch``.

    Returns:
        ``(T,)``, in float32 for charges in half precision.

    Raises:
        ValueError: as :func:`ewald_attention`.

    Source: Ewald 1921.

    Example:
        >>> import torch
        >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 100.0]])
        >>> own = 2 / (2 * torch.pi) ** 0.5  # of the two nodes themselves
        >>> charge_energies(torch.tensor([1.0, -1.0]), pos, width=1.0).sum() - own
        tensor(-0.0100)
    """
    check_method(method, error)
    checks.positive_number(width=width)
    if not isinstance(charges, Tensor) or charges.ndim != 1 or not charges.is_floating_point():
        raise ValueError(f"charges must be floating point of shape (nodes,), got {checks.described(charges)}")
    pos = checks.positions(pos, (charges.shape[0], 3), charges, "energies depend on them")
    node_batch = NodeBatch.flat(charges, batch, batch_size, max_num_nodes)
    cells = cells_of(cell, pbc, node_batch.count, charges)
    with full_precision(charges.device):
        charges = charges.to(torch.promote_types(charges.dtype, torch.float32))
        unit = charges.new_ones(1, 1)
        kernel = Coulomb(width * unit, 0.5 / width * unit[..., None], bounds=((float(width), float(width)),))
        interaction, source = Interaction((kernel,), Product(_values, ()), error, max_hkl), charges[:, None, None, None]
        potentials = ewald_attention_impl(
            pos, torch.ones_like(source), (source,), interaction, node_batch, cells, method
        )
        return charges * potentials[:, 0, 0]


def _values(features: Tensor, harmonics: Tensor | None, degree: int) -> Float[Tensor, "*shape channels"]:
    """Products with harmonics of degree 0, which are 1."""
    return features.squeeze(-2) if harmonics is None else features
