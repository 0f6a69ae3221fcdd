"""Quick start with MACE: a salt with charges, trained by MACE's own loop, and phonons of a trained potential.

Energies and forces of GFN1-xTB (tblite) for 60 cells of 8 ions; MACE alone and with charges of which only the signs are
given; cells as in training, and waves in cells four times as long. Then optical phonons of load_example("NaCl").
"""

from pathlib import Path

import matplotlib
import numpy as np
import salt_cells
import torch
from ase.build import bulk
from mace import data, modules, tools
from mace.calculators import MACECalculator
from mace.modules.models import o3  # of e3nn 0.4.4, which loads after mace alone
from mace.tools.torch_geometric.dataloader import DataLoader
from tg_equiattn.integrations.mace import LongRangeCalculator, add_long_range, load_example

matplotlib.use("Agg")
import matplotlib.pyplot as plt

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
out = Path("out/quickstart_mace")
out.mkdir(parents=True, exist_ok=True)


# 1. Data, and two models: MACE, and the same with charges. Forces tell how large the charges are.
cells, tests, longer = salt_cells.training(), salt_cells.tests(), salt_cells.longer()
mean = np.mean([atoms.info["REF_energy"] for atoms in cells]) / 8
table = tools.AtomicNumberTable([11, 17])
keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
graphs = [data.AtomicData.from_config(data.config_from_atoms(atoms, keys), table, cutoff=4.5) for atoms in cells]
loader, valid = DataLoader(graphs[:50], batch_size=2, shuffle=True), DataLoader(graphs[50:], batch_size=10)
for name in ("MACE", "MACE with charges"):
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=4.5, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=2, hidden_irreps=o3.Irreps("8x0e + 8x1o"), correlation=2,
        MLP_irreps=o3.Irreps("8x0e"), gate=torch.nn.functional.silu, atomic_energies=np.array([mean, mean]),
        avg_num_neighbors=18.0, atomic_numbers=[11, 17], atomic_inter_scale=0.5, atomic_inter_shift=0.0,
    )  # fmt: skip
    if name != "MACE":
        model = add_long_range(model, charges={"Na": 1, "Cl": -1}, learn="scale", batch=loader)
        charges = model.long_range.scale * model.long_range.constants
        print(f"charges that forces find: Na {charges[0]:+.2f}, Cl {charges[1]:+.2f}")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    tools.train(
        model, modules.WeightedEnergyForcesLoss(1.0, 10.0), loader, {"Default": valid}, optimizer,
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1), start_epoch=0,
        max_num_epochs=15, patience=99,
        checkpoint_handler=tools.CheckpointHandler(str(out), name), logger=tools.MetricsLogger(str(out), name),
        eval_interval=1, output_args={"energy": True, "forces": True, "virials": False, "stress": False},
        device=torch.device("cpu"), log_errors="PerAtomMAE",
    )  # fmt: skip
    torch.save(model, out / f"{name}.model")
    near, far = (salt_cells.error(MACECalculator(models=model, default_dtype="float64"), x) for x in (tests, longer))
    print(f"{name}: error of forces {near:.0f} meV/A in cells as in training, {far:.0f} meV/A in cells four times as "
          "long, with a wave", flush=True)  # fmt: skip


# 2. Phonons of a potential that is trained: frozen waves along c, with no correction for the charges.
def frequencies(model, parts):
    """Frequencies in THz of the longitudinal and a transverse optical mode, at 1 / parts of the zone along Gamma-X."""
    crystal = bulk("NaCl", "rocksalt", a=5.59, cubic=True).repeat((1, 1, parts))
    crystal.calc = LongRangeCalculator(models=model, default_dtype="float64")
    wave = np.exp(2j * np.pi * crystal.get_scaled_positions()[:, 2])
    masses, sodium, found = np.array([22.990, 35.453]), crystal.numbers == 11, []
    for axis in (2, 0):
        response = np.zeros((2, 2), complex)
        for site, chosen in enumerate((sodium, ~sodium)):
            for phase in (1, 1j):
                forces = []
                for sign in (1, -1):
                    moved = crystal.copy()
                    moved.calc = crystal.calc
                    moved.positions[chosen, axis] += sign * 0.01 * (phase.conjugate() * wave[chosen]).real
                    forces.append(moved.get_forces()[:, axis])
                slope = phase * (forces[1] - forces[0]) / 0.02 * wave.conj()
                response[site] += np.array([slope[sodium].mean(), slope[~sodium].mean()])
        square = np.linalg.eigvalsh((response + response.conj().T) / 2 / np.sqrt(np.outer(masses, masses)))[-1]
        found.append(15.633 * np.sqrt(abs(square)))
    return found


DFT = {2: (6.17, 5.17), 4: (7.27, 5.04), 8: (7.59, 5.07)}  # PBEsol, of the data of load_example
trained, parts = load_example("NaCl"), (2, 3, 4, 6, 8)
modes = np.array([frequencies(trained, n) for n in parts])
figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
axes.plot([1 / n for n in parts], modes, "C3-", label=["MACE with charges", None])
axes.plot([1 / n for n in DFT], list(DFT.values()), "ko", label=["DFT", None])
axes.set(xlabel="wave vector along Γ-X, 2π/a", ylabel="optical modes, THz", xlim=(0, None), title="NaCl")
axes.legend(frameon=False)
figure.savefig("out/quickstart_mace.png", dpi=100)
print(f"optical modes at 1/8: LO {modes[-1, 0]:.2f} (DFT 7.59), TO {modes[-1, 1]:.2f} (DFT 5.07) THz")
print("figure: out/quickstart_mace.png")
