"""Charges of elements in a MACE model: how they are made, and what of the model is fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ase.data import chemical_symbols
from e3nn import o3
from mace.modules.models import MACE
from torch import Tensor

from tg_equiattn.nn.waves.charges import ChargeOutputs

from ..e3nn.charge_interaction import IrrepsChargeInteraction
from .features import edge_vectors, graphs_of

_RANK = 1e-2  # singular values of compositions below this, relative to the largest, are left to the model
_TRAINED = 0.5  # error of forces relative to labels, below which a model counts as trained


def charges_for(
    model: MACE, charges: Mapping[str, float], learn: bool, width: float | None, **options: Any
) -> IrrepsChargeInteraction:
    """The layer of charges for the elements and features of a model."""
    names = [chemical_symbols[z] for z in model.atomic_numbers.tolist()]
    if unknown := [name for name in charges if name not in names]:
        raise ValueError(f"charges must be of elements of the model, {', '.join(names)}, got {', '.join(unknown)}")
    irreps = last_irreps(model) if learn else None
    layer = IrrepsChargeInteraction(
        {name: charges.get(name, torch.nan) for name in names}, irreps, cutoff=float(model.r_max),
        width=0.4 * float(model.r_max) if width is None else width,
        avg_num_neighbors=float(model.interactions[-1].avg_num_neighbors), **options,
    )  # fmt: skip
    like = next(model.parameters())
    return layer.to(like.device, like.dtype)


def last_irreps(model: MACE) -> o3.Irreps:
    """Irreps of the features of the last block."""
    return o3.Irreps(model.products[-1].linear.irreps_out)


def interact(
    layer: IrrepsChargeInteraction, data: dict[str, Any], displacement: Tensor | None, features: Tensor | None
) -> ChargeOutputs:
    """Energies, charges and dipoles for the data of a call, from the features of all blocks."""
    own: dict[str, Any] = {}
    if layer.weights is not None and features is not None:
        own = {"features": features[:, -layer.irreps_in.dim :], "edge_index": data["edge_index"],
               "edge_vectors": edge_vectors(data)}  # fmt: skip
    elements, charge = data["node_attrs"].argmax(1), data.get("total_charge")
    return layer(elements, total_charge=charge, **own, **graphs_of(data, displacement))


def fit_start(model: MACE, layer: IrrepsChargeInteraction, batches: Iterable[dict[str, Any]]) -> float:
    """Fit what the energies of charges add to a model before training.

    Offsets of the layer, an energy of each element, become those that explain its energies best, starting from the
    energies of single atoms. Returns the factor of the scale of the model. For new models it is the size of forces of
    labels minus those of charges, relative to labels. For trained models it is the factor of their own forces that fits
    this difference best. Without forces it is 1.
    """
    compositions, energies, sums = [], [], torch.zeros(5, dtype=torch.float64)
    for data in batches:
        pos = data["positions"].detach().requires_grad_()
        count, features = data["ptr"].numel() - 1, None
        out = model(dict(data))
        if layer.weights is not None:
            features = out["node_feats"].detach()
            layer.feature_size.copy_(features[:, -layer.irreps_in.dim :].square().mean().sqrt().clamp(min=1e-12))
        found = interact(layer, data | {"positions": pos}, None, features)
        far = -torch.autograd.grad(found.energies.sum(), pos)[0].double()
        each = torch.zeros(count, layer.constants.shape[0] + 1, dtype=pos.dtype, device=pos.device)
        each.index_add_(0, data["batch"], torch.cat([data["node_attrs"], found.energies.detach()[:, None]], 1))
        each = each.to("cpu", torch.float64) / data["ptr"].diff()[:, None].cpu()
        compositions.append(each[:, :-1])
        energies.append(each[:, -1])
        if data.get("forces") is not None:
            labels, own = data["forces"].double(), out["forces"].detach().double()
            pairs = [(labels, labels), (labels - far,) * 2, (labels - own,) * 2, (own, labels - far), (own, own)]
            sums += torch.stack([(a * b).sum() for a, b in pairs]).cpu()
    content, energy = torch.cat(compositions), torch.cat(energies)
    single = layer.coulomb_constant * layer.constants.cpu().double().nan_to_num() ** 2 / layer.width
    single = single / (2 * torch.pi) ** 0.5
    lacking = (energy - content @ single)[:, None]
    found = torch.linalg.lstsq(content, lacking, rcond=_RANK, driver="gelsd").solution[:, 0]
    layer.offsets.copy_(single + found)
    label, rest, error, product, square = sums.tolist()
    if not label:
        return 1.0
    trained = error < _TRAINED**2 * label and product > 0
    return product / square if trained else (rest / label) ** 0.5
