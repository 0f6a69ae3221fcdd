"""Ewald attention between the layers of a NequIP model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from e3nn import o3
from nequip.data import AtomicDataDict
from nequip.model import NequIPGNNModel, model_builder
from nequip.nn import GraphModuleMixin

from tg_equiattn import checks

from ..e3nn import IrrepsEwaldAttention


class LongRange(GraphModuleMixin, torch.nn.Module):
    r"""Let all atoms of a frame see each other: a graph module for :class:`nequip.nn.SequentialGraphNetwork`.

    .. math:: x' = x + g\, \mathrm{attention}(x)

    with a learned ``gain`` g. Forces, virials and stress come of it as of any module of NequIP's, which strains
    positions and cells. Frames repeat along the lattice vectors that ``pbc`` says; compiled for ASE, where NequIP does
    not hand on ``pbc``, along all that are not zero.

    Args:
        width: of the narrowest kernel, in the unit of positions: about half the model's ``r_max``.
        max_width, kernels, heads, lmax, avg_num_nodes, error, method, max_waves: of
            :class:`tg_equiattn.integrations.e3nn.IrrepsEwaldAttention`. Compiled models need ``max_waves`` where frames
            repeat; ``method="waves"`` then leaves out what open frames would need, ``"pairs"`` what crystals would.
        gain: at the start.
        irreps_in: of fields, as NequIP's modules pass them on.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Example::

        layer = network.layer0_convnet
        network.insert("far", LongRange(2.5, irreps_in=layer.irreps_out), after="layer0_convnet")
    """

    def __init__(
        self,
        width: float,
        *,
        max_width: float | None = None,
        kernels: int | Sequence[int] = 8,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_waves: Sequence[int] | None = None,
        gain: float = 0.0,
        irreps_in: Mapping[str, Any],
    ) -> None:
        super().__init__()
        field = AtomicDataDict.NODE_FEATURES_KEY
        GraphModuleMixin._init_irreps(
            self,
            irreps_in=dict(irreps_in) | {AtomicDataDict.CELL_KEY: "1o", AtomicDataDict.PBC_KEY: None},
            required_irreps_in=[field],
            irreps_out={field: irreps_in.get(field)},
        )
        irreps = o3.Irreps(irreps_in[field])
        self.attention = IrrepsEwaldAttention(
            irreps, irreps, width=width, max_width=max_width, heads=heads, lmax=lmax, avg_num_nodes=avg_num_nodes,
            kernels=kernels if isinstance(kernels, int) else cast(Any, tuple(kernels)), error=error, method=method,
            max_waves=None if max_waves is None else cast(Any, tuple(max_waves)),
        )  # fmt: skip
        self.method = method
        self.gain = torch.nn.Parameter(torch.tensor(float(gain)))

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        if AtomicDataDict.LMP_MLIAP_DATA_KEY in data or AtomicDataDict.NUM_LOCAL_GHOST_NODES_KEY in data:
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS' ML-IAP gives each process a part of them: use ASE, "
                "or pair_nequip on one process"
            )
        x, pos = data[AtomicDataDict.NODE_FEATURES_KEY], data[AtomicDataDict.POSITIONS_KEY]
        cell, pbc = data.get(AtomicDataDict.CELL_KEY), data.get(AtomicDataDict.PBC_KEY)
        traced = checks.is_traced(pos)
        if cell is not None and self.method == "pairs" and (traced or pbc is None):
            if AtomicDataDict.EDGE_CELL_SHIFT_KEY in data:
                apart = (data[AtomicDataDict.EDGE_CELL_SHIFT_KEY] == 0).all()
                torch._assert_async(apart, "nothing must repeat with method='pairs'")
            cell = pbc = None
        elif traced and cell is not None and pbc is None:
            warnings.warn(
                "this model is compiled without pbc, which NequIP's target does not hand on: whatever has a cell "
                "repeats along its lattice vectors, slabs and molecules in a box too; give such molecules no cell, and "
                "such slabs to a model that is not compiled",
                stacklevel=2,
            )
        batch, sizes = data.get(AtomicDataDict.BATCH_KEY), {}
        if batch is not None:
            sizes["batch_size"] = data[AtomicDataDict.NUM_NODES_KEY].shape[0]
            if traced:
                sizes["max_num_nodes"] = pos.shape[0]
        found = self.attention(x, pos, batch, cell=cell, pbc=pbc, **sizes)
        data[AtomicDataDict.NODE_FEATURES_KEY] = x + self.gain * found
        return data


@model_builder
def LongRangeNequIPGNNModel(  # noqa: N802  (as NequIP's builders are called)
    after: Sequence[int] = (0,), long_range: Mapping[str, Any] | None = None, **model: Any
) -> GraphModuleMixin:
    """NequIP's ``NequIPGNNModel`` with :class:`LongRange` behind some of its layers: a builder for configuration files.

    Args:
        after: the layers, from 0 on. The last has scalars alone.
        long_range: arguments of :class:`LongRange`. Without ``width`` it is half of ``r_max``; without
            ``avg_num_nodes`` the mean of the model's ``avg_num_neighbors``, where there are any.
        model: of :func:`nequip.model.NequIPGNNModel`.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Example::

        model:
          _target_: tg_equiattn.integrations.nequip.LongRangeNequIPGNNModel
          after: [0]
          long_range: {kernels: 8}
          seed: 0
          model_dtype: float32
          type_names: [H, C, O]
          r_max: 5.0
          num_layers: 3
    """
    built = NequIPGNNModel(**model)
    network = built.func
    count = sum(name.endswith("_convnet") for name, _ in network.named_children())
    if not after or any(not 0 <= n < count for n in after) or len(set(after)) < len(after):
        raise ValueError(f"after must be different layers from 0 to {count - 1}, got {list(after)}")
    options = {"width": model["r_max"] / 2, **(long_range or {})}
    neighbors = model.get("avg_num_neighbors")
    if neighbors is not None and "avg_num_nodes" not in options:
        each = list(neighbors.values()) if isinstance(neighbors, Mapping) else [neighbors]
        options["avg_num_nodes"] = float(sum(each) / len(each))
    for n in after:
        layer = f"layer{n}_convnet"
        module = LongRange(irreps_in=network.get_submodule(layer).irreps_out, **options)
        network.insert(f"layer{n}_long_range", module, after=layer)
    for outer in (network, built):
        outer.irreps_in = dict(outer.irreps_in) | {AtomicDataDict.PBC_KEY: None}
    return built
