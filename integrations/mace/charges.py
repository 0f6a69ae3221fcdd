"""Charges of elements in a MACE model: what is fitted to them at the start, and labels of charge in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ase.data import chemical_symbols
from mace.modules.models import MACE
from torch import Tensor

from tg_equiattn.checks import not_negative
from tg_equiattn.nn.waves.charge_start import ChargeStart
from tg_equiattn.nn.waves.charges import ChargeOutputs

from ..e3nn.atoms_attention import total_charge_of
from ..e3nn.charge_interaction import IrrepsChargeInteraction
from .features import edge_vectors, graphs_of


def charges_for(
    model: MACE, charges: Mapping[str, float], learn: bool, width: float | None, **options: Any
) -> IrrepsChargeInteraction:
    """The layer of charges for the elements and features of a model."""
    names = [chemical_symbols[z] for z in model.atomic_numbers.tolist()]
    if unknown := [name for name in charges if name not in names]:
        raise ValueError(f"charges must be of elements of the model, {', '.join(names)}, got {', '.join(unknown)}")
    irreps = model.products[-1].linear.irreps_out if learn else None
    layer = IrrepsChargeInteraction(
        {name: charges.get(name, torch.nan) for name in names}, irreps, cutoff=float(model.r_max),
        width=0.4 * float(model.r_max) if width is None else width,
        avg_num_neighbors=float(model.interactions[-1].avg_num_neighbors), **options,
    )  # fmt: skip
    like = next(model.parameters())
    return layer.to(like.device, like.dtype)


def interact(
    layer: IrrepsChargeInteraction, data: dict[str, Any], displacement: Tensor | None, features: Tensor
) -> ChargeOutputs:
    """Energies, charges and dipoles for the data of a call, from the features of all blocks."""
    own: dict[str, Any] = {}
    if layer.weights is not None:
        own = {"features": features[:, -layer.irreps_in.dim :], "edge_index": data["edge_index"],
               "edge_vectors": edge_vectors(data)}  # fmt: skip
    elements, total_charge = data["node_attrs"].argmax(1), total_charge_of(data)
    return layer(elements, total_charge=total_charge, **own, **graphs_of(data, displacement))


def fit_start(model: MACE, layer: IrrepsChargeInteraction, batches: Iterable[dict[str, Any]], search: bool) -> None:
    """Fit the layer, and the scale of the model, to batches of data."""
    start, squares = ChargeStart(layer, float(model.r_max), search), []
    for data in batches:
        out = model(dict(data))
        if layer.weights is not None:
            squares.append(out["node_feats"][:, -layer.irreps_in.dim :].detach().square().mean())
        start.add(
            data["node_attrs"].argmax(1), graphs_of(data, None), data["edge_index"], edge_vectors(data),
            total_charge_of(data), data.get("forces"), out["forces"],
        )  # fmt: skip
    factor = start.finish()
    if hasattr(model, "scale_shift"):
        model.scale_shift.scale.mul_(factor)
    if squares and (size := torch.stack(squares).mean().sqrt()) > 0:
        layer.feature_size.copy_(size)


class ChargeLoss(torch.nn.Module):
    """A loss of MACE plus mean squared errors of labels of charge, for models with charges that are learned.

    Args:
        loss: A loss of MACE, of energies and forces, for example.
        born_charges: Weight of Born effective charges, in e². Graphs have them as ``born_charges`` ``(atoms, 3, 3)``,
            NaN where an atom has none.
        dipole: Weight of dipoles, in (e Å)². Graphs have them as ``dipole``, and MACE's ``dipole_weight`` says which
            have none.
        total_charge: Weight of total charges, in e², which the learned factor of charges changes.

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
        if self.total_charge:
            found = torch.zeros_like(ref["total_charge"]).index_add(0, ref["batch"], pred["charges"])
            out = out + self.total_charge * (found - ref["total_charge"]).square().mean()
        return out
