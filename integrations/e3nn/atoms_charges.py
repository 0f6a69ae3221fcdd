"""Charges between atoms, for the adapters of MACE and NequIP: layers, and their fits to data before training.
nequip-package takes this file along, so it imports from files, not from packages."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from e3nn import o3
from torch import Tensor, nn

from tg_equiattn.ewald.charges import COULOMB_CONSTANT, UNIT, ChargeOutputs, PredictedChargeInteraction
from tg_equiattn.ewald.ewald_attention import charge_energies
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.torch_state import is_traced

from .atoms_attention import Atoms
from .ewald_attention import IrrepsChargeInteraction, IrrepsPredictedChargeInteraction

Layer = IrrepsChargeInteraction | IrrepsPredictedChargeInteraction
_RANK = 1e-2  # singular values of compositions below this, relative to the largest, are left to the model
_RADIAL = 8  # radial functions of forces between two elements
_NARROW = 0.3  # width over cutoff with which a factor of charges is fitted: the kernel is 1 / r beyond the cutoff
_SMALL = 0.1  # weight of the mean square of predicted charges
_SMOOTH = 0.3  # weight of the mean square of their derivatives by positions, in A²
_RIDGE = 1e-6  # weight of the square of their weights
_OF_PAIRS = 0.1  # weight of products of charges of fragments, relative to that of total charges
_STEPS = 50
_LOGGER = logging.getLogger(__name__)
_TRAINED = 0.5  # error of a model's forces relative to labels, below which it counts as trained


def layer_of_charges(
    charges: Mapping[str, float] | Literal["predicted"], learn: bool | Literal["scale"], names: Sequence[str],
    kind: str, irreps: Sequence[o3.Irreps], width: float | None, cutoff: float, exclude_near: bool = True,
    **options: Any,
) -> Layer:  # fmt: skip
    """The layer of charges of a model.

    Args:
        charges: charge of each element by its name, or "predicted".
        learn: as the adapters describe it.
        names: names of the elements of the model, in the order of their numbers.
        kind: the word of the host for an element, for errors.
        irreps: irreps of all features from which charges are predicted, and of those from which transfers are learned.
        width: width of the kernel; ``None`` means 0.4 of the cutoff, or 0.6 for predicted charges, which are larger.
        cutoff: largest length of an edge.
        exclude_near: true if predicted charges have no energies between near atoms.
        options: settings of the layer.
    """
    predicted = isinstance(charges, str)
    options |= {"cutoff": cutoff, "width": (0.6 if predicted else 0.4) * cutoff if width is None else width}
    if isinstance(charges, str):
        if learn:
            raise ValueError(
                f'charges must be a charge for each {kind}, or "predicted" without learn, got {charges!r} with '
                f"learn={learn!r}"
            )
        return IrrepsPredictedChargeInteraction(names, irreps[0], exclude_near=exclude_near, **options)
    if unknown := [name for name in charges if name not in names]:
        raise ValueError(
            f"charges must have the names of {kind}s of the model, {', '.join(map(repr, names))}, got "
            f"{', '.join(map(repr, unknown))}"
        )
    each = {name: charges.get(name, torch.nan) for name in names}
    return IrrepsChargeInteraction(each, irreps[1] if learn is True else None, **options)


def interact(
    layer: Layer, atoms: Atoms, features: Tensor, graphs: dict[str, Any], neutral: bool = False
) -> ChargeOutputs:
    """Energies, charges and dipoles of atoms. The layer reads the last of the ``features``, if it reads any. With
    ``neutral``, predicted charges sum to zero if there is no total charge, with a warning."""
    read: dict[str, Tensor] = {}
    charge = atoms.total_charge
    if neutral and charge is None and isinstance(layer, PredictedChargeInteraction):
        charge = features.new_zeros(graphs.get("batch_size", 1))
        if not is_traced(charge):
            warnings.warn("no total charge is given for predicted charges: frames count as neutral", stacklevel=2)
    if layer.weights is not None:
        read = {"features": features[:, -layer.irreps_in.dim :], "edge_index": atoms.edge_index,
                "edge_vectors": atoms.edge_vectors}  # fmt: skip
    return layer(atoms.elements, total_charge=charge, **read, **graphs)


class Sample(NamedTuple):
    """A batch of data, and the results of a model with charges on it.

    Attributes:
        atoms: the atoms.
        graphs: ``pos``, ``batch``, ``cell``, ``pbc`` and ``batch_size``.
        labels: forces of the data; ``None`` if the data have none.
        scalars: features that the layer of charges reads; ``None`` if it reads none.
        slopes: derivatives of the scalars along one random direction of all positions together; ``None`` if there are
            no scalars.
        energies: energies of nodes of the charges.
        own: forces of the model alone, to which those of the charges are not added.
        far: forces of the charges.
    """

    atoms: Atoms
    graphs: dict[str, Any]
    labels: Tensor | None
    scalars: Tensor | None
    slopes: Tensor | None
    energies: Tensor
    own: Tensor
    far: Tensor


def slopes_of(scalars: Tensor, pos: Tensor) -> Tensor:
    """Derivatives of scalars along a random direction of all positions, with the shape of the scalars. The mean of
    their products over directions is that of all derivatives by positions."""
    weights = torch.zeros_like(scalars, requires_grad=True)
    (product,) = torch.autograd.grad(scalars, pos, weights, create_graph=True)
    direction = torch.randn(product.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.autograd.grad(product, weights, direction.to(product), retain_graph=True)[0]


def fit_charges(layer: Any, samples: Callable[[], Iterable[Sample]], search: bool = False) -> float:
    """Fit charges to batches of data: predicted charges, a common factor, and the offsets of elements. Return the
    factor by which the scale of forces of the model changes.

    Offsets are a least-squares fit of the energies of charges by composition, starting from the energies of single
    nodes. Let the remaining forces be those of the data minus those of charges. The factor of a new model is the size
    of the remaining forces, divided by the size of the forces of the data. The factor of a trained model is the best
    fit of the remaining forces by the model's own forces. With predicted charges it is at most 1: charges are learned,
    so other forces need not cancel the forces of charges.

    Raise ValueError if a common factor is asked for, and the data have no forces.

    Args:
        layer: the charges, given or predicted.
        samples: runs the model on the batches.
        search: true if a common factor of the charges is fitted to forces, together with forces between pairs.
    """
    predicted = isinstance(layer, PredictedChargeInteraction)
    if predicted:
        fit_predicted_charges(layer, samples())
    kinds, learned = len(layer.names), not predicted and layer.weights is not None
    columns = _RADIAL * kinds * (kinds + 1) // 2 + 1 if search else 0
    square, product = (torch.zeros(columns, n, dtype=torch.float64) for n in (columns, 1))
    rows: list[Tensor] = []
    forces: list[tuple[Tensor, ...]] = []
    sizes: list[Tensor] = []
    for sample in samples():
        node_batch = NodeBatch.flat(sample.atoms.elements, sample.graphs["batch"], sample.graphs["batch_size"])
        content = nn.functional.one_hot(sample.atoms.elements, kinds).double()
        rows.append(node_batch.mean(torch.cat([content, sample.energies.detach().double()[:, None]], 1)).cpu())
        if learned and sample.scalars is not None:
            sizes.append(sample.scalars.detach().square().mean())
        if sample.labels is None or not sample.labels.any():
            continue
        forces.append(tuple(x.detach().double().cpu() for x in (sample.labels, sample.own, sample.far)))
        if search:
            fitted = torch.cat([_pair_forces(layer, sample), _narrow_forces(layer, sample)], 2).flatten(0, 1).cpu()
            square += fitted.mT @ fitted
            product += fitted.mT @ forces[-1][0].flatten()[:, None]
    if search and not forces:
        raise ValueError(
            'batches must have forces of the data with learn="scale", got none, or zeros alone: name the key under '
            "which the data have them (for MACE --forces_key, or a KeySpecification), or leave out learn"
        )
    with torch.no_grad():
        if sizes and (size := torch.stack(sizes).mean().sqrt()) > 0:
            layer.feature_size.fill_(size)
        single, scale = torch.zeros(kinds, dtype=torch.float64), 1.0
        if not predicted:
            if search:
                layer.scale.fill_(_factor(square, product) ** 0.5)
            single, scale = single_energies(layer).cpu(), float(layer.scale) ** 2
        content, energies = torch.cat(rows).split([kinds, 1], 1)
        lacking = energies - content @ single[:, None]
        offsets = single + torch.linalg.lstsq(content, lacking, rcond=_RANK, driver="gelsd").solution[:, 0]
        layer.offsets.copy_(torch.zeros_like(offsets) if layer.exclude_near else offsets)
        if not forces:
            return 1.0
        labels, model_forces, charge_forces = (torch.cat(x) for x in zip(*forces, strict=True))
        rest = labels - scale * charge_forces
        trained = (labels - model_forces).norm() < _TRAINED * labels.norm()
        if trained and (model_forces * rest).sum() > 0:
            factor = float((model_forces * rest).sum() / model_forces.square().sum())
        else:
            factor = float(rest.norm() / labels.norm())
        return min(1.0, factor) if predicted else factor


def single_energies(layer: Any) -> Tensor:
    """The energies of single nodes of the elements, for charges that are given, without their common factor."""
    return COULOMB_CONSTANT * layer.constants.double().nan_to_num() ** 2 / (math.sqrt(2 * math.pi) * layer.width)


def energies_beside_kspace(layer: Any) -> Tensor:
    """The energy of each element that a model has beside its sums over waves without single nodes, which are those of
    LAMMPS's kspace."""
    return layer.scale.double().square() * (single_energies(layer) - layer.offsets.double())


def _factor(square: Tensor, product: Tensor) -> float:
    """The factor of energies of charges that fits forces of labels best, together with forces between pairs."""
    size = square.diagonal().sqrt()
    size = torch.where(size > 0, size, 1.0)[:, None]
    scaled = square / size / size.mT
    fitted = torch.linalg.lstsq(scaled, product / size, rcond=1e-10, driver="gelsd").solution
    if not (factor := float(fitted[-1] / size[-1])) > 0:
        raise ValueError(
            "charges must attract and repel as the forces of the data do to find their scale, got data whose "
            f"forces fit a factor of {factor:.3g}: give other charges, more frames with forces, or learn=False"
        )
    return factor


def _narrow_forces(layer: Any, sample: Sample) -> Tensor:
    """Forces of the charges through a narrow kernel, (nodes, 3, 1)."""
    charges = layer.constants.index_select(0, sample.atoms.elements).double()
    pos = sample.graphs["pos"].detach().requires_grad_()
    with torch.enable_grad():
        width, options = _NARROW * layer.cutoff, {"method": layer.method, "error": layer.error}
        energies = charge_energies(charges, **sample.graphs | {"pos": pos}, width=width, **options)
        (slopes,) = torch.autograd.grad(COULOMB_CONSTANT * energies.sum(), pos)
    return -slopes.double()[..., None]


def _pair_forces(layer: Any, sample: Sample) -> Tensor:
    """Central forces between two elements, with radial functions that vanish at the cutoff, (nodes, 3, columns)."""
    (first, second), vectors = sample.atoms.edge_index, sample.atoms.edge_vectors.detach().double()
    elements, kinds = sample.atoms.elements, len(layer.names)
    low, high = torch.minimum(elements[first], elements[second]), torch.maximum(elements[first], elements[second])
    pair, length = high * (high + 1) // 2 + low, vectors.norm(dim=1, keepdim=True)
    waves = math.pi * torch.arange(1, _RADIAL + 1, device=vectors.device) * length / layer.cutoff
    radial = waves.sin() * (1 - (length / layer.cutoff).square()).clamp(min=0) ** 2 / length
    out = vectors.new_zeros(len(elements) * kinds * (kinds + 1) // 2, 3, _RADIAL)
    out.index_add_(0, first * kinds * (kinds + 1) // 2 + pair, vectors[..., None] * radial[:, None])
    return out.unflatten(0, (len(elements), -1)).transpose(1, 2).flatten(2)


def check_informative(found: Iterable[bool]) -> None:
    """Raise ValueError unless some of the batches say what predicted charges are."""
    if not any(found):
        raise ValueError(
            'batch must say what charges are for charges="predicted", got no graph with a total charge, with forces '
            "on two separate fragments, or with a label of its dipole or Born charges: leave out charges, since such "
            "data are learned better and faster without them; or give more of the data, or charges of elements"
        )


def is_informative(atoms: Atoms, graphs: dict[str, Any], forces: Tensor | None, *labels: Tensor | None) -> bool:
    """True if a batch says what predicted charges are: by total charges, by ``labels`` of charge, or by forces on
    separate fragments. So it does without total charges, for which the layer asks."""
    if atoms.total_charge is None or any(x is not None and x.any() for x in (atoms.total_charge, *labels)):
        return True
    return forces is not None and bool(forces.any()) and len(_separate(atoms, graphs)[1]) > 0


class _Pairs(NamedTuple):
    """Pairs of separate fragments: sums of inputs of their nodes, their distance, and the product of their charges that
    explains the force between them."""

    first: Tensor  # pairs, inputs
    second: Tensor
    distance: Tensor  # pairs
    product: Tensor


@torch.no_grad()
def fit_predicted_charges(layer: PredictedChargeInteraction, samples: Iterable[Sample]) -> float | None:
    """Fit the linear part of predicted charges to total charges and to net forces of separate fragments.

    Charges q = w x, with x the element of a node and its features, are such that they sum to the total charge of every
    graph, and that the force between the two fragments of a graph is that of their charges. Fragments are separate if
    no path of edges joins them. Charges are also small, and change slowly with positions: a charge at the potential phi
    has the force -phi dq/dpos. If the data have neither charged graphs nor separate fragments, charges are zero, and
    only labels of charge change them. Return the part of the net forces between fragments, as a share of their sum of
    squares, that charges explain; ``None`` if the batches have no separate fragments.
    """
    every: list[tuple[Tensor, ...]] = []
    slopes: list[Tensor] = []
    each: list[_Pairs] = []
    for sample in samples:
        content = nn.functional.one_hot(sample.atoms.elements, len(layer.names)).double()
        x = torch.cat([content, cast("Tensor", sample.scalars).detach().double()], 1)
        sums = NodeBatch.flat(x, sample.graphs["batch"], sample.graphs["batch_size"]).sum(x)
        charge = cast("Tensor", sample.atoms.total_charge).double().flatten() * layer.dielectric**-0.5
        every.append((x.cpu(), sums.cpu(), charge.cpu()))
        slopes.append(cast("Tensor", sample.slopes).detach().double().cpu())
        if sample.labels is not None and sample.labels.any():
            each.append(_pairs_of_fragments(x, sample))
    inputs, sums, totals = map(torch.cat, zip(*every, strict=True))
    elements = len(layer.names)
    size = inputs[:, elements:].square().mean(0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    layer.feature_size.copy_(size)
    units = torch.cat([torch.ones(elements, dtype=torch.float64), size])
    sums, inputs = sums / units, inputs / units
    penalty = _SMALL * inputs.mT @ inputs / len(inputs) + _RIDGE * torch.eye(len(units), dtype=units.dtype)
    slope = torch.cat(slopes) / size
    penalty[elements:, elements:] += _SMOOTH * slope.mT @ slope / len(slope)
    pairs = _Pairs(*map(torch.cat, zip(*each, strict=True))) if each else None
    if pairs is None or not len(pairs.distance):
        pairs = None
        weights = _ridge(sums, totals, penalty)
    else:
        pairs = pairs._replace(first=pairs.first / units, second=pairs.second / units)
        weights = _of_products(pairs, elements) if not totals.any() else _ridge(sums, totals, penalty)
        weights = _refined(weights, sums, totals, pairs, penalty)
    layer.constants[:, 0] = (weights[:elements] / UNIT).to(layer.constants)
    layer.linear.weight[0] = (weights[elements:] / UNIT).to(layer.constants)
    nn.init.zeros_(cast("nn.Linear", layer.perceptron[-1]).weight[0])
    if pairs is None:
        start = "total charges alone" if totals.any() else "zero"
        _LOGGER.info("charges start from %s: no graph has two separate fragments", start)
        return None
    slope = pairs.distance**-2
    products = (pairs.first @ weights) * (pairs.second @ weights)
    explained = 1 - float(((pairs.product - products) * slope).square().sum() / (pairs.product * slope).square().sum())
    _LOGGER.info("charges at the start explain %.0f %% of the net forces of separate fragments", 100 * explained)
    return explained


def _pairs_of_fragments(x: Tensor, sample: Sample) -> _Pairs:
    """Pairs of fragments of open graphs that have two, with sums of the inputs x of nodes."""
    of_node, first, second = _separate(sample.atoms, sample.graphs)
    values = [cast("Tensor", sample.labels).double(), x, sample.graphs["pos"].detach().double()]
    sizes = of_node.bincount()
    force, inputs, center = (v.new_zeros(len(sizes), v.shape[1]).index_add(0, of_node, v) for v in values)
    center = center / sizes[:, None]
    apart = center[first] - center[second]
    distance = apart.norm(dim=1)
    net = 0.5 * ((force[first] - force[second]) * apart).sum(1) / distance
    product = net * distance.square() / COULOMB_CONSTANT
    return _Pairs(*(t.cpu() for t in (inputs[first], inputs[second], distance, product)))


def _separate(atoms: Atoms, graphs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The fragment of each node, and the first and the second fragment of each open graph that has two."""
    nodes, device = len(atoms.elements), atoms.elements.device
    batch = torch.zeros_like(atoms.elements) if graphs["batch"] is None else graphs["batch"]
    # the smallest node of the fragment of each node; edges join nodes of a fragment
    smallest = torch.arange(nodes, device=device)
    source, target = atoms.edge_index
    while True:
        least = smallest.scatter_reduce(0, target, smallest[source], "amin")
        least = least[least]
        if torch.equal(least, smallest):
            break
        smallest = least
    fragments, of_node = smallest.unique(return_inverse=True)
    graph, repeats = batch[fragments], graphs["pbc"]
    open_graph = torch.ones_like(graph, dtype=torch.bool) if repeats is None else ~repeats.any(-1)[graph]
    two = (graph.bincount(minlength=graphs["batch_size"])[graph] == 2) & open_graph
    return of_node, *two.nonzero()[:, 0].view(-1, 2).unbind(1)


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
