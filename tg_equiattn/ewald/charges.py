"""Charges that are given for elements, or predicted from features: energies, dipoles and Born effective charges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.edges import check_between, check_edges, check_graph_of_edges, check_pairs, images_of, of_edges
from ..graphs.node_batch import NodeBatch
from ..modules import NotScriptable, StoresSettings
from ..shapes import Float
from ..torch_state import full_precision, is_readable
from .cells import Cells, cells_of
from .ewald_attention import Error, Method, MillerIndices, energies_of_nodes

COULOMB_CONSTANT = 14.3996454785  # e² / 4 pi epsilon_0 in eV Å
UNIT = 0.1  # charge in e that parameters of size 1 give: with 1, steps of optimizers change energies too much
# the annotation of charges, which may be NaN
Charge = Annotated[float, checks.Kind("a number", lambda x: isinstance(x, (int, float)) and abs(x) != math.inf)]
_HIDDEN = 16  # channels of the perceptron
_LEAST = 1e-2  # smallest weight of a node
_TOLERANCE = 1e-4  # of sums of charges, relative to the sum of their absolute values


class ChargeOutputs(NamedTuple):
    """Outputs of :class:`ChargeInteraction`.

    Attributes:
        energies: energies of nodes.
        offsets: the part of the energies that the elements have by themselves, which a model takes off.
        charges: charges of nodes.
        dipole: dipole of each graph; in graphs that repeat, it is defined up to charges times lattice vectors.
        shared: charge that is missing to the total charge of each graph and is shared by its nodes; zero if charges are
            given.
    """

    energies: Float[Tensor, " nodes"]
    offsets: Float[Tensor, " nodes"]
    charges: Float[Tensor, " nodes"]
    dipole: Float[Tensor, "graphs 3"]
    shared: Float[Tensor, " graphs"]


@checks.arguments
class ChargeLayer(NotScriptable, StoresSettings):
    """The base class of layers of charges: settings, energies, dipoles and Born effective charges. A subclass has
    ``_charges``."""

    exclude_near = False  # also of models that were pickled by earlier states
    offsets: Tensor
    feature_size: Tensor

    def __init__(
        self, names: Sequence[str], *, width: checks.Positive, scalars: checks.Whole = 0,
        cutoff: checks.Positive | None = None, avg_num_neighbors: checks.Positive = 1.0,
        dielectric: checks.Positive = 1.0, error: Error = 1e-4, method: Method = "auto",
        max_hkl: MillerIndices | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.cutoff, self.avg_num_neighbors, self.dielectric = width, cutoff, avg_num_neighbors, dielectric
        self.error, self.method, self.max_hkl = error, method, max_hkl
        if scalars and cutoff is None:
            raise ValueError("cutoff must be given with scalars, got None: the largest length of an edge")
        if not names:
            raise ValueError("charges (or names) must have at least one element, got none")
        self.names = tuple(names)
        self.register_buffer("offsets", torch.zeros(len(names)))
        self.register_buffer("feature_size", torch.ones(scalars))
        self.weights = nn.Parameter(torch.zeros(scalars)) if scalars else None

    def settings(self) -> dict[str, Any]:
        return {
            "elements": list(self.names), "width": float(self.width), "dielectric": float(self.dielectric),
            "cutoff": self.cutoff and float(self.cutoff), "avg_num_neighbors": float(self.avg_num_neighbors),
            "coulomb_constant": COULOMB_CONSTANT,
        }  # fmt: skip

    def forward(
        self, elements: Tensor, pos: Tensor, batch: Tensor | None = None, *, features: Tensor | None = None,
        edge_index: Tensor | None = None, edge_vectors: Tensor | None = None, total_charge: Tensor | None = None,
        cell: Tensor | None = None, pbc: Tensor | None = None, batch_size: int | None = None,
        max_num_nodes: int | None = None, external_field: Tensor | None = None,
    ) -> ChargeOutputs:  # fmt: skip
        """Energies, charges and dipoles.

        Args:
            elements: int64 ``(T,)``, the number of the element of each node.
            pos: Positions ``(T, 3)``. Give large coordinates in float64.
            batch: Sorted int64 ``(T,)``, the graph of each node. ``None`` means one graph.
            features: Invariant features ``(T, scalars)``, if the layer has ``scalars``.
            edge_index: int64 ``(2, E)``, each edge in both directions, if the layer has ``scalars``.
            edge_vectors: ``(E, 3)``, vector of each edge from its first to its second node, if the layer has
                ``scalars``.
            total_charge: ``(B,)`` or ``(B, 1)``, total charge of each graph. ``None`` means that all are neutral if
                charges are given; predicted charges need it.
            cell: Lattice vectors as rows, ``(3, 3)`` or ``(B, 3, 3)``.
            pbc: bool ``(3,)`` or ``(B, 3)``, the lattice vectors along which graphs repeat: three, two or none.
                ``None`` means all that are not zero.
            batch_size: Number of graphs. ``None`` reads it from ``batch``, which torch.compile cannot.
            max_num_nodes: Bound of the number of nodes of a graph. ``None`` reads it from ``batch``.
            external_field: Uniform electric field ``(B, 3)`` on each graph, in V/Å. Its energy, minus the field times
                the dipole and the root of ``dielectric``, joins those of nodes. It must be zero for graphs that repeat,
                whose dipole is not defined. ``None`` means no field.
        """
        checks.full_parameters(self.offsets if self.weights is None else self.weights)
        if not isinstance(elements, Tensor) or elements.dtype != torch.int64 or elements.ndim != 1:
            raise ValueError(f"elements must be int64 of shape (nodes,), got {checks.described(elements)}")
        names = f", the numbers of {', '.join(self.names)} in this layer"
        checks.in_range("elements", elements, len(self.names) - 1, names)
        pos = checks.positions(pos, (elements.shape[0], 3), elements, "energies depend on them")
        node_batch = NodeBatch.flat(elements, batch, batch_size, max_num_nodes)
        cells = cells_of(cell, pbc, node_batch.count, elements)
        if total_charge is not None:
            shapes = [(node_batch.count,), (node_batch.count, 1)]
            checks.tensor("total_charge", total_charge, "real numbers", shapes, elements.device)
            checks.finite("total_charge", total_charge)
        if self.weights is not None:
            self._check_inputs(features, edge_index, edge_vectors, elements.shape[0])
            _check_vectors(edge_index, edge_vectors, pos, node_batch.batch, cells)
        with full_precision(elements.device):
            charges, moments, offsets, shared = self._charges(
                elements, pos, node_batch, total_charge, features, edge_index, edge_vectors
            )
            sums = self.width, self.method, self.error, self.max_hkl
            energies = energies_of_nodes(charges, pos, node_batch, cells, *sums)
            if self.exclude_near:
                energies = energies - self._near_energies(charges, edge_index, edge_vectors)
            energies = COULOMB_CONSTANT * energies
            if external_field is not None:
                _check_field(external_field, node_batch.count, cells, elements.device)
                field = self.dielectric**0.5 * node_batch.spread(external_field.to(moments.dtype))
                energies = energies - (moments * field).sum(1).to(energies.dtype)
            return ChargeOutputs(energies, offsets, charges, node_batch.sum(moments).to(charges.dtype), shared)

    def _check_inputs(self, features: Any, edge_index: Any, edge_vectors: Any, nodes: int) -> None:
        """Raise ValueError unless features and edges are given, and fit the nodes."""
        for name, x in (("features", features), ("edge_index", edge_index), ("edge_vectors", edge_vectors)):
            if x is None:
                raise ValueError(f"{name} must be given, since charges are learned from features and edges, got None")
        checks.tensor("features", features, "floating point", [(nodes, *self.feature_size.shape)], None)
        checks.of_points(features, self.feature_size, "features")
        check_edges(edge_index, nodes, features.device)
        of_edges("edge_vectors", edge_vectors, edge_index, 3)

    def _charges(
        self, elements: Tensor, pos: Tensor, node_batch: NodeBatch, total_charge: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Charges of nodes, their first moments, the part of their energies that elements have by themselves, and the
        charge of each graph that is shared. ``inputs`` are features, edges and vectors of edges."""
        raise NotImplementedError

    def born_charges(self, dipole: Tensor, pos: Tensor, create_graph: bool = False) -> Float[Tensor, "nodes 3 3"]:
        """Born effective charges: derivatives of the component a of the dipole by the coordinate b of each node, at
        ``[node, a, b]``, times the root of the dielectric constant. Their sum over a neutral graph is zero.

        Args:
            dipole: the dipole of a call.
            pos: positions of the same call, which need gradients.
            create_graph: true if Born charges will be differentiated, as in training on them.
        """
        rows = [torch.autograd.grad(x.sum(), pos, retain_graph=True, create_graph=create_graph)[0]
                for x in dipole.unbind(1)]  # fmt: skip
        return self.dielectric**0.5 * torch.stack(rows, 1)

    def _near_energies(self, charges: Tensor, *edges: Tensor | None) -> Float[Tensor, " nodes"]:
        """Energies of nodes with themselves and with neighbors, which fade out towards the cutoff."""
        (first, second), vectors = cast("tuple[Tensor, Tensor]", edges)
        length = vectors.square().sum(1).sqrt().to(charges.dtype)
        rest = (1 - length / cast("float", self.cutoff)).clamp(min=0)
        kernel = torch.erf(length / (math.sqrt(2) * self.width)) / length * rest**3 * (4 - 3 * rest)
        sums = torch.zeros_like(charges).index_add(0, first, charges.index_select(0, second) * kernel)
        return charges * (0.5 * sums + charges / (math.sqrt(2 * math.pi) * self.width))

    def _with_transfers(
        self, charges: Tensor, moments: Tensor, *inputs: Tensor | None
    ) -> tuple[Float[Tensor, " nodes"], Float[Tensor, "nodes 3"]]:
        """Charges and moments with what goes along edges, from the first node to the second."""
        features, edge_index, edge_vectors = cast("tuple[Tensor, Tensor, Tensor]", inputs)
        first, second = edge_index
        square = edge_vectors.square().sum(1).to(features.dtype)
        cutoff = cast("float", self.cutoff)
        near = (1 - square / cutoff**2).clamp(min=0) ** 3
        check_pairs(edge_index, edge_vectors.detach() / cutoff, near.detach(), features.shape[0])
        near = near / self.avg_num_neighbors
        own = (features / self.feature_size) @ cast("Tensor", self.weights) / features.shape[1]
        transfers = near * (own.index_select(0, first) - own.index_select(0, second))
        moments = moments.index_add(0, first, (0.5 * transfers)[:, None] * edge_vectors.to(moments.dtype))
        return charges.index_add(0, second, transfers), moments


def _check_field(field: Tensor, count: int, cells: Cells | None, device: torch.device) -> None:
    checks.tensor("external_field", field, "floating point", [(count, 3)], device)
    checks.finite("external_field", field)
    if cells is not None:
        acts = (field != 0).any(1) & cells.periodic.any(1)
        checks.must_hold(~acts.any(), "external_field must be zero for graphs that repeat: their dipole is not defined")


def _check_vectors(edge_index: Any, vectors: Any, pos: Tensor, batch: Tensor, cells: Cells | None) -> None:
    """Raise ValueError unless edges stay within graphs, and vectors are differences of positions up to lattice
    vectors."""
    if not is_readable(edge_index, vectors, pos, batch):
        return
    first, second = edge_index
    check_graph_of_edges(first, second, batch, None, "edge_index")
    images = None
    if cells is not None:
        lattice = torch.where(cells.periodic[..., None], cells.vectors, 0.0)
        images = images_of(vectors - (pos[second] - pos[first]), lattice, batch[first])
    rule = "edge_vectors must be pos[edge_index[1]] - pos[edge_index[0]], plus lattice vectors of cell in its graphs"
    check_between(rule, pos, vectors, first, second, images=images)


@checks.arguments_of(ChargeLayer)
class ChargeInteraction(ChargeLayer):
    r"""Energies of charges of elements, dipoles and Born effective charges, in molecules, slabs and crystals.

    .. math:: E = \frac{C}{2} \sum_{ij} S_i S_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}, \qquad
        S_i = \lambda q_{z_i} + \sum_j t_{ji}, \qquad t_{ij} = \frac{f(r_{ij})}{\bar N}\, w \cdot (x_i - x_j)

    with a charge q for each element z, in units of e, and the constant C in eV Å. Sums include the node itself and all
    images. E is a sum of squares over waves: with charges that do not change, it can only raise the frequency of a
    longitudinal mode. The factor :math:`\lambda` and the transfers t from a node to its neighbors are learned if the
    layer has ``scalars``, the number of invariant features x of a node. Transfers are antisymmetric, so they conserve
    the charge of every fragment, and the factor leaves neutral fragments neutral. A new layer has :math:`\lambda = 1`
    and no transfers.

    The dipole is the sum of constants times positions and transfers times edge vectors. Born effective charges are its
    derivative by positions, times the root of the dielectric constant. The kernel is isotropic: it cannot represent a
    dielectric constant that depends on the direction.

    Args:
        charges: Charge of each element by its name. The order of the names is that of the numbers in ``elements``.
            Charges that give the right forces in a crystal are Born effective charges divided by the root of
            ``dielectric``. NaN means that a charge is missing: graphs with this element are refused.
        width: Width s of the kernel, in the unit of positions. Use 0.4 of the message-passing cutoff, so that the
            kernel does not compete with messages.
        scalars: Number of invariant features of each node, from which transfers are learned. With 0, the default,
            charges are held.
        cutoff: Largest length of an edge, for transfers. It is needed with ``scalars``.
        avg_num_neighbors: Constant by which transfers are divided, 1 by default.
        dielectric: Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total
            charge divided by the root of this constant.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by
            default.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :class:`EwaldAttention`.
        max_hkl: Largest Miller indices along the lattice vectors. If given, cells are not read, which torch.compile
            needs. The default, ``None``, reads them.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: split charges (Nistor et al. 2006) and energies of learned charges (PhysNet, arXiv 1902.08408); phonons of
    polar crystals, Gonze and Lee 1997.

    Example:
        >>> import torch
        >>> salt = ChargeInteraction({"Na": 0.68, "Cl": -0.68}, width=2.0)
        >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.8]], requires_grad=True)
        >>> out = salt(torch.tensor([0, 1]), pos)
        >>> out.charges, out.dipole.detach()
        (tensor([ 0.6800, -0.6800]), tensor([[ 0.0000,  0.0000, -1.9040]]))
        >>> salt.born_charges(out.dipole, pos)[:, 2, 2]
        tensor([ 0.6800, -0.6800])
    """

    constants: Tensor

    def __init__(self, charges: Mapping[str, Charge], **settings: Any) -> None:
        super().__init__(tuple(charges), **settings)
        self.register_buffer("constants", torch.tensor([float(q) for q in charges.values()]))
        if self.weights is not None:
            self.scale = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("scale", torch.ones(()))

    def reset_parameters(self) -> None:
        if self.weights is not None:
            nn.init.ones_(self.scale)
            nn.init.zeros_(self.weights)

    def select(self, elements: Sequence[int]) -> None:
        """Keep some of the elements, in this order."""
        self.names = tuple(self.names[n] for n in elements)
        self.constants, self.offsets = self.constants[[*elements]], self.offsets[[*elements]]

    def _charges(
        self, elements: Tensor, pos: Tensor, node_batch: NodeBatch, total_charge: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        constants = self.constants.index_select(0, elements)
        self.check(constants.detach(), elements, total_charge, node_batch)
        charges = self.scale * constants
        moments = charges[:, None] * pos
        if self.weights is not None:
            charges, moments = self._with_transfers(charges, moments, *inputs)
        offsets = self.scale.square() * self.offsets.index_select(0, elements)
        return charges, moments, offsets, charges.new_zeros(node_batch.count)

    def check(self, constants: Tensor, elements: Tensor, total_charge: Tensor | None, node_batch: NodeBatch) -> None:
        """Raise ValueError if a charge is missing, or if charges of a graph do not sum to its total charge."""

        def unknown() -> str:
            return f", got none for {', '.join(sorted({self.names[n] for n in elements[constants.isnan()].tolist()}))}"

        checks.must_hold(~constants.isnan().any(), "charges must have a charge for the element of every atom", unknown)
        found = self.dielectric**0.5 * node_batch.sum(constants)
        wanted = torch.zeros_like(found) if total_charge is None else total_charge.to(found.dtype).reshape(-1)
        off = (found - wanted).abs() > _TOLERANCE * (node_batch.sum(constants.abs()) + 1)

        def different() -> str:
            graph = int(off.nonzero()[0])
            root = "" if self.dielectric == 1 else f" times the root of dielectric={self.dielectric:g}"
            known = "no total_charge is given" if total_charge is None else f"total_charge is {float(wanted[graph]):g}"
            return (
                f": in graph {graph} they sum to {float(found[graph]):.4g}{root}, and {known}; give the total charge "
                "of charged graphs, or charges that sum to it"
            )

        checks.must_hold(~off.any(), "charges of a graph must sum to its total charge", different)


@checks.arguments_of(ChargeLayer)
class PredictedChargeInteraction(ChargeLayer):
    r"""Energies of charges that are predicted from features and sum to the total charge of each graph.

    .. math:: E = \frac{C}{2} \sum_{ij} S_i S_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}, \qquad
        S_i = q_i + \frac{w_i}{\sum_j w_j} \Big( \frac{Q}{\sqrt\epsilon} - \sum_j q_j \Big), \qquad
        q_i = c_{z_i} + f(x_i) + \sum_j t_{ji}

    with a learned constant c for each element z, a linear map and a perceptron f of the invariant features x, and the
    transfers t of :class:`ChargeInteraction`. What is missing to the total charge Q of the graph is shared by positive
    weights w of elements and features. Sums include the node itself and all images.

    The energy between near nodes, and of a node with itself, is taken off again: messages can learn it, so charges need
    not be right there.

    .. math:: E_{\mathrm{long}} = E - \frac{C}{2} \sum_i \Big( \frac{2 S_i^2}{\sqrt{2 \pi} s} + \sum_{j \in N(i)}
        S_i S_j\, \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}\,
        (1 - u_{ij})^3 (1 + 3 u_{ij}) \Big),
        \qquad u_{ij} = \frac{r_{ij}}{r_c}

    with the neighbors N and the ``cutoff`` :math:`r_c` of edges. If all charges are zero, so are their gradients, and
    they stay zero.

    The shared charge can move charge between distant parts of a graph. Training on graphs whose total charges are known
    drives it to zero: ``shared`` of the outputs has its size. Separate neutral molecules are neutral up to this size.
    In graphs that repeat, dipoles and Born effective charges are not defined.

    Args:
        names: Names of the elements, in the order of the numbers in ``elements``.
        width: Width s of the kernel, in the unit of positions. Use 0.6 of the message-passing cutoff.
        scalars: Number of invariant features of each node.
        cutoff: Largest length of an edge, for transfers and for the energy that is taken off. Edges must be all pairs
            up to this length.
        avg_num_neighbors: Constant by which transfers are divided, 1 by default.
        dielectric: Electronic dielectric constant of the data, 1 by default. The charges of a graph sum to its total
            charge divided by the root of this constant.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by
            default.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :class:`EwaldAttention`.
        max_hkl: Largest Miller indices along the lattice vectors. If given, cells are not read, which torch.compile
            needs. The default, ``None``, reads them.
        exclude_near: True, the default, takes the energy between near nodes off again. False keeps it.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one; in a call, if ``total_charge`` is
            missing.

    Source: PhysNet (arXiv 1902.08408), whose remainder is shared evenly.

    Example:
        >>> import torch
        >>> layer = PredictedChargeInteraction(["H", "O"], width=2.0, scalars=8, cutoff=5.0)
        >>> pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> edge_index = torch.tensor([[0, 1], [1, 0]])
        >>> edges = {"edge_index": edge_index, "edge_vectors": pos[edge_index[1]] - pos[edge_index[0]]}
        >>> features, charge = torch.randn(2, 8), torch.tensor([-1.0])
        >>> out = layer(torch.tensor([1, 0]), pos, features=features, total_charge=charge, **edges)
        >>> round(float(out.charges.detach().sum()), 5)
        -1.0
    """

    def __init__(
        self, names: Sequence[str], *, scalars: checks.Count, cutoff: float, exclude_near: bool = True, **settings: Any
    ) -> None:
        super().__init__(tuple(names), scalars=scalars, cutoff=cutoff, **settings)
        self.exclude_near = exclude_near
        self.constants = nn.Parameter(torch.zeros(len(self.names), 2))  # of charges and of weights
        self.linear = nn.Linear(scalars, 2, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(scalars, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with small charges."""
        nn.init.zeros_(self.constants)
        nn.init.zeros_(cast("Tensor", self.weights))
        nn.init.normal_(self.linear.weight, std=self.linear.in_features**-0.5)
        first, _, last = (cast("nn.Linear", layer) for layer in self.perceptron)
        first.reset_parameters()
        nn.init.normal_(last.weight, std=last.in_features**-0.5)
        nn.init.zeros_(last.bias)

    def select(self, elements: Sequence[int]) -> None:
        """Keep some of the elements, in this order."""
        self.names = tuple(self.names[n] for n in elements)
        self.constants = nn.Parameter(self.constants.detach()[[*elements]])
        self.offsets = self.offsets[[*elements]]

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"predicted": True, "exclude_near": self.exclude_near}

    def _charges(
        self, elements: Tensor, pos: Tensor, node_batch: NodeBatch, total_charge: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if total_charge is None:
            raise ValueError(
                "total_charge must be given for predicted charges, which sum to it, got None: give the total charge of "
                "every graph, 0 for neutral ones"
            )
        x = cast("Tensor", inputs[0]) / self.feature_size
        own = UNIT * (self.constants.index_select(0, elements) + self.linear(x) + self.perceptron(x))
        charges, moments = own[:, 0], pos.new_zeros(pos.shape)
        charges, moments = self._with_transfers(charges, moments, *inputs)
        weights = nn.functional.softplus(own[:, 1]) + _LEAST
        wanted = total_charge.to(charges.dtype).reshape(-1) * self.dielectric**-0.5
        shared = wanted - node_batch.sum(charges)
        share = weights / node_batch.spread(node_batch.sum(weights))
        missing = share * node_batch.spread(shared)
        still = own[:, 0] + missing  # charges that do not move along edges
        moments, offsets = moments + still[:, None] * pos, self.offsets.index_select(0, elements)
        return charges + missing, moments, offsets, shared
