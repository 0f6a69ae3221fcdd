"""The fit of charges to training data, as a callback of Lightning."""

from __future__ import annotations

import itertools
from typing import Any

import lightning
import torch
from nequip.data import AtomicDataDict
from nequip.nn import PerTypeScaleShift, with_edge_vectors_

from tg_equiattn import checks
from tg_equiattn.nn.waves.charge_start import ChargeStart

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
    layer = module.interaction
    layer.offsets.zero_()
    start, training = ChargeStart(layer, module.r_max, module.search), model.training
    model.eval()
    for batch in batches:
        data = AtomicDataDict.to_(dict(batch), layer.constants.device)
        with torch.enable_grad():
            own = model(dict(data))[AtomicDataDict.FORCE_KEY]
        data = with_edge_vectors_(data, with_lengths=False)
        graphs, types = module.read_frames(data), data[AtomicDataDict.ATOM_TYPE_KEY].flatten()
        graphs = {"batch_size": 1, **graphs}
        start.add(
            types, graphs, data[AtomicDataDict.EDGE_INDEX_KEY], data[AtomicDataDict.EDGE_VECTORS_KEY],
            data.get(AtomicDataDict.TOTAL_CHARGE_KEY), data.get(AtomicDataDict.FORCE_KEY), own,
        )  # fmt: skip
    factor = start.finish()
    with torch.no_grad():
        for other in model.modules():
            if isinstance(other, PerTypeScaleShift) and other.field == AtomicDataDict.PER_ATOM_ENERGY_KEY:
                other.scales.mul_(factor)
    model.train(training)
