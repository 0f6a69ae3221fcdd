"""NequIP's own model with long range, and the fit of its charges to training data, as a callback of Lightning."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning
import torch
from nequip.data import AtomicDataDict, register_fields
from nequip.model import NequIPGNNModel, model_builder
from nequip.nn import GraphModuleMixin, PerTypeScaleShift

from tg_equiattn import checks

from ..e3nn.atoms_attention import blocks_of
from ..e3nn.atoms_charges import Sample, check_informative, fit_charges, interact, is_informative, slopes_of
from .long_range import ENERGY, SHARED, LongRange, LongRangeCharges

register_fields(graph_fields=[ENERGY, SHARED])


@model_builder
def LongRangeNequIPGNNModel(  # noqa: N802  (as NequIP's builders are called)
    after: Sequence[int] | None = None,
    long_range: Mapping[str, Any] | None = None,
    charges: Mapping[str, float] | Literal["predicted"] | None = None,
    **model: Any,
) -> GraphModuleMixin:
    """NequIP's ``NequIPGNNModel`` with :class:`LongRange` after some of its layers, or with :class:`LongRangeCharges`
    beside its energies: a builder for configuration files.

    Args:
        after: Layers, counted from 0, that attention follows. The default, ``None``, means the first one, or no
            attention with ``charges``. The last layer has scalars only.
        long_range: Arguments of :class:`LongRange`, or of :class:`LongRangeCharges` with ``charges``. By default
            ``width`` is half of ``r_max``, and for charges 0.4 ``r_max``, or 0.6 ``r_max`` if they are predicted. By
            default ``avg_num_neighbors``, and the ``output_scale`` of attention, are the mean of the model's
            ``avg_num_neighbors``, or 1 if it has none.
        charges: Charge of each type of atoms by its name, or "predicted", in place of attention. The trainer needs the
            callback :class:`FitCharges`.
        model: Arguments of :func:`nequip.model.NequIPGNNModel`.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Example::

        model:
          _target_: tg_equiattn.integrations.nequip.LongRangeNequIPGNNModel
          after: [0]
          long_range: {num_gaussians: 4, num_coulomb: 4}
          seed: 0
          model_dtype: float32
          type_names: [H, C, O]
          r_max: 5.0
          num_layers: 3
    """
    built = NequIPGNNModel(**model)
    network = built.func
    count = sum(name.endswith("_convnet") for name, _ in network.named_children())
    neighbors = model.get("avg_num_neighbors")
    each = list(neighbors.values()) if isinstance(neighbors, Mapping) else [1.0 if neighbors is None else neighbors]
    shared = {name: model[name] for name in ("type_names", "r_max")} | {
        "avg_num_neighbors": float(sum(each) / len(each))
    }
    if charges is not None:
        if after is not None:
            raise ValueError(f"after must be left out with charges, got {after!r}: give one of the two")
        place = "per_type_energy_scale_shift"
        irreps_in = network.get_submodule(place).irreps_out
        module = LongRangeCharges(charges, irreps_in=irreps_in, **shared, **(long_range or {}))
        network.insert("long_range", module, after=place)
        network.irreps_out.update(module.irreps_out)
        built.irreps_out.update(network.irreps_out)
        return _with_inputs(built)
    scales = {"width": model["r_max"] / 2, "output_scale": shared["avg_num_neighbors"]}
    options = {**scales, **shared, **(long_range or {})}
    for n in blocks_of("layers", after, count):
        layer = f"layer{n}_convnet"
        module = LongRange(irreps_in=network.get_submodule(layer).irreps_out, **options)
        network.insert(f"layer{n}_long_range", module, after=layer)
    return _with_inputs(built)


def _with_inputs(built: GraphModuleMixin) -> GraphModuleMixin:
    """A model that gets the fields that long range reads."""
    for outer in (built.func, built):
        outer.irreps_in = dict(outer.irreps_in) | {AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None}
    return built


class FitCharges(lightning.Callback):
    """Fit models with :class:`LongRangeCharges` to batches of the training data, before the first epoch.

    A part of the energies of charges for each type is fitted and taken off, so ``per_type_energy_shifts`` stay as they
    are without long range. Charges that are predicted with ``exclude_near`` have no energies of single atoms, and
    nothing is taken off. ``per_type_energy_scales`` are multiplied by the factor that forces of the data have without
    those of charges. With ``learn: scale`` the factor of the charges is fitted, too. Models that have been fitted stay
    as they are, so training can be continued.

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
                    fit_model(model, module, data)
                    model.load_state_dict(trainer.strategy.broadcast(model.state_dict()))  # other ranks, other batches
        if hasattr(pl_module, "ema"):  # an average of weights that starts now
            pl_module.ema.num_updates = 0
            pl_module.ema.update_parameters(pl_module.model)


def fit_model(model: torch.nn.Module, module: LongRangeCharges, batches: list[AtomicDataDict.Type]) -> None:
    """Fit charges of a model, and the scale of its energies, to batches of data."""
    layer, training = module.interaction, model.training
    batches = [AtomicDataDict.to_(dict(batch), layer.offsets.device) for batch in batches]
    if module.predicted:
        check_informative(_says_charges(module, data) for data in batches)
    layer.offsets.zero_()
    model.eval()
    factor = fit_charges(layer, lambda: (_sample(model, module, data) for data in batches), module.search)
    with torch.no_grad():
        for other in model.modules():
            if isinstance(other, PerTypeScaleShift) and other.field == AtomicDataDict.PER_ATOM_ENERGY_KEY:
                other.scales.mul_(factor)
    model.train(training)


def _says_charges(module: LongRangeCharges, data: AtomicDataDict.Type) -> bool:
    """True if a batch says what predicted charges are."""
    graphs = {"batch_size": 1, **module.read_frames(dict(data))}
    labels = data.get(AtomicDataDict.POLARIZATION_KEY), data.get(AtomicDataDict.BORN_CHARGE_KEY)
    return is_informative(module.read_atoms(dict(data)), graphs, data.get(AtomicDataDict.FORCE_KEY), *labels)


@torch.enable_grad()
def _sample(model: torch.nn.Module, module: LongRangeCharges, data: AtomicDataDict.Type) -> Sample:
    """Run a model with its charges on a batch, and the charges alone on the features that they read."""
    layer, outputs = module.interaction, list[Any]()

    def differentiate(target: torch.nn.Module, inputs: Any, out: AtomicDataDict.Type) -> None:
        graphs, features = module.read_frames(out), out[AtomicDataDict.NODE_FEATURES_KEY]
        energies = interact(layer, module.read_atoms(out), features, graphs).energies
        gradients = torch.autograd.grad(energies.sum(), graphs["pos"], retain_graph=True)[0]
        scalars = None if layer.weights is None else layer.scalars_of(features)
        slopes = None if scalars is None else slopes_of(scalars, graphs["pos"])
        outputs.extend((scalars, slopes, energies, -gradients))

    hook = module.register_forward_hook(differentiate)
    try:
        forces = model(dict(data))[AtomicDataDict.FORCE_KEY].detach()
    finally:
        hook.remove()
    data, graphs = dict(data), {"batch_size": 1, **module.read_frames(data)}
    scalars, slopes, energies, far = outputs
    labels = data.get(AtomicDataDict.FORCE_KEY)
    return Sample(module.read_atoms(data), graphs, labels, scalars, slopes, energies, forces - far, far)
