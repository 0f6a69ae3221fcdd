"""A crystal in ASE: MACE with Ewald attention, trained on rocksalt; dynamics, relaxation with the cell, and checks.

Energies, forces and stress of GFN1-xTB (tblite) for 8 atoms, rattled and strained. Needs the extra mace, and tblite.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import bulk
from ase.calculators.fd import calculate_numerical_stress
from ase.filters import FrechetCellFilter
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from mace import data, modules, tools
from mace.calculators import MACECalculator
from mace.modules.models import o3  # of e3nn 0.4.4, which loads after mace alone
from mace.tools.torch_geometric.dataloader import DataLoader
from tblite.ase import TBLite
from tg_equiattn.integrations.mace import add_long_range

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--crystals", type=int, default=40)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--steps", type=int, default=100, help="of dynamics, 2 fs each")
options = parser.parse_args()

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
out = Path("out/ase_crystal")
out.mkdir(parents=True, exist_ok=True)


def crystal(seed, size=0.1):
    """Rocksalt of 8 atoms, rattled and strained."""
    random = np.random.default_rng(seed)
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.3 * size * random.normal(size=(3, 3))), scale_atoms=True)
    atoms.rattle(size, rng=random)
    return atoms


systems = [crystal(seed) for seed in range(options.crystals)]
for atoms in systems:
    atoms.calc = TBLite(method="GFN1-xTB", verbosity=0)
    atoms.info |= {"REF_energy": atoms.get_potential_energy(), "REF_stress": atoms.get_stress()}
    atoms.arrays["REF_forces"] = atoms.get_forces()
    atoms.calc = None
mean = np.mean([atoms.info["REF_energy"] for atoms in systems]) / 8
table = tools.AtomicNumberTable([11, 17])
keys = data.KeySpecification({"energy": "REF_energy", "stress": "REF_stress"}, {"forces": "REF_forces"})
graphs = [data.AtomicData.from_config(data.config_from_atoms(atoms, keys), table, cutoff=4.0) for atoms in systems]
train = DataLoader(graphs, batch_size=4, shuffle=True)
block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
model = modules.ScaleShiftMACE(
    r_max=4.0, num_bessel=6, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
    num_interactions=2, num_elements=2, hidden_irreps=o3.Irreps("8x0e + 8x1o"), MLP_irreps=o3.Irreps("8x0e"),
    gate=torch.nn.functional.silu, atomic_energies=np.array([mean, mean]), avg_num_neighbors=14.0, correlation=2,
    atomic_numbers=[11, 17], atomic_inter_scale=1.0, atomic_inter_shift=0.0,
)  # fmt: skip
model = add_long_range(model, batch=next(iter(train)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
wanted = {"energy": True, "forces": True, "virials": False, "stress": True}
loss = modules.WeightedEnergyForcesStressLoss(1.0, 10.0, 1000.0)
tools.train(
    model, loss, train, {"Default": train}, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    start_epoch=0, max_num_epochs=options.epochs, patience=99, eval_interval=10, output_args=wanted,
    checkpoint_handler=tools.CheckpointHandler(str(out), "crystal"), logger=tools.MetricsLogger(str(out), "crystal"),
    device=torch.device("cpu"), log_errors="PerAtomMAE",
)  # fmt: skip
_, errors = tools.evaluate(model, loss, train, wanted, torch.device("cpu"))
print(f"errors: forces {1000 * errors['mae_f']:.0f} meV/A, stress {1000 * errors['mae_stress']:.2f} meV/A^3")
torch.save(model, out / "crystal.model")

calculator = MACECalculator(str(out / "crystal.model"), default_dtype="float64")
atoms = crystal(1000)
atoms.calc = calculator
found, differences = atoms.get_stress(), calculate_numerical_stress(atoms, eps=1e-4)
print(f"stress against differences: {np.abs(found - differences).max() / np.abs(found).max():.0e} relative")
double = atoms.repeat((2, 1, 1))
double.calc = calculator
print(f"supercell: {double.get_potential_energy() / atoms.get_potential_energy() / 2 - 1:.0e} relative")

MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
energies = [atoms.get_total_energy()]
dynamics = VelocityVerlet(atoms, 2 * units.fs)
for _ in range(options.steps):
    dynamics.run(1)
    energies.append(atoms.get_total_energy())
energies = 1000 * (np.array(energies) - energies[0]) / len(atoms)
slope = np.polyfit(np.arange(len(energies)) * 0.002, energies, 1)[0]
print(f"NVE: within {np.abs(energies).max():.1e} meV an atom, drift {slope:.1e} meV an atom and ps")

atoms = crystal(1001, 0.05)
atoms.calc = calculator
optimizer = BFGS(FrechetCellFilter(atoms), logfile=str(out / "relaxation.txt"))
done = optimizer.run(fmax=0.01, steps=100)
print(
    f"relaxation: {'done' if done else 'not done'} in {optimizer.nsteps} steps, forces "
    f"{np.abs(atoms.get_forces()).max():.3f} eV/A, stress {np.abs(atoms.get_stress()).max():.1e} eV/A^3, "
    f"{atoms.get_volume() / 4:.1f} A^3 a pair"
)
