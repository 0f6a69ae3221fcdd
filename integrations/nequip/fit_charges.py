"""The fit of charges to training data, as a callback of Lightning."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import lightning
import torch
from nequip.data import AtomicDataDict
from nequip.nn import PerTypeScaleShift, with_edge_vectors_
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.waves.charge_start import ChargeStart, fit_predicted

from .charges import LongRangeCharges


class FitCharges(lightning.Callback):
    """Fit models with :class:`LongRangeCharges` to batches of the training data, before the first epoch.

    A part of the energies of charges for each type is fitted and taken off, so ``per_type_energy_shifts`` are those of
    the data, as without long range. ``per_type_energy_scales`` are multiplied by the factor that forces of the data
    have without those of charges. With ``learn: scale`` the factor of the charges is fitted, too. Models that have been
    fitted stay as they are, so training can be continued.

    Args:
        batches: Number of batches, 8 by default.

    Example::

        trainer:
          callbacks:
            - _target_: tg_equiattn.integrations.nequip.FitCharges
    """

    def __init__(self, batches: int = 8) -> None:
        checks.positive(batches=batches)
        self.batches = batches

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        data = list(itertools.islice(iter(trainer.datamodule.train_dataloader()), self.batches))
        for model in pl_module.model.values():
            for module in model.modules():
                if isinstance(module, LongRangeCharges) and module.interaction.offsets.isnan().any():
                    fit_charges(model, module, data)
                    model.load_state_dict(trainer.strategy.broadcast(model.state_dict()))  # other ranks, other batches
        if hasattr(pl_module, "ema"):  # an average of weights that starts now
            pl_module.ema.num_updates = 0
            pl_module.ema.update_parameters(pl_module.model)


def fit_charges(model: torch.nn.Module, module: LongRangeCharges, batches: list[AtomicDataDict.Type]) -> None:
    """Fit charges of a model, and the scale of its energies, to batches of data."""
    layer, training = module.interaction, model.training
    layer.offsets.zero_()
    model.eval()
    batches = [AtomicDataDict.to_(dict(batch), layer.offsets.device) for batch in batches]
    factor = (_fit_predicted if module.predicted else _fit_given)(model, module, batches)
    with torch.no_grad():
        for other in model.modules():
            if isinstance(other, PerTypeScaleShift) and other.field == AtomicDataDict.PER_ATOM_ENERGY_KEY:
                other.scales.mul_(factor)
    model.train(training)


def _fit_given(model: torch.nn.Module, module: LongRangeCharges, batches: list[AtomicDataDict.Type]) -> float:
    start = ChargeStart(module.interaction, module.r_max, module.search)
    for data in batches:
        with torch.enable_grad():
            own = model(dict(data))[AtomicDataDict.FORCE_KEY]
        data = with_edge_vectors_(data, with_lengths=False)
        types, graphs, edge_index, total_charge, labels = _read(module, data)
        vectors = data[AtomicDataDict.EDGE_VECTORS_KEY]
        start.add(types, graphs, edge_index, vectors, total_charge, labels, own)
    return start.finish()


def _fit_predicted(model: torch.nn.Module, module: LongRangeCharges, batches: list[AtomicDataDict.Type]) -> float:
    layer = module.interaction
    (network,) = (parent for parent in model.modules() if module in parent.children())

    def features(data: AtomicDataDict.Type) -> Tensor:
        with torch.no_grad():
            return layer.scalars_of(network(dict(data))[AtomicDataDict.NODE_FEATURES_KEY])

    def forces(data: AtomicDataDict.Type) -> tuple[Tensor, Tensor, Tensor]:
        found: list[Tensor] = []

        def differentiate(target: torch.nn.Module, inputs: Any, out: AtomicDataDict.Type) -> None:
            types, graphs, edge_index, total_charge, _ = _read(module, out)
            energies = layer(
                types, features=out[AtomicDataDict.NODE_FEATURES_KEY], edge_index=edge_index,
                edge_vectors=out[AtomicDataDict.EDGE_VECTORS_KEY], total_charge=total_charge, **graphs,
            ).energies  # fmt: skip
            found.extend((energies, -torch.autograd.grad(energies.sum(), graphs["pos"], retain_graph=True)[0]))

        hook = module.register_forward_hook(differentiate)
        try:
            with torch.enable_grad():
                total = model(dict(data))[AtomicDataDict.FORCE_KEY].detach()
        finally:
            hook.remove()
        energies, far = found
        return energies, total - far, far

    return fit_predicted(layer, batches, functools.partial(_read, module), features, forces)


def _read(module: LongRangeCharges, data: AtomicDataDict.Type) -> tuple[Any, ...]:
    """Types of atoms, frames, edges, total charges and labels of forces."""
    types, graphs = data[AtomicDataDict.ATOM_TYPE_KEY].flatten(), {"batch_size": 1, **module.read_frames(data)}
    total_charge, labels = (data.get(key) for key in (AtomicDataDict.TOTAL_CHARGE_KEY, AtomicDataDict.FORCE_KEY))
    return types, graphs, data[AtomicDataDict.EDGE_INDEX_KEY], total_charge, labels
