"""Sources of Coulomb kernels with a stated sum over each graph, so that energies of atoms do not depend on vacuum."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks
from ...edges import CSR
from ...functional.edge_products import edge_sum, gathered_edge_sum
from ...modes import is_traced
from ...node_batch import NodeBatch
from ..modules import StoresSettings

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LARGE = 0.5  # largest remainder without a warning, relative to the largest source of an atom


class Atoms(NamedTuple):
    """Data of atoms that neutral sources read.

    Attributes:
        elements: elements of the atoms, as one-hot rows.
        edge_index: edges, in both directions.
        square: squared length of each edge.
        total_charge: total charge of each graph; ``None`` if the data has none.
    """

    elements: Float[Tensor, "nodes elements"]
    edge_index: Int[Tensor, "2 edges"]
    square: Float[Tensor, " edges"]
    total_charge: Float[Tensor, " graphs"] | None


class NeutralSources(StoresSettings):
    r"""Sources of Coulomb kernels that sum to a stated total over each graph, and an embedding of elements.

    With :math:`s_i` the product of key and value of atom i, constants c of each element z and a smooth cutoff f,

    .. math:: S_j = c_{z_j} + \frac{1}{\bar N} \sum_i f(r_{ij}) (s_i - s_j) + \frac{w_{z_j}}{\sum_i w_{z_i}}
        \Big( Q - \sum_i c_{z_i} \Big)

    Transfers along edges are antisymmetric, so they conserve the sum over every fragment: distant fragments do not
    change each other's sources. The remainder is the stated total Q minus the sum of the constants. It is spread over
    all atoms of a graph, with learned positive weights w. Q is a learned constant times the total charge of the graph,
    or zero if it has none. Components that rotate have neither constants nor charges, and their sum is zero.

    Args:
        num_elements: Number of elements.
        scalars: Scalar channels of the features, to which the embedding is added.
        shape: Heads and Coulomb kernels.
        charged: Columns of a source that are scalars, as a slice.
        size: Columns of a source.
        cutoff: Largest length of an edge.
        avg_num_neighbors: Constant by which transfers are divided.
    """

    def __init__(
        self, num_elements: int, scalars: int, shape: tuple[int, int], charged: slice, size: int, cutoff: float,
        avg_num_neighbors: float,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.positive_number(cutoff=cutoff, avg_num_neighbors=avg_num_neighbors)
        self.cutoff, self.avg_num_neighbors, self.charged, self.size = cutoff, avg_num_neighbors, charged, size
        self.embedding = nn.Parameter(torch.empty(num_elements, scalars))
        each = (*shape, charged.stop - charged.start)
        self.constants = nn.Parameter(torch.empty(num_elements, *each))
        self.charges = nn.Parameter(torch.empty(each))
        self.log_weights = nn.Parameter(torch.empty(num_elements))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embedding)
        nn.init.zeros_(self.constants)
        nn.init.normal_(self.charges)
        nn.init.zeros_(self.log_weights)

    def settings(self) -> dict[str, Any]:
        return {"cutoff": float(self.cutoff), "avg_num_neighbors": float(self.avg_num_neighbors)}

    def forward(
        self, sources: Float[Tensor, "nodes heads kernels size"], atoms: Atoms, node_batch: NodeBatch
    ) -> Float[Tensor, "nodes heads kernels size"]:
        """Sources with the stated sums, from products of keys and values."""
        target = self._scalars(self.charges.expand(node_batch.count, -1, -1, -1))
        charge = atoms.total_charge
        charge = sources.new_zeros(node_batch.count) if charge is None else charge.to(sources.dtype)
        constants = self._scalars(torch.tensordot(atoms.elements, self.constants, 1))
        out = constants + self._transfers(sources, atoms)
        remainder = target * charge[:, None, None, None] - node_batch.sum(out)
        _warn_of_remainder(remainder.detach(), out.detach(), charge, node_batch.batch, atoms.total_charge is not None)
        weight = (atoms.elements @ self.log_weights).exp()
        share = weight / node_batch.spread(node_batch.sum(weight))
        return out + share[:, None, None, None] * node_batch.spread(remainder)

    def _scalars(self, x: Float[Tensor, "*nodes charged"]) -> Float[Tensor, "*nodes size"]:
        """Numbers of the scalar columns, with zeros in the others."""
        return nn.functional.pad(x, (self.charged.start, self.size - self.charged.stop))

    def _transfers(
        self, sources: Float[Tensor, "nodes heads kernels size"], atoms: Atoms
    ) -> Float[Tensor, "nodes heads kernels size"]:
        flat, count = sources.flatten(1), sources.shape[0]
        first, second = atoms.edge_index
        square = atoms.square.to(flat.dtype)  # hosts give positions in double precision
        near = (1 - square / self.cutoff**2).clamp(min=0) ** 3 / self.avg_num_neighbors
        if is_traced(flat):  # models that NequIP compiles run without this library and its operators
            found = gathered_edge_sum(near[None], flat[None], second, first, count)[0]
        else:
            order = torch.argsort(second, stable=True)
            edges = CSR.from_sorted(second[order], first[order], count, count)
            found = edge_sum(near[order][None], flat[None], edges)[0]
        degree = near.new_zeros(count).index_add(0, second, near)
        return (found - degree[:, None] * flat).view_as(sources)


@checks.of_values
def _warn_of_remainder(
    remainder: Float[Tensor, "graphs heads kernels size"], sources: Float[Tensor, "nodes heads kernels size"],
    charge: Float[Tensor, " graphs"], batch: Int[Tensor, " nodes"], given: bool,
) -> None:  # fmt: skip
    """Warn of graphs without a charge whose sources do not sum to zero by themselves. The text is the same for all
    graphs, so that it is printed once."""
    if not sources.numel():
        return
    each = sources.abs().flatten(1)
    largest = torch.zeros_like(remainder.flatten(1)).scatter_reduce(0, batch[:, None].expand_as(each), each, "amax")
    large = (remainder.abs().flatten(1) > _LARGE * largest + 1e-6).any(1) & (charge == 0)
    if large.any():
        total = "is 0 in the data" if given else "is not in the data and counts as 0"
        warnings.warn(
            f"Coulomb sources of a graph do not sum to its total charge, which {total}: the remainder is spread over "
            "all its atoms, so distant fragments change each other. Give the total charge if the graph is an ion; if "
            "it is neutral, the learned constants of its elements do not sum to zero",
            stacklevel=2,
        )
