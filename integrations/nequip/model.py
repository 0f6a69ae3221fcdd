"""NequIP's own model with Ewald attention between its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nequip.data import AtomicDataDict
from nequip.model import NequIPGNNModel, model_builder
from nequip.nn import GraphModuleMixin

from .long_range import LongRange


@model_builder
def LongRangeNequIPGNNModel(  # noqa: N802  (as NequIP's builders are called)
    after: Sequence[int] = (0,), long_range: Mapping[str, Any] | None = None, **model: Any
) -> GraphModuleMixin:
    """NequIP's ``NequIPGNNModel`` with :class:`LongRange` after some of its layers: a builder for configuration files.

    Args:
        after: Layers, counted from 0, that attention follows. The default is the first one. The last one has scalars
            only.
        long_range: Arguments of :class:`LongRange`. By default ``width`` is half of ``r_max``, and ``avg_num_nodes``
            and ``avg_num_neighbors`` are the mean of the model's ``avg_num_neighbors``, or 1 if it has none.
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
    numbers = all(isinstance(n, int) and 0 <= n < count for n in after)
    if not after or not numbers or len(set(after)) < len(after):
        raise ValueError(f"after must be different layers from 0 to {count - 1}, got {list(after)}")
    neighbors = model.get("avg_num_neighbors")
    each = list(neighbors.values()) if isinstance(neighbors, Mapping) else [1.0 if neighbors is None else neighbors]
    mean, own = float(sum(each) / len(each)), {name: model[name] for name in ("type_names", "r_max")}
    scales = {"width": model["r_max"] / 2, "avg_num_nodes": mean, "avg_num_neighbors": mean}
    options = {**scales, **own, **(long_range or {})}
    for n in after:
        layer = f"layer{n}_convnet"
        module = LongRange(irreps_in=network.get_submodule(layer).irreps_out, **options)
        network.insert(f"layer{n}_long_range", module, after=layer)
    for outer in (network, built):
        outer.irreps_in = dict(outer.irreps_in) | {AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None}
    return built
