"""Quick start with MACE: Ewald attention behind its first product, trained by MACE's own loop, run by ASE.

100 molecules with energies and forces of GFN2-xTB (tblite); three epochs; 100 steps of dynamics from the saved model.
"""

from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import molecule
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from mace import data, modules, tools
from mace.calculators import MACECalculator
from mace.modules.models import o3  # of e3nn 0.4.4, which loads after mace alone
from mace.tools.torch_geometric.dataloader import DataLoader
from tblite.ase import TBLite
from tg_equiattn.integrations.mace import add_long_range

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
out = Path("out/quickstart_mace")
out.mkdir(parents=True, exist_ok=True)
systems = [molecule(("CH3CH2OH", "HCOOH", "CH3OH", "H2O", "CH3CHO")[n % 5]) for n in range(100)]
for n, atoms in enumerate(systems):
    atoms.rattle(0.05, seed=n)
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    atoms.info["REF_energy"], atoms.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = None
elements = [1, 6, 8]
counts = np.array([[(atoms.numbers == z).sum() for z in elements] for atoms in systems])
single = np.linalg.lstsq(counts, np.array([atoms.info["REF_energy"] for atoms in systems]), rcond=None)[0]
table = tools.AtomicNumberTable(elements)
keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
graphs = [data.AtomicData.from_config(data.config_from_atoms(atoms, keys), table, cutoff=4.0) for atoms in systems]
train, valid = (DataLoader(part, batch_size=5, shuffle=True) for part in (graphs[:80], graphs[80:]))

for name in ("MACE", "MACE with long range"):
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=4.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=3, hidden_irreps=o3.Irreps("16x0e + 16x1o"), correlation=2,
        MLP_irreps=o3.Irreps("16x0e"), gate=torch.nn.functional.silu, atomic_energies=single,
        avg_num_neighbors=8.0, atomic_numbers=elements, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    if name != "MACE":
        model = add_long_range(model, after=(0,), batch=next(iter(train)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tools.train(
        model, modules.WeightedEnergyForcesLoss(1.0, 10.0), train, {"Default": valid}, optimizer,
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), start_epoch=0, max_num_epochs=3, patience=3,
        checkpoint_handler=tools.CheckpointHandler(str(out), name), logger=tools.MetricsLogger(str(out), name),
        eval_interval=1, output_args={"energy": True, "forces": True, "virials": False, "stress": False},
        device=torch.device("cpu"), log_errors="PerAtomMAE",
    )  # fmt: skip
    _, errors = tools.evaluate(model, modules.WeightedEnergyForcesLoss(1.0, 10.0), valid,
                               {"forces": True, "virials": False, "stress": False}, torch.device("cpu"))  # fmt: skip
    torch.save(model, out / f"{name}.model")
    atoms = molecule("CH3CH2OH")
    atoms.calc = MACECalculator(str(out / f"{name}.model"), default_dtype="float64")
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
    energies = [atoms.get_total_energy()]
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    for _ in range(100):
        dynamics.run(1)
        energies.append(atoms.get_total_energy())
    drift = 1000 * np.abs(np.array(energies) - energies[0]).max() / len(atoms)
    print(f"{name}: error of forces {1000 * errors['mae_f']:.0f} meV/A; NVE within {drift:.2f} meV an atom")
