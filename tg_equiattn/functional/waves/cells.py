"""Cells of crystals, slabs and open graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...cells import read_lattice
from ...modes import is_readable
from ...ranks import Ranks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


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
