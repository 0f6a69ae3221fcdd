"""MACE's calculator with the long-range energy and with the stress of slabs, and a loss for labels of charge."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import all_changes
from mace.calculators import MACECalculator
from torch import Tensor

from tg_equiattn.checks import not_negative, positive_number

from .long_range import CALCULATION, Calculation

_NEUTRAL = 1e-3  # charge in e up to which a molecule has a dipole


class LongRangeCalculator(MACECalculator):
    """``MACECalculator`` for models with long range.

    If the model has charges, ``results`` has ``long_range_energy`` in eV, ``charges`` in e and, for molecules without a
    charge, ``dipole`` in e Å. ``get_property("born_charges", atoms)`` computes Born effective charges
    ``(atoms, 3, 3)`` in e. For a committee these are means.

    Stress of slabs is divided by the volume of the cell of ``atoms``; MACE divides it by the volume of a padded cell.
    If the cell of ``atoms`` has no volume, there is no stress, and asking for it raises ASE's
    ``PropertyNotImplementedError``.

    The total charge is read from ``atoms.info``: from ``"charge"`` or ``"total_charge"``, as in training data, or from
    the key that ``info_keys`` names. Without one it is 0.

    Args:
        arguments: Arguments of ``mace.calculators.MACECalculator``.
        options: Keyword arguments of ``mace.calculators.MACECalculator``.

    Raises:
        ValueError: in a calculation, if ``atoms.info`` has two total charges that differ, or if ``atoms`` repeat along
            a lattice vector that is zero.

    Example::

        atoms.calc = LongRangeCalculator("far.model")
        atoms.get_potential_energy(), atoms.calc.results["long_range_energy"]
    """

    info_keys: dict[str, str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if all(getattr(model, "long_range", None) is not None for model in self.models):
            self.implemented_properties.extend(("long_range_energy", "charges", "dipole", "born_charges"))

    def calculate(self, atoms: Atoms | None = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        keys, atoms = self.info_keys, self.atoms if atoms is None else atoms
        if (atoms.pbc & ~atoms.cell.array.any(1)).any():
            raise ValueError(
                f"atoms.cell must have a lattice vector wherever atoms.pbc is true, got {atoms.cell.array.tolist()} "
                f"with pbc {atoms.pbc.tolist()}: set a cell, or atoms.pbc = False for a molecule"
            )
        calculation, key = Calculation("born_charges" in (properties or ()), []), self._charge_key(atoms)
        token, self.info_keys = CALCULATION.set(calculation), keys | {"total_charge": key}
        try:
            super().calculate(atoms, properties, system_changes)
        finally:
            CALCULATION.reset(token)
            self.info_keys = keys
        outputs, pbc = calculation.outputs, self.atoms.pbc
        for name, unit in (("long_range_energy", self.energy_units_to_eV), ("born_charges", 1.0)):
            if outputs and name in outputs[0]:
                mean = unit * torch.stack([out[name].detach() for out in outputs]).mean(0).cpu().numpy()
                self.results[name] = float(mean[0]) if name == "long_range_energy" else mean
        if "charges" in self.results and (pbc.any() or abs(self.results["charges"].sum()) > _NEUTRAL):
            del self.results["dipole"]
        stress = [name for name in self.results if name.startswith("stress")]
        if not outputs or pbc.all() or not pbc.any():
            return
        ratio = float(outputs[0]["volume"]) / volume if (volume := self.atoms.cell.volume) else None
        for name in stress:
            if ratio is None:
                del self.results[name]
            else:
                self.results[name] = self.results[name] * (ratio**2 if name.endswith("var") else ratio)

    def _charge_key(self, atoms: Atoms) -> str:
        """The key of ``atoms.info`` that has the total charge."""
        key = self.info_keys.get("total_charge", "charge")
        charges = {name: float(atoms.info[name]) for name in (key, "charge", "total_charge") if name in atoms.info}
        if len(set(charges.values())) > 1:
            raise ValueError(f"atoms.info must have one total charge, got {charges}: leave out all but one of them")
        return next(iter(charges), key)


class ChargeLoss(torch.nn.Module):
    """A loss of MACE plus mean squared errors of labels of charge, for models with charges that are learned.

    Args:
        loss: A loss of MACE, of energies and forces, for example.
        born_charges: Weight of Born effective charges, in e². Graphs have them as ``born_charges`` ``(atoms, 3, 3)``,
            NaN where an atom has none.
        dipole: Weight of dipoles, in (e Å)². Graphs have them as ``dipole``, and MACE's ``dipole_weight`` says which
            have none.
        total_charge: Weight of total charges, in e², which the learned factor of charges changes. With charges that are
            predicted, it is the weight of the charge that is missing and shared, in training; models return it in
            validation only if ``compute_shared_charge=True``.
        dielectric: Electronic dielectric constant of the model, 1 by default. Its charges and dipoles times the root of
            ``dielectric`` are compared with the labels.

    Example::

        graph.born_charges = torch.tensor(atoms.arrays["born_charges"]).view(-1, 3, 3)  # of every AtomicData
        loss = ChargeLoss(WeightedEnergyForcesLoss(1.0, 10.0), born_charges=1.0)
    """

    def __init__(
        self, loss: torch.nn.Module, *, born_charges: float = 0.0, dipole: float = 0.0, total_charge: float = 0.0,
        dielectric: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        not_negative(born_charges=born_charges, dipole=dipole, total_charge=total_charge)
        positive_number(dielectric=dielectric)
        self.loss, self.born_charges, self.dipole, self.total_charge = loss, born_charges, dipole, total_charge
        self.dielectric = dielectric

    def forward(self, ref: Any, pred: dict[str, Any], ddp: bool | None = None) -> Tensor:
        out = self.loss(ref=ref, pred=pred, ddp=ddp)
        if self.born_charges:
            if pred.get("born_charges") is None:
                raise ValueError("graphs must have born_charges of shape (atoms, 3, 3), which born_charges weighs")
            off = pred["born_charges"] - ref["born_charges"]
            known = ~off.isnan()
            out = out + self.born_charges * torch.where(known, off, 0.0).square().sum() / known.sum().clamp(min=1)
        if self.dipole:
            off = self.dielectric**0.5 * pred["dipole"] - ref["dipole"].view(-1, 3)
            off = off.square() * ref["dipole_weight"].view(-1, 3)
            out = out + self.dipole * off.mean()
        if self.total_charge and "shared_charge" in pred:
            out = out + self.total_charge * pred["shared_charge"].square().mean()
        elif self.total_charge:
            sums = torch.zeros_like(ref["total_charge"]).index_add(0, ref["batch"], pred["charges"])
            out = out + self.total_charge * (self.dielectric**0.5 * sums - ref["total_charge"]).square().mean()
        return out
