"""Charges in a MACE model: layers, what is fitted at the start, and labels of charge in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ase.data import chemical_symbols
from e3nn import o3
from mace.modules.models import MACE
from torch import Tensor

from tg_equiattn.checks import not_negative
from tg_equiattn.nn.waves.charge_start import ChargeStart, fit_predicted
from tg_equiattn.nn.waves.charges import ChargeOutputs

from ..e3nn.atoms_attention import total_charge_of
from ..e3nn.charge_interaction import IrrepsChargeInteraction, IrrepsPredictedChargeInteraction
from .features import edge_vectors, graphs_of

Layer = IrrepsChargeInteraction | IrrepsPredictedChargeInteraction


def charges_for(
    model: MACE, charges: Mapping[str, float] | str, learn: bool, width: float | None, **options: Any
) -> Layer:
    """The layer of charges for the elements and features of a model."""
    names, like = [chemical_symbols[z] for z in model.atomic_numbers.tolist()], next(model.parameters())
    share = 0.6 if isinstance(charges, str) else 0.4  # of the cutoff; charges in molecules are larger
    options |= {
        "cutoff": float(model.r_max), "width": share * float(model.r_max) if width is None else width,
        "avg_num_neighbors": float(model.interactions[-1].avg_num_neighbors),
    }  # fmt: skip
    if isinstance(charges, str):
        irreps = sum((product.linear.irreps_out for product in model.products), o3.Irreps())
        return IrrepsPredictedChargeInteraction(names, irreps, **options).to(like.device, like.dtype)
    if unknown := [name for name in charges if name not in names]:
        raise ValueError(f"charges must be of elements of the model, {', '.join(names)}, got {', '.join(unknown)}")
    irreps = model.products[-1].linear.irreps_out if learn else None
    layer = IrrepsChargeInteraction({name: charges.get(name, torch.nan) for name in names}, irreps, **options)
    return layer.to(like.device, like.dtype)


def interact(layer: Layer, data: dict[str, Any], displacement: Tensor | None, features: Tensor) -> ChargeOutputs:
    """Energies, charges and dipoles for the data of a call, from the features of all blocks."""
    own: dict[str, Any] = {}
    if layer.weights is not None:
        own = {"features": features[:, -layer.irreps_in.dim :], "edge_index": data["edge_index"],
               "edge_vectors": edge_vectors(data)}  # fmt: skip
    elements, total_charge = data["node_attrs"].argmax(1), total_charge_of(data)
    return layer(elements, total_charge=total_charge, **own, **graphs_of(data, displacement))


def fit_start(model: MACE, layer: Layer, batches: Iterable[dict[str, Any]], search: bool) -> None:
    """Fit the layer, and the scale of the model, to batches of data."""
    if isinstance(layer, IrrepsPredictedChargeInteraction):
        factor = _fit_predicted(model, layer, list(batches))
    else:
        factor = _fit_given(model, layer, batches, search)
    if hasattr(model, "scale_shift"):
        model.scale_shift.scale.mul_(factor)


def _read(data: dict[str, Any]) -> tuple[Any, ...]:
    """Elements, graphs, edges, total charges and labels of forces."""
    elements, graphs = data["node_attrs"].argmax(1), graphs_of(data, None)
    return elements, graphs, data["edge_index"], total_charge_of(data), data.get("forces")


def _fit_given(model: MACE, layer: IrrepsChargeInteraction, batches: Iterable[dict[str, Any]], search: bool) -> float:
    start, squares = ChargeStart(layer, float(model.r_max), search), []
    for data in batches:
        out = model(dict(data))
        if layer.weights is not None:
            squares.append(layer.scalars_of(out["node_feats"][:, -layer.irreps_in.dim :]).detach().square().mean())
        elements, graphs, edge_index, total_charge, labels = _read(data)
        start.add(elements, graphs, edge_index, edge_vectors(data), total_charge, labels, out["forces"])
    if squares and (size := torch.stack(squares).mean().sqrt()) > 0:
        layer.feature_size.fill_(size)
    return start.finish()


def _fit_predicted(model: MACE, layer: IrrepsPredictedChargeInteraction, batches: list[dict[str, Any]]) -> float:
    def features(data: dict[str, Any]) -> Tensor:
        return layer.scalars_of(model(dict(data), compute_force=False)["node_feats"])

    def forces(data: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        data = dict(data)
        out = model(data, training=True)
        energies = interact(layer, data, None, out["node_feats"]).energies
        (slopes,) = torch.autograd.grad(energies.sum(), data["positions"])
        return energies, out["forces"], -slopes

    return fit_predicted(layer, batches, _read, features, forces)


class ChargeLoss(torch.nn.Module):
    """A loss of MACE plus mean squared errors of labels of charge, for models with charges that are learned.

    Args:
        loss: A loss of MACE, of energies and forces, for example.
        born_charges: Weight of Born effective charges, in e². Graphs have them as ``born_charges`` ``(atoms, 3, 3)``,
            NaN where an atom has none.
        dipole: Weight of dipoles, in (e Å)². Graphs have them as ``dipole``, and MACE's ``dipole_weight`` says which
            have none.
        total_charge: Weight of total charges, in e², which the learned factor of charges changes. With charges that are
            predicted, it is the weight of the charge that is missing and shared.

    Example::

        graph.born_charges = torch.tensor(atoms.arrays["born_charges"]).view(-1, 3, 3)  # of every AtomicData
        loss = ChargeLoss(WeightedEnergyForcesLoss(1.0, 10.0), born_charges=1.0)
    """

    def __init__(
        self, loss: torch.nn.Module, *, born_charges: float = 0.0, dipole: float = 0.0, total_charge: float = 0.0
    ) -> None:
        super().__init__()
        not_negative(born_charges=born_charges, dipole=dipole, total_charge=total_charge)
        self.loss, self.born_charges, self.dipole, self.total_charge = loss, born_charges, dipole, total_charge

    def forward(self, ref: Any, pred: dict[str, Any], ddp: bool | None = None) -> Tensor:
        out = self.loss(ref=ref, pred=pred, ddp=ddp)
        if self.born_charges:
            if pred.get("born_charges") is None:
                raise ValueError("graphs must have born_charges of shape (atoms, 3, 3), which born_charges weighs")
            off = pred["born_charges"] - ref["born_charges"]
            known = ~off.isnan()
            out = out + self.born_charges * torch.where(known, off, 0.0).square().sum() / known.sum().clamp(min=1)
        if self.dipole:
            off = (pred["dipole"] - ref["dipole"].view(-1, 3)).square() * ref["dipole_weight"].view(-1, 3)
            out = out + self.dipole * off.mean()
        if self.total_charge and "shared_charge" in pred:
            out = out + self.total_charge * pred["shared_charge"].square().mean()
        elif self.total_charge:
            found = torch.zeros_like(ref["total_charge"]).index_add(0, ref["batch"], pred["charges"])
            out = out + self.total_charge * (found - ref["total_charge"]).square().mean()
        return out
