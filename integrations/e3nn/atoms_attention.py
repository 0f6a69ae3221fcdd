"""Ewald attention between atoms, for the adapters of MACE and NequIP. Sources of Coulomb kernels have a stated sum over
each graph, so that energies of atoms do not depend on vacuum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor, nn

from tg_equiattn import checks
from tg_equiattn.ewald.cells import Cells
from tg_equiattn.ewald.ewald_attention import ewald_attention, own_terms
from tg_equiattn.ewald.kernels import Interaction, Kernel, Sources
from tg_equiattn.graphs.edge_products import edge_sum, gathered_edge_sum
from tg_equiattn.graphs.edges import CSR, check_pairs
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.modules import StoresSettings
from tg_equiattn.shapes import Float, Int
from tg_equiattn.torch_state import full_precision, is_readable, is_traced

from .ewald_attention import IrrepsEwaldAttention
from .layout import IrrepsLike

_LARGE = 0.5  # largest remainder without a warning, relative to the largest source of an atom


class Atoms(NamedTuple):
    """Atoms as hosts give them, beside positions, cells and graphs.

    Attributes:
        elements: number of the element of each atom.
        edge_index: edges, in both directions.
        edge_vectors: vector of each edge, from its first to its second atom.
        total_charge: total charge of each graph; ``None`` if the data has none.
    """

    elements: Int[Tensor, " nodes"]
    edge_index: Int[Tensor, "2 edges"]
    edge_vectors: Float[Tensor, "edges 3"]
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
        rows = self.one_hot(atoms.elements)
        constants = self._scalars(torch.tensordot(rows, self.constants, 1))
        out = constants + self._transfers(sources, atoms)
        remainder = target * charge[:, None, None, None] - node_batch.sum(out)
        _warn_of_remainder(remainder.detach(), out.detach(), charge, node_batch.batch, atoms.total_charge is not None)
        weight = (rows @ self.log_weights).exp()
        share = weight / node_batch.spread(node_batch.sum(weight))
        return out + share[:, None, None, None] * node_batch.spread(remainder)

    def one_hot(self, elements: Int[Tensor, " nodes"]) -> Float[Tensor, "nodes elements"]:
        """Elements as rows with a single 1."""
        numbers = torch.arange(self.embedding.shape[0], device=elements.device)
        return (elements[:, None] == numbers).to(self.embedding.dtype)

    def _scalars(self, x: Float[Tensor, "*nodes charged"]) -> Float[Tensor, "*nodes size"]:
        """Numbers of the scalar columns, with zeros in the others."""
        return nn.functional.pad(x, (self.charged.start, self.size - self.charged.stop))

    def _transfers(
        self, sources: Float[Tensor, "nodes heads kernels size"], atoms: Atoms
    ) -> Float[Tensor, "nodes heads kernels size"]:
        flat, count = sources.flatten(1), sources.shape[0]
        first, second = atoms.edge_index
        square = atoms.edge_vectors.square().sum(1).to(flat.dtype)  # hosts give positions in double precision
        near = (1 - square / self.cutoff**2).clamp(min=0) ** 3
        check_pairs(atoms.edge_index, atoms.edge_vectors.detach() / self.cutoff, near.detach(), count)
        near = near / self.avg_num_neighbors
        if is_traced(flat):  # models that NequIP compiles run without this library and its operators
            sums = gathered_edge_sum(near[None], flat[None], second, first, count)[0]
        else:
            order = torch.argsort(second, stable=True)
            edges = CSR.from_sorted(second[order], first[order], count, count)
            sums = edge_sum(near[order][None], flat[None], edges)[0]
        degree = near.new_zeros(count).index_add(0, second, near)
        return (sums - degree[:, None] * flat).view_as(sources)


@compile_mode("unsupported")
@checks.arguments
class AtomsEwaldAttention(IrrepsEwaldAttention):
    r"""Ewald attention that reads elements, with neutral sources of Coulomb kernels.

    An embedding of the element is added to the scalars from which queries, keys and values are computed. The term of an
    atom with itself is left out, but not the terms with its periodic images. Sources of Coulomb kernels are those of
    :class:`NeutralSources`.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        Irreps of the input, with invariant scalars.

    irreps_out : `e3nn.o3.Irreps`
        Irreps of the output.

    num_elements : int
        Number of elements.

    cutoff : float
        Largest length of an edge.

    avg_num_neighbors : float
        Constant by which transfers along edges are divided.

    attn_kwargs
        Settings of `IrrepsEwaldAttention`.
    """

    def __init__(
        self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, *, num_elements: checks.Count, cutoff: checks.Positive,
        avg_num_neighbors: checks.Positive, **attn_kwargs: Any,
    ) -> None:  # fmt: skip
        if not o3.Irreps(irreps_in).count(o3.Irrep("0e")):
            raise ValueError(f"irreps_in must have scalars 0e, which elements join, got {irreps_in}")
        super().__init__(irreps_in, irreps_out, **attn_kwargs)
        rows, parts = self.rows_in, self.product.rows_in
        self.invariants = n = [irrep.invariant for irrep in rows].index(True)
        self.embedded, charged = (
            slice(sum(r.dim for r in each[:n]), sum(r.dim for r in each[: n + 1])) for each in (rows, parts)
        )
        size = sum(irrep.dim for irrep in parts)
        shape = self.heads, self.counts[1]
        self.neutral = NeutralSources(num_elements, rows[n].channels, shape, charged, size, cutoff, avg_num_neighbors)

    def forward(  # type: ignore[override]  # atoms are required
        self, x: Tensor, pos: Tensor, batch: Tensor | None = None, *, atoms: Atoms, **graphs: Any
    ) -> Tensor:
        """Evaluate. ``atoms`` are the elements, edges and charges; the other arguments are those of
        `IrrepsEwaldAttention`."""
        return self.evaluate(x, pos, batch, atoms=atoms, **graphs)

    def attend(self, x: Tensor, *graphs: Any, atoms: Atoms) -> Tensor:  # type: ignore[override]
        with full_precision(x.device):
            embedding, columns = self.neutral.one_hot(atoms.elements) @ self.neutral.embedding, self.embedded
            x = x + nn.functional.pad(embedding, (columns.start, x.shape[1] - columns.stop))
        return super().attend(x, *graphs, atoms=atoms)

    def sums(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, pos: Tensor, interaction: Interaction, node_batch: NodeBatch,
        cells: Cells | None, *, atoms: Atoms,
    ) -> Float[Tensor, "nodes heads out"]:  # fmt: skip
        """Sums over other nodes, of Coulomb kernels with neutral sources and invariant keys, and of the others."""
        gaussians, coulomb, _ = self.counts
        last = gaussians + coulomb
        parts: list[tuple[Tensor, Sources, list[Kernel]]] = []
        if coulomb:
            row = sum(irrep.size for irrep in self.rows_in[: self.invariants])
            invariant, keys = (x[:, :, gaussians:last, row : row + 1] for x in (query, key))
            sources = self.neutral(keys * value[:, :, None], atoms, node_batch)
            parts.append((invariant, (sources,), [kernel for kernel in interaction.kernels if kernel.long_range]))
        if others := [kernel for kernel in interaction.kernels if not kernel.long_range]:
            query, key = (torch.cat([x[:, :, :gaussians], x[:, :, last:]], 2) for x in (query, key))
            parts.append((query, (key, value), others))
        terms = []
        for queries, sources, kernels in parts:
            part = interaction.part(tuple(kernels))
            terms.append(ewald_attention(pos, queries, sources, part, node_batch, cells, self.method))
            terms[-1] = terms[-1] - own_terms(queries, sources, part)
        return sum(terms[1:], terms[0])


def _warn_of_remainder(
    remainder: Float[Tensor, "graphs heads kernels size"], sources: Float[Tensor, "nodes heads kernels size"],
    charge: Float[Tensor, " graphs"], batch: Int[Tensor, " nodes"], known: bool,
) -> None:  # fmt: skip
    """Warn of graphs without a charge whose sources do not sum to zero by themselves. The text is the same for all
    graphs, so that it is printed once."""
    if not sources.numel() or not is_readable(remainder, sources, charge, batch):
        return
    each = sources.abs().flatten(1)
    largest = torch.zeros_like(remainder.flatten(1)).scatter_reduce(0, batch[:, None].expand_as(each), each, "amax")
    large = (remainder.abs().flatten(1) > _LARGE * largest + 1e-6).any(1) & (charge == 0)
    if large.any():
        total = "is 0 in the data" if known else "is not in the data and counts as 0"
        warnings.warn(
            f"Coulomb sources of a graph do not sum to its total charge, which {total}: the remainder is spread over "
            "all its atoms, so distant fragments change each other. Give the total charge if the graph is an ion; if "
            "it is neutral, the learned constants of its elements do not sum to zero",
            stacklevel=2,
        )


def blocks_of(kind: str, after: Any, count: int) -> tuple[int, ...]:
    """The blocks of a model, of ``count``, that attention follows; ``None`` means the first one."""
    blocks = (0,) if after is None else tuple(after) if isinstance(after, Sequence) else ()
    if not blocks or any(type(n) is not int or not 0 <= n < count for n in blocks) or len({*blocks}) < len(blocks):
        raise ValueError(f"after must be different {kind} from 0 to {count - 1}, such as (0,), got {after!r}")
    return blocks


def total_charge_of(data: Mapping[str, Any]) -> Tensor | None:
    """The total charge of each graph, which the data of hosts name ``total_charge`` or ``charge``; ``None`` without.

    Raises:
        ValueError: if both are given and differ.
    """
    charges = [data[name].flatten() for name in ("total_charge", "charge") if data.get(name) is not None]
    if len(charges) == 2:
        total, charge = charges
        if not checks.passes(lambda: torch.equal(total.double(), charge.double()), total, charge):
            raise ValueError(
                f"total_charge and charge are two names of the total charge and must be equal, got {total.tolist()} "
                f"and {charge.tolist()}: leave out one of them"
            )
    return charges[0] if charges else None
