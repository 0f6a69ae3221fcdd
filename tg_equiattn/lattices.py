"""Lattice vectors of graphs that repeat, as users give them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks

_FLAT = 1e-6  # the smallest volume of a cell, as a share of that of a box with edges as long


def read_lattice(cell: Tensor, pbc: Tensor | None, graphs: int, like: Tensor, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Lattice vectors as rows, (graphs, dim, dim) in float64, zero where graphs do not repeat, and along which they do,
    bool (graphs, dim); ValueError for other shapes, kinds and values.

    Cells are ``(dim, dim)``, one for all graphs, ``(graphs, dim, dim)`` or, as PyG batches them, ``(dim graphs, dim)``,
    pbc bool ``(dim,)``, ``(graphs, dim)`` or ``(dim graphs,)``; ``None`` means vectors that are not zero.
    """
    shapes = ((dim, dim), (1, dim, dim), (graphs, dim, dim), (dim * graphs, dim))
    if not isinstance(cell, Tensor) or tuple(cell.shape) not in shapes:
        came = str(tuple(cell.shape)) if isinstance(cell, Tensor) else type(cell).__name__
        raise ValueError(f"cell must be ({dim}, {dim}) or one a graph, ({graphs}, {dim}, {dim}), got {came}")
    if cell.device != like.device or not cell.is_floating_point():
        raise ValueError(f"cell must be floating point on {like.device} as x is, got {cell.dtype} on {cell.device}")
    vectors = cell.double().reshape(-1, dim, dim).expand(graphs, dim, dim)
    periodic = (vectors != 0).any(2)
    if pbc is not None:
        fits = isinstance(pbc, Tensor) and pbc.dtype == torch.bool and pbc.device == like.device
        if not fits or tuple(pbc.shape) not in ((dim,), (1, dim), (graphs, dim), (dim * graphs,)):
            came = f"{pbc.dtype} {tuple(pbc.shape)} on {pbc.device}" if isinstance(pbc, Tensor) else type(pbc).__name__
            raise ValueError(f"pbc must be bool ({dim},) or ({graphs}, {dim}) on {like.device} as x is, got {came}")
        periodic = pbc.reshape(-1, dim).expand(graphs, dim)
    if checks.values_are_free(cell) and checks.values_are_free(periodic):
        _check_values(vectors.detach(), periodic)
    return torch.where(periodic[..., None], vectors, 0.0), periodic


def _check_values(vectors: Tensor, periodic: Tensor) -> None:
    """Raise ValueError for lattice vectors that are not finite, missing, or in one plane."""
    if not bool(vectors.isfinite().all()):
        raise ValueError(f"cell must be finite, got {vectors.tolist()}")
    length = vectors.norm(dim=2)
    missing = ((length == 0) & periodic).any(1)
    if bool(missing.any()):
        came = vectors[missing][0].tolist()
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {came}")
    units = torch.where(periodic, 1 / length.clamp(min=1e-300), 0.0)[..., None] * vectors
    flat = (units @ units.mT + torch.diag_embed((~periodic).double())).det() <= _FLAT**2
    if bool(flat.any()):
        came = vectors[flat][0].tolist()
        raise ValueError(f"cell must have a volume, got lattice vectors that depend on each other: {came}")
