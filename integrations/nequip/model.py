"""NequIP's own model with long range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nequip.data import AtomicDataDict, register_fields
from nequip.model import NequIPGNNModel, model_builder
from nequip.nn import GraphModuleMixin

from .charges import ENERGY, SHARED, LongRangeCharges
from .long_range import LongRange

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
            ``width`` is half of ``r_max`` (0.4 for charges), and ``avg_num_nodes`` and ``avg_num_neighbors`` are the
            mean of the model's ``avg_num_neighbors``, or 1 if it has none.
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
    own = {name: model[name] for name in ("type_names", "r_max")} | {"avg_num_neighbors": float(sum(each) / len(each))}
    if charges is not None:
        if after is not None:
            raise ValueError(f"after must be left out with charges, got {list(after)}: give one of the two")
        place = "per_type_energy_scale_shift"
        irreps_in = network.get_submodule(place).irreps_out
        module = LongRangeCharges(charges, irreps_in=irreps_in, **own, **(long_range or {}))
        network.insert("long_range", module, after=place)
        network.irreps_out.update(module.irreps_out)
        built.irreps_out.update(network.irreps_out)
        return _with_inputs(built)
    after = (0,) if after is None else after
    if not after or not all(isinstance(n, int) and 0 <= n < count for n in after) or len(set(after)) < len(after):
        raise ValueError(f"after must be different layers from 0 to {count - 1}, got {list(after)}")
    scales = {"width": model["r_max"] / 2, "avg_num_nodes": own["avg_num_neighbors"]}
    options = {**scales, **own, **(long_range or {})}
    for n in after:
        layer = f"layer{n}_convnet"
        module = LongRange(irreps_in=network.get_submodule(layer).irreps_out, **options)
        network.insert(f"layer{n}_long_range", module, after=layer)
    return _with_inputs(built)


def _with_inputs(built: GraphModuleMixin) -> GraphModuleMixin:
    """A model that gets the fields that long range reads."""
    for outer in (built.func, built):
        outer.irreps_in = dict(outer.irreps_in) | {AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None}
    return built
