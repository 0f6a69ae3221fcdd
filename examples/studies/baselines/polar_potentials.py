"""MACE for polar crystals: alone, with charges, and with a Coulomb energy that is added by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from data.polar_crystals import COULOMB, PolarCrystal
from mace import data, modules, tools
from mace.tools.torch_geometric.dataloader import DataLoader
from tg_equiattn.integrations.mace import add_long_range

from e3nn import o3  # isort: skip  (0.4.4 loads after mace alone)

OXIDATION = {"Na": 1, "Cl": -1, "Mg": 2, "O": -2, "Al": 3, "N": -3}
LEARN = {"charges": False, "learned": True, "searched": "scale"}
BORN = 1.0  # weight of squared errors of Born charges in the loss, whose errors of forces are relative


class Potential:
    """MACE for a crystal, with the labels that it learns.

    Args:
        crystal: whose first frames it learns.
        settings: of a single run of the study.
    """

    def __init__(self, crystal: PolarCrystal, settings: Any) -> None:
        (self.kind,) = settings.models
        self.crystal, self.settings, self.frames = crystal, settings, crystal.small[: settings.train]
        charges = OXIDATION if self.kind in ("learned", "searched") else crystal.charges()
        self.charges = {
            symbol: math.copysign(settings.charge or abs(charges[symbol]), charges[symbol])
            for symbol in set(crystal.unit.symbols)
        }
        self.dielectric = float(np.trace(crystal.dielectric)) / 3 if settings.dielectric else 1.0
        self.by_hand = coulomb(self.charges, settings.width) if self.kind == "torch-pme" else no_charges
        self.table = tools.AtomicNumberTable(sorted(set(crystal.unit.numbers.tolist())))
        self.mean = np.mean([(x.info["REF_energy"] - self.by_hand(x)[0]) / len(x) for x in self.frames])
        self.graphs = [self.graph(atoms) for atoms in self.frames]
        self.scale = rms([atoms.arrays["REF_forces"] for atoms in self.frames])
        self.model = self.build()

    def graph(self, atoms: Atoms) -> data.AtomicData:
        """A frame with its labels (zeros without any) less the energy of atoms and what is added by hand."""
        energy, forces = self.by_hand(atoms)
        atoms = atoms.copy()
        atoms.info["REF_energy"] = atoms.info.get("REF_energy", 0.0) - energy - self.mean * len(atoms)
        atoms.arrays["REF_forces"] = atoms.arrays.get("REF_forces", np.zeros_like(atoms.positions)) - forces
        keys = data.KeySpecification({"energy": "REF_energy"}, {"forces": "REF_forces"})
        configuration = data.config_from_atoms(atoms, keys)
        return data.AtomicData.from_config(configuration, self.table, cutoff=self.settings.cutoff)

    def build(self) -> torch.nn.Module:
        """The model at its start, the same for all kinds with one seed."""
        block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
        model = modules.ScaleShiftMACE(
            r_max=self.settings.cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block,
            interaction_cls_first=block, num_interactions=self.settings.layers, num_elements=len(self.table),
            hidden_irreps=o3.Irreps("8x0e + 8x1o"), correlation=2, MLP_irreps=o3.Irreps("16x0e"),
            gate=torch.nn.functional.silu, atomic_energies=np.zeros(len(self.table)), atomic_numbers=self.table.zs,
            avg_num_neighbors=np.mean([graph.edge_index.shape[1] / graph.num_nodes for graph in self.graphs]),
            atomic_inter_scale=rms([graph.forces for graph in self.graphs]), atomic_inter_shift=0.0,
        )  # fmt: skip
        if self.kind in LEARN:
            add_long_range(
                model, charges=self.charges, batch=DataLoader(self.graphs[:10], batch_size=2), learn=LEARN[self.kind],
                width=self.settings.width, dielectric=self.dielectric,
            )  # fmt: skip
        return model

    def fit(self) -> None:
        """Train."""
        settings, model = self.settings, self.model
        loader = DataLoader(self.graphs, batch_size=settings.batch, shuffle=True)
        steps = settings.epochs * len(loader)
        rising = max(1, int(settings.warmup * steps))
        optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(1, (n + 1) / rising) * (1 + math.cos(math.pi * n / steps)) / 2
        )
        model.train()
        for _ in range(settings.epochs):
            for batch in loader:
                out = model(batch.to_dict(), training=True)
                energy = (out["energy"] - batch.energy) / batch.ptr.diff()
                loss = (out["forces"] - batch.forces).square().mean() + 10 * energy.square().mean()
                loss = loss / self.scale**2
                if self.kind == "learned":
                    wanted = torch.tensor(self.crystal.born[self.crystal.site], dtype=energy.dtype)
                    loss = loss + BORN * (self.unit_cell(training=True)["born_charges"] - wanted).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimizer.step()
                schedule.step()
        model.eval()

    def unit_cell(self, training: bool = False) -> dict[str, Any]:
        """Outputs for the perfect unit cell, with Born charges."""
        (batch,) = DataLoader([self.graph(self.crystal.unit)], batch_size=1)
        return self.model(batch.to_dict(), training=training, compute_born_charges=True)

    def born(self) -> list | None:
        """Born charges of the sites of the primitive cell, None for models without charges."""
        if self.kind == "MACE":
            return None
        if self.kind == "torch-pme":
            unit = [self.charges[symbol] * self.dielectric**0.5 * np.eye(3) for symbol in self.crystal.unit.symbols]
        else:
            unit = self.unit_cell()["born_charges"].detach().numpy()
        return [np.mean(np.array(unit)[self.crystal.site == n], 0).tolist() for n in range(len(self.crystal.born))]

    def lacking(self, systems: Sequence[Atoms]) -> list[np.ndarray]:
        """Predicted forces minus those of labels, if there are any."""
        batches = DataLoader([self.graph(atoms) for atoms in systems], batch_size=max(1, 512 // len(systems[0])))
        found = []
        for batch in batches:
            forces = (self.model(batch.to_dict())["forces"] - batch.forces).detach().numpy()
            found += np.split(forces, batch.ptr[1:-1].numpy())
        return found


def no_charges(atoms: Atoms) -> tuple[float, float]:
    return 0.0, 0.0


def coulomb(charges: dict[str, float], width: float) -> Callable[[Atoms], tuple[float, np.ndarray]]:
    """Energy and forces of smeared charges by torch-pme."""
    from torchpme import CoulombPotential, EwaldCalculator

    ewald = EwaldCalculator(CoulombPotential(smearing=width), lr_wavelength=width).double()
    no_pairs = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0).double()  # without them, only smeared charges count

    def energy_and_forces(atoms: Atoms) -> tuple[float, np.ndarray]:
        pos, cell = torch.tensor(atoms.positions, requires_grad=True), torch.tensor(atoms.cell[:])
        charge = torch.tensor([charges[symbol] for symbol in atoms.symbols]).double()[:, None]
        energy = COULOMB * (charge * ewald(charge, cell, pos, *no_pairs)).sum()
        return float(energy), -torch.autograd.grad(energy, pos)[0].numpy()

    return energy_and_forces


def rms(parts: Sequence[Any]) -> float:
    return math.sqrt(np.square(np.concatenate([np.asarray(x) for x in parts])).mean())
