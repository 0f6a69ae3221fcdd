"""Fits to data before a model with charges is trained: offsets of elements, charges, and the size of forces."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ...functional.waves.charges import charge_energies
from ...node_batch import NodeBatch
from .charges import UNIT, ChargeInteraction, ChargeLayer, PredictedChargeInteraction, known

if TYPE_CHECKING:
    from jaxtyping import Float

_Data = TypeVar("_Data")
_RANK = 1e-2  # singular values of compositions below this, relative to the largest, are left to the model
_PAIRS = 8  # radial functions of forces between two elements
_NARROW = 0.3  # width over cutoff with which a factor of charges is fitted: the kernel is 1 / r beyond the cutoff
_SMALL = 0.1  # weight of the mean square of predicted charges
_RIDGE = 1e-6  # weight of the square of their weights
_OF_PAIRS = 0.1  # weight of products of charges of fragments, relative to that of total charges
_STEPS = 50
_LOGGER = logging.getLogger(__name__)
_TRAINED = 0.5  # error of a model's forces relative to labels, below which it counts as trained


class EnergyStart:
    """A fit of the offsets of elements to energies of charges, and of the size of forces to those of data.

    Args:
        layer: Charges of a model before training.
    """

    def __init__(self, layer: ChargeLayer) -> None:
        self.layer = layer
        self.rows: list[Tensor] = []
        self.forces: list[tuple[Tensor, ...]] = []

    def record(
        self, elements: Tensor, node_batch: NodeBatch, energies: Tensor, labels: Tensor | None, own: Tensor, far: Tensor
    ) -> bool:
        """Add energies of nodes, forces of the data, of the model, and of charges. The result is true if the data have
        forces."""
        content = torch.nn.functional.one_hot(elements, len(self.layer.names)).double()
        self.rows.append(node_batch.mean(torch.cat([content, energies.detach().double()[:, None]], 1)).cpu())
        if labels is None or not labels.any():
            return False
        self.forces.append(tuple(x.detach().double().cpu() for x in (labels, own, far)))
        return True

    @torch.no_grad()
    def finish_energies(self, single: Tensor, size: float = 1.0) -> float:
        """Set the offsets of the layer. Return the factor by which the scale of forces of the model changes.

        Offsets explain energies of charges by composition best, starting from the energies ``single`` of single nodes.
        The factor of a new model is the size of labels without forces of charges, ``size`` times those recorded,
        relative to that of labels. The factor of a trained model, times its own forces, fits labels without forces of
        charges best.
        """
        content, energies = torch.cat(self.rows).split([len(self.layer.names), 1], 1)
        lacking = energies - content @ single[:, None]
        fitted = torch.linalg.lstsq(content, lacking, rcond=_RANK, driver="gelsd").solution
        self.layer.offsets.copy_(single + fitted[:, 0])
        if not self.forces:
            return 1.0
        labels, own, far = (torch.cat(x) for x in zip(*self.forces, strict=True))
        rest = labels - size * far
        trained = (labels - own).norm() < _TRAINED * labels.norm()
        if trained and (own * rest).sum() > 0:
            return float((own * rest).sum() / own.square().sum())
        return float(rest.norm() / labels.norm())


class ChargeStart(EnergyStart):
    """Fits to batches of data, which :meth:`add` takes one after the other and :meth:`finish` uses.

    Args:
        layer: Charges of a model before training.
        cutoff: Largest length of an edge.
        search: True if a common factor of the charges is fitted.
    """

    layer: ChargeInteraction

    def __init__(self, layer: ChargeInteraction, cutoff: float, search: bool = False) -> None:
        super().__init__(layer)
        self.cutoff, self.search = cutoff, search
        elements = len(layer.names)
        columns = _PAIRS * elements * (elements + 1) // 2 + 1 if search else 0
        self.square = torch.zeros(columns, columns, dtype=torch.float64)
        self.product = torch.zeros(columns, dtype=torch.float64)

    def add(
        self, elements: Tensor, graphs: dict[str, Any], edge_index: Tensor, edge_vectors: Tensor,
        total_charge: Tensor | None, labels: Tensor | None, own: Tensor,
    ) -> None:  # fmt: skip
        """Add a batch.

        Args:
            elements: number of the element of each node.
            graphs: ``pos``, ``batch``, ``cell``, ``pbc`` and ``batch_size``.
            edge_index: edges, in both directions.
            edge_vectors: vector of each edge.
            total_charge: total charge of each graph.
            labels: forces of the data; ``None`` without.
            own: forces of the model.
        """
        layer, batch, count = self.layer, graphs["batch"], graphs["batch_size"]
        node_batch = NodeBatch.flat(elements, batch, count)
        charges = layer.constants.index_select(0, elements).double()
        layer.check(charges, elements, total_charge, node_batch)
        energies, far = self._charges(charges, graphs, layer.width)
        if not self.record(elements, node_batch, energies, labels, own, far):
            return
        if self.search:
            narrow = self._charges(charges, graphs, _NARROW * self.cutoff)[1]
            pairs = self._pair_forces(elements, edge_index, edge_vectors.detach().double())
            columns = torch.cat([pairs, narrow[..., None]], 2).flatten(0, 1).cpu()
            self.square += columns.mT @ columns
            self.product += columns.mT @ self.forces[-1][0].flatten()

    @torch.no_grad()
    def finish(self) -> float:
        """Set the offsets of the layer, and with ``search`` its scale; see :meth:`finish_energies`."""
        layer = self.layer
        if self.search:
            layer.scale.fill_(self._factor() ** 0.5)
        single = layer.coulomb_constant * layer.constants.cpu().double().nan_to_num() ** 2
        return self.finish_energies(single / (math.sqrt(2 * math.pi) * layer.width), float(layer.scale) ** 2)

    def _factor(self) -> float:
        """The factor of energies of charges that fits forces of labels best, together with forces between pairs."""
        size = self.square.diagonal().sqrt()
        size = torch.where(size > 0, size, 1.0)
        scaled = self.square / size / size[:, None]
        fitted = torch.linalg.lstsq(scaled, self.product / size, rcond=1e-10, driver="gelsd").solution
        if not (factor := float(fitted[-1] / size[-1])) > 0:
            raise ValueError(
                "charges must attract and repel as the forces of the data do to find their scale, got data whose "
                f"forces fit a factor of {factor:.3g}: give other charges, more frames with forces, or learn=False"
            )
        return factor

    def _charges(self, charges: Tensor, graphs: dict[str, Any], width: float) -> tuple[Tensor, Tensor]:
        """Energies of nodes, and forces."""
        pos, layer = graphs["pos"].detach().requires_grad_(), self.layer
        with torch.enable_grad():
            energies = layer.coulomb_constant * charge_energies(
                charges, **graphs | {"pos": pos}, width=width, method=layer.method, error=layer.error
            )
            (slopes,) = torch.autograd.grad(energies.sum(), pos)
        return energies.detach(), -slopes.double()

    def _pair_forces(self, elements: Tensor, edge_index: Tensor, vectors: Tensor) -> Float[Tensor, "nodes 3 columns"]:
        """Central forces between two elements, with radial functions that vanish at the cutoff."""
        first, second = edge_index
        low, high = torch.minimum(elements[first], elements[second]), torch.maximum(elements[first], elements[second])
        kinds = len(self.layer.names)
        pair, length = high * (high + 1) // 2 + low, vectors.norm(dim=1, keepdim=True)
        waves = math.pi * torch.arange(1, _PAIRS + 1, device=vectors.device) * length / self.cutoff
        radial = waves.sin() * (1 - (length / self.cutoff).square()).clamp(min=0) ** 2 / length
        out = vectors.new_zeros(len(elements) * kinds * (kinds + 1) // 2, 3, _PAIRS)
        out.index_add_(0, first * kinds * (kinds + 1) // 2 + pair, vectors[..., None] * radial[:, None])
        return out.unflatten(0, (len(elements), -1)).transpose(1, 2).flatten(2)


class _Pairs(NamedTuple):
    """Pairs of separate fragments: sums of inputs of their nodes, their distance, and the product of their charges that
    explains the force between them."""

    first: Float[Tensor, "pairs inputs"]
    second: Float[Tensor, "pairs inputs"]
    distance: Float[Tensor, " pairs"]
    product: Float[Tensor, " pairs"]


class PredictedStart(EnergyStart):
    """A fit of the linear part of predicted charges, to total charges and to net forces of separate fragments.

    Charges q = w x, with x the element of a node and its features, are such that they sum to the total charge of every
    graph, and that the force between the two fragments of a graph is that of their charges. Fragments are separate if
    no path of edges joins them. :meth:`add` takes batches one after the other, and :meth:`fit` uses them.
    """

    layer: PredictedChargeInteraction

    def __init__(self, layer: PredictedChargeInteraction) -> None:
        super().__init__(layer)
        self.totals: list[Tensor] = []
        self.pairs: list[_Pairs] = []
        self.inputs: list[Tensor] = []

    def add(
        self, elements: Tensor, features: Tensor, graphs: dict[str, Any], edge_index: Tensor, total_charge: Tensor,
        labels: Tensor | None,
    ) -> None:  # fmt: skip
        """Add a batch: the element of each node, its features, ``pos``, ``batch``, ``pbc`` and ``batch_size``, edges,
        total charges of graphs, and forces of the data."""
        batch = torch.zeros_like(elements) if graphs["batch"] is None else graphs["batch"]
        content = torch.nn.functional.one_hot(elements, len(self.layer.names))
        x = torch.cat([content.double(), features.detach().double()], 1)
        sums = x.new_zeros(graphs["batch_size"], x.shape[1]).index_add(0, batch, x)
        charge = total_charge.double().reshape(-1, 1) * self.layer.dielectric**-0.5
        self.totals.append(torch.cat([sums, charge], 1).cpu())
        self.inputs.append(x.cpu())
        if labels is None or not labels.any():
            return
        fragment = _fragments(len(elements), edge_index)
        own, of_node = fragment.unique(return_inverse=True)
        graph, sizes = batch[own], of_node.bincount()
        repeats = graphs["pbc"]
        open_graph = torch.ones_like(graph, dtype=torch.bool) if repeats is None else ~repeats.any(-1)[graph]
        two = (graph.bincount(minlength=graphs["batch_size"])[graph] == 2) & open_graph
        first, second = two.nonzero()[:, 0].view(-1, 2).unbind(1)

        def of_fragments(values: Tensor) -> Tensor:
            return values.new_zeros(len(own), values.shape[1]).index_add(0, of_node, values)

        force, inputs = of_fragments(labels.double()), of_fragments(x)
        center = of_fragments(graphs["pos"].detach().double()) / sizes[:, None]
        apart = center[first] - center[second]
        distance = apart.norm(dim=1)
        net = 0.5 * ((force[first] - force[second]) * apart).sum(1) / distance
        product = net * distance.square() / self.layer.coulomb_constant
        self.pairs.append(_Pairs(*(t.cpu() for t in (inputs[first], inputs[second], distance, product))))

    @torch.no_grad()
    def fit(self) -> float | None:
        """Set the charges of the layer. Return the part of the net forces between fragments, as a share of their sum of
        squares, that they explain; ``None`` if the batches have no separate fragments."""
        layer, elements = self.layer, len(self.layer.names)
        inputs = torch.cat(self.inputs)
        size = inputs[:, elements:].square().mean(0).sqrt()
        size = torch.where(size > 0, size, 1.0)
        layer.feature_size.copy_(size)
        units = torch.cat([torch.ones(elements, dtype=torch.float64), size])
        sums, totals = torch.cat(self.totals).split([len(units), 1], 1)
        sums, totals, inputs = sums / units, totals[:, 0], inputs / units
        penalty = _SMALL * inputs.mT @ inputs / len(inputs) + _RIDGE * torch.eye(len(units), dtype=units.dtype)
        pairs = _Pairs(*map(torch.cat, zip(*self.pairs, strict=True))) if self.pairs else None
        if pairs is None or not len(pairs.distance):
            pairs = None
            weights = _ridge(sums, totals, penalty)
        else:
            pairs = pairs._replace(first=pairs.first / units, second=pairs.second / units)
            weights = _of_products(pairs, elements) if not totals.any() else _ridge(sums, totals, penalty)
            weights = _refined(weights, sums, totals, pairs, penalty)
        if weights.any():
            layer.constants[:, 0] = (weights[:elements] / UNIT).to(layer.constants)
            layer.linear.weight[0] = (weights[elements:] / UNIT).to(layer.constants)
            nn.init.zeros_(cast("nn.Linear", layer.perceptron[-1]).weight[0])
        if pairs is None:
            fitted = "total charges alone" if totals.any() else "zero"
            _LOGGER.info("charges start from %s: no graph has two separate fragments", fitted)
            return None
        slope = pairs.distance**-2
        found = (pairs.first @ weights) * (pairs.second @ weights)
        explained = 1 - float(((pairs.product - found) * slope).square().sum() / (pairs.product * slope).square().sum())
        _LOGGER.info("charges at the start explain %.0f %% of the net forces of separate fragments", 100 * explained)
        return explained

    def finish(self) -> float:
        """Set the offsets of the layer; see :meth:`finish_energies`. The factor is at most 1: charges are learned, so
        other forces need not cancel theirs."""
        return min(1.0, self.finish_energies(torch.zeros(len(self.layer.names), dtype=torch.float64)))


def fit_predicted(
    layer: PredictedChargeInteraction, batches: Sequence[_Data], read: Callable[[_Data], tuple[Any, ...]],
    features: Callable[[_Data], Tensor], forces: Callable[[_Data], tuple[Tensor, Tensor, Tensor]],
) -> float:  # fmt: skip
    """Fit predicted charges of a model to batches of its data. Return the factor of :meth:`PredictedStart.finish`.

    Args:
        layer: the charges.
        batches: batches of data.
        read: returns the elements, graphs, edges, total charges and labels of :meth:`PredictedStart.add`.
        features: returns the features of nodes.
        forces: returns energies of nodes of the charges, forces of the model without charges, and forces of the
            charges.
    """
    start = PredictedStart(layer)
    for data in batches:
        elements, graphs, edge_index, total_charge, labels = read(data)
        start.add(elements, features(data), graphs, edge_index, known(total_charge), labels)
    start.fit()
    for data in batches:
        elements, graphs, _, _, labels = read(data)
        energies, own, far = forces(data)
        node_batch = NodeBatch.flat(elements, graphs["batch"], graphs["batch_size"])
        start.record(elements, node_batch, energies, labels, own, far)
    return start.finish()


def _fragments(count: int, edge_index: Tensor) -> Tensor:
    """The smallest node of the fragment of each node; edges join nodes of a fragment."""
    found = torch.arange(count, device=edge_index.device)
    while True:
        least = found.scatter_reduce(0, edge_index[1], found[edge_index[0]], "amin")
        least = least[least]
        if torch.equal(least, found):
            return found
        found = least


def _ridge(x: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    """The weights w for which the mean square of x w - y plus w penalty w is least."""
    return torch.linalg.solve(x.mT @ x / len(x) + penalty, x.mT @ y / len(x))


def _of_products(pairs: _Pairs, elements: int) -> Tensor:
    """Charges of elements whose products explain those of pairs: of the two signs, one."""
    x = (pairs.first[:, :elements, None] * pairs.second[:, None, :elements]).flatten(1)
    products = _ridge(x, pairs.product, _RIDGE * torch.eye(x.shape[1], dtype=x.dtype)).view(elements, elements)
    size, vectors = torch.linalg.eigh(products + products.mT)
    weights = pairs.first.new_zeros(pairs.first.shape[1])
    weights[:elements] = vectors[:, -1] * (0.5 * size[-1].clamp(min=0)).sqrt()
    return weights


def _refined(weights: Tensor, sums: Tensor, totals: Tensor, pairs: _Pairs, penalty: Tensor) -> Tensor:
    """Weights improved by Gauss-Newton steps, for total charges and for products of charges."""

    def loss(w: Tensor) -> Tensor:
        products = (pairs.first @ w) * (pairs.second @ w)
        off = (totals - sums @ w).square().mean() + _OF_PAIRS * (pairs.product - products).square().mean()
        return off + w @ penalty @ w

    for _ in range(_STEPS):
        first, second = pairs.first @ weights, pairs.second @ weights
        slope = second[:, None] * pairs.first + first[:, None] * pairs.second
        off = sums.mT @ (totals - sums @ weights) / len(sums)
        off = off + _OF_PAIRS * slope.mT @ (pairs.product - first * second) / len(slope) - penalty @ weights
        curvature = sums.mT @ sums / len(sums) + _OF_PAIRS * slope.mT @ slope / len(slope) + penalty
        step = torch.linalg.solve(curvature, off)
        sizes = [s for s in (1.0, 0.5, 0.25, 0.1) if loss(weights + s * step) < loss(weights)]
        if not sizes:
            break
        weights = weights + sizes[0] * step
    return weights
