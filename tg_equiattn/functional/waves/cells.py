"""Cells of crystals, slabs and open graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...modes import is_readable
from ...ranks import Ranks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_FLAT = 1e-6  # smallest volume of a unit cell, relative to a box with edges of the same lengths


class Cells(NamedTuple):
    """Cells of graphs.

    Attributes:
        vectors: lattice vectors as rows, in float64; unit vectors along directions that do not repeat.
        periodic: true for directions along which a graph repeats: all three, two, or none.
    """

    vectors: Float[Tensor, "graphs 3 3"]
    periodic: Bool[Tensor, "graphs 3"]

    @classmethod
    def none(cls, count: int, device: torch.device) -> Cells:
        """Cells of graphs that do not repeat."""
        unit = torch.eye(3, dtype=torch.float64, device=device).expand(count, 3, 3)
        return cls(unit, torch.zeros(count, 3, dtype=torch.bool, device=device))

    def select(self, graphs: Tensor | None) -> Cells:
        """Cells of some of the graphs; ``None`` means all."""
        return self if graphs is None else Cells(*(x.index_select(0, graphs) for x in self))

    def normals(self) -> Float[Tensor, "graphs 3 3"]:
        """Unit vectors along directions that do not repeat: the normal of a slab, or x, y and z."""
        across = torch.linalg.cross(self.vectors.roll(-1, 1), self.vectors.roll(-2, 1))  # products of the other two
        length = across.square().sum(2, keepdim=True)
        across = across / torch.where(length > 0, length, 1.0).sqrt()
        unit = Cells.none(1, across.device).vectors
        return torch.where(self.periodic.any(1)[:, None, None], across, unit)

    def extents(
        self, pos: Float[Tensor, "graphs nodes 3"], mask: Bool[Tensor, "graphs nodes"] | None, ranks: Ranks | None
    ) -> Float[Tensor, "graphs 3"]:
        """Largest distance between nodes along each direction that does not repeat, zero along the others."""
        with torch.no_grad():
            along = torch.einsum("bnx,bax->bna", pos, self.normals())
            ends = torch.stack([along, -along], 2)
            ends = ends if mask is None else ends.masked_fill(~mask[..., None, None], -torch.inf)
            ends = torch.nn.functional.pad(ends, (0, 0, 0, 0, 0, 1), value=-torch.inf).amax(1)  # there may be no nodes
            ends = ends if ranks is None else ranks.largest(ends)
            return torch.where(self.periodic, 0.0, ends.sum(1).clamp(min=0).nan_to_num(0, 0, 0))


def cells_of(cell: Tensor | None, pbc: Tensor | None, count: int, like: Tensor) -> Cells | None:
    """Check the cells of ``count`` graphs and return them on the device of ``like``; ``None`` if no graph repeats."""
    if cell is None:
        none = isinstance(pbc, Tensor) and is_readable(pbc) and not bool(pbc.any())
        if pbc is not None and not none:
            raise ValueError("cell must be given with pbc, got None")
        return None
    vectors, periodic = read_lattice(cell, pbc, count, like)
    wires, name = periodic.sum(1) == 1, "cell" if pbc is None else "pbc"
    note = f"{name} must let graphs repeat along three directions, two or none"
    checks.must_hold(
        ~wires.any(), note, lambda: (
            f", got one for graph {int(wires.nonzero()[0])}: the potential of a wire grows with the logarithm of the "
            "distance; give the cell two more lattice vectors, with vacuum"
        ),
    )  # fmt: skip
    return Cells(torch.where(periodic[..., None], vectors, Cells.none(count, like.device).vectors), periodic)


def read_lattice(
    cell: Tensor, pbc: Tensor | None, graphs: int, like: Tensor
) -> tuple[Float[Tensor, "graphs 3 3"], Bool[Tensor, "graphs 3"]]:
    """Check the lattice vectors of graphs.

    ``cell`` is one for all graphs, one for each, or (3 graphs, 3) as PyG batches them. Return the lattice vectors
    as rows in float64, zero along directions that do not repeat, and the directions that repeat.
    """
    shapes = ((3, 3), (1, 3, 3), (graphs, 3, 3), (3 * graphs, 3))
    if not isinstance(cell, Tensor) or not checks.is_one_of(cell.shape, shapes):
        raise ValueError(f"cell must be (3, 3) or one a graph, ({graphs}, 3, 3), got {checks.shape_of(cell)}")
    if cell.device != like.device or not cell.is_floating_point():
        raise ValueError(f"cell must be floating point on {like.device} as x is, got {cell.dtype} on {cell.device}")
    vectors = cell.double().reshape(-1, 3, 3).expand(graphs, 3, 3)
    periodic = (vectors != 0).any(2)
    if pbc is not None:
        fits = isinstance(pbc, Tensor) and pbc.dtype == torch.bool and pbc.device == like.device
        if not fits or not checks.is_one_of(pbc.shape, ((3,), (1, 3), (graphs, 3), (3 * graphs,))):
            wanted = f"bool (3,) or ({graphs}, 3) on {like.device} as x is"
            raise ValueError(f"pbc must be {wanted}, got {checks.described(pbc)}")
        periodic = pbc.reshape(-1, 3).expand(graphs, 3)
    _check_lattice(cell, periodic, vectors.detach())
    return torch.where(periodic[..., None], vectors, 0.0), periodic


@checks.of_values
def _check_lattice(cell: Tensor, periodic: Bool[Tensor, "graphs 3"], vectors: Float[Tensor, "graphs 3 3"]) -> None:
    if not bool(vectors.isfinite().all()):
        raise ValueError(f"cell must be finite, got {vectors.tolist()}")
    length = vectors.norm(dim=2)
    without = ((length == 0) & periodic).any(1)
    if bool(without.any()):
        raise ValueError(f"cell must have a lattice vector wherever pbc is true, got {vectors[without][0].tolist()}")
    units = torch.where(periodic, 1 / length.clamp(min=1e-300), 0.0)[..., None] * vectors
    flat = (units @ units.mT + torch.diag_embed((~periodic).double())).det() <= _FLAT**2
    if bool(flat.any()):
        wanted = "a volume, got lattice vectors that depend on each other"
        raise ValueError(f"cell must have {wanted}: {vectors[flat][0].tolist()}")
