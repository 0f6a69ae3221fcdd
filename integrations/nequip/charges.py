"""Energies of charges as a graph module of NequIP. nequip-package takes this file along, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from e3nn import o3
from nequip.data import AtomicDataDict
from nequip.nn import GraphModuleMixin, with_edge_vectors_

from tg_equiattn import checks
from tg_equiattn.modes import is_traced

from ..e3nn.charge_interaction import IrrepsChargeInteraction, IrrepsPredictedChargeInteraction
from .frames import LongRangeModule

ENERGY, SHARED = "long_range_energy", "shared_charge"


@checks.python_numbers
class LongRangeCharges(LongRangeModule):
    r"""Energies of charges of each type of atoms: a graph module for :class:`nequip.nn.SequentialGraphNetwork`, after
    the energies of atoms.

    .. math:: E_{\mathrm{long}} = \frac{e^2}{8 \pi \epsilon_0} \sum_{ij} S_i S_j\,
        \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}

    This is :class:`tg_equiattn.nn.ChargeInteraction` in eV and Å. It adds fields to the data of the model:
    ``long_range_energy`` of each frame, ``charges``, ``polarization`` (the dipole of each frame in e Å) and, if asked
    for, ``born_effective_charges``. Frames repeat as :class:`LongRange` describes it.

    With ``charges="predicted"`` it is :class:`tg_equiattn.nn.PredictedChargeInteraction`: charges are learned from the
    scalars of the last layer and sum to the total charge of each frame. The field ``shared_charge`` of a frame is what
    was missing to it.

    Training needs the callback :class:`FitCharges`, which fits a part of the energies for each type to the data.

    Args:
        charges: Charge of each type by its name, in e: oxidation states, or Born effective charges divided by the root
            of ``dielectric``. The charges of a frame must sum to its ``charge`` divided by the same root. "predicted"
            learns charges.
        learn: True if a factor of all charges and transfers of charge between neighbors are learned, for data with
            labels of charge. "scale" lets :class:`FitCharges` fit the factor to forces. The default, ``False``, holds
            charges.
        dielectric: Electronic dielectric constant of the data. Born charges are derivatives of the dipole times its
            root. The default is 1.
        born_charges: True if the model returns Born effective charges. Compiled models never do. The default is
            ``False``.
        width: Width s of the kernel, in the unit of positions. The default, ``None``, means 0.4 ``r_max``, or 0.6
            ``r_max`` for predicted charges, so that the kernel does not compete with messages.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by
            default.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :class:`LongRange`.
        max_hkl: Largest Miller indices along the three lattice vectors. The default, ``None``, reads cells. Compiled
            models need it if frames repeat.
        max_num_nodes: Number of atoms of the largest frame, for models that are compiled for batches. The default,
            ``None``, means all atoms of the batch.
        type_names: Names of the types of atoms, as NequIP's modules get them.
        r_max: Cutoff of the model's edges, in the unit of positions.
        avg_num_neighbors: Constant by which transfers are divided, 1 by default.
        irreps_in: Irreps of fields, as NequIP's modules pass them on.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one; in a call, if a type has no charge, or
            if charges of a frame do not sum to its total charge.
    """

    def __init__(
        self,
        charges: Mapping[str, float] | Literal["predicted"],
        *,
        learn: bool | Literal["scale"] = False,
        dielectric: float = 1.0,
        born_charges: bool = False,
        width: float | None = None,
        error: float = 1e-4,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
        max_num_nodes: int | None = None,
        type_names: Sequence[str],
        r_max: float,
        avg_num_neighbors: float = 1.0,
        irreps_in: Mapping[str, Any],
    ) -> None:
        super().__init__(method, max_num_nodes)
        field, features = AtomicDataDict.PER_ATOM_ENERGY_KEY, AtomicDataDict.NODE_FEATURES_KEY
        own = {ENERGY: "0e", AtomicDataDict.CHARGE_KEY: "0e", AtomicDataDict.POLARIZATION_KEY: "1o"}
        GraphModuleMixin._init_irreps(
            self,
            irreps_in=dict(irreps_in)
            | {AtomicDataDict.CELL_KEY: "1o", AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None},
            required_irreps_in=[field, features],
            irreps_out=own
            | ({AtomicDataDict.BORN_CHARGE_KEY: None} if born_charges else {})
            | ({SHARED: "0e"} if charges == "predicted" else {}),
        )
        if learn not in (False, True, "scale"):
            raise ValueError(f'learn must be False, True or "scale", got {learn!r}')
        self.predicted = isinstance(charges, str)
        self.search, self.born_charges, self.r_max = learn == "scale", born_charges, r_max
        options: dict[str, Any] = {
            "width": (0.6 if self.predicted else 0.4) * r_max if width is None else width, "cutoff": r_max,
            "avg_num_neighbors": avg_num_neighbors, "dielectric": dielectric, "error": error, "method": method,
            "max_hkl": None if max_hkl is None else tuple(max_hkl),  # lists of configuration files cannot be packaged
        }  # fmt: skip
        irreps = o3.Irreps(irreps_in[features])
        if isinstance(charges, str):
            if charges != "predicted" or learn or born_charges:
                raise ValueError(
                    'charges must be a charge for each type, or "predicted" without learn and born_charges, got '
                    f"{charges!r} with learn={learn!r} and born_charges={born_charges!r}"
                )
            self.interaction: Any = IrrepsPredictedChargeInteraction(type_names, irreps, **options)
        else:
            if unknown := [name for name in charges if name not in type_names]:
                raise ValueError(f"charges must be of types {', '.join(type_names)}, got {', '.join(unknown)}")
            given = {name: charges.get(name, torch.nan) for name in type_names}
            self.interaction = IrrepsChargeInteraction(given, irreps if learn is True else None, **options)
        self.interaction.offsets.fill_(torch.nan)  # until they are fitted

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        layer, graphs, own = self.interaction, self.read_frames(data), {}
        fitted = ~layer.offsets.isnan().any()
        checks.must_hold(fitted, "charges must be fitted before training: add FitCharges to the trainer's callbacks")
        if layer.weights is not None:
            with_edge_vectors_(data, with_lengths=False)
            own = {"features": data[AtomicDataDict.NODE_FEATURES_KEY],
                   "edge_index": data[AtomicDataDict.EDGE_INDEX_KEY],
                   "edge_vectors": data[AtomicDataDict.EDGE_VECTORS_KEY]}  # fmt: skip
        types, charge = data[AtomicDataDict.ATOM_TYPE_KEY].flatten(), data.get(AtomicDataDict.TOTAL_CHARGE_KEY)
        found = layer(types, total_charge=charge, **own, **graphs)
        energies, count = found.energies[:, None], found.dipole.shape[0]
        batch = torch.zeros_like(types) if graphs["batch"] is None else graphs["batch"]
        data[ENERGY] = energies.new_zeros(count, 1).index_add(0, batch, energies)
        each = data[AtomicDataDict.PER_ATOM_ENERGY_KEY]
        data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = each + (energies - found.offsets[:, None]).to(each.dtype)
        data[AtomicDataDict.CHARGE_KEY], data[AtomicDataDict.POLARIZATION_KEY] = found.charges[:, None], found.dipole
        if self.predicted:
            data[SHARED] = found.shared[:, None]
        if self.born_charges and not is_traced(types):
            born = layer.born_charges(found.dipole, graphs["pos"], self.training)
            data[AtomicDataDict.BORN_CHARGE_KEY] = born
        return data
