"""Quick start with NequIP: a salt with charges, by nequip-train, nequip-compile and ASE.

Energies and forces of GFN1-xTB (tblite) for 60 cells of 8 ions; NequIP alone and with charges of which only the signs
are given, both compiled; cells as in training, and waves in cells four times as long.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ase.io
import matplotlib
import numpy as np
import salt_cells
from ase.calculators.singlepoint import SinglePointCalculator
from nequip.integrations.ase import NequIPCalculator

matplotlib.use("Agg")
import matplotlib.pyplot as plt

here, commands = Path(__file__).parent.resolve(), Path(sys.executable).parent
out = Path("out/quickstart_nequip").resolve()
shutil.rmtree(out, ignore_errors=True)  # beside an older best.ckpt, Lightning would write another
out.mkdir(parents=True)
cells, tests, longer = salt_cells.training(), salt_cells.tests(), salt_cells.longer()
for atoms in cells:
    atoms.calc = SinglePointCalculator(atoms, energy=atoms.info["REF_energy"], forces=atoms.arrays["REF_forces"])
mean = np.mean([atoms.info["REF_energy"] for atoms in cells]) / 8
ase.io.write(out / "salt.xyz", cells)


def run(*words):
    done = subprocess.run([str(commands / words[0]), *words[1:]], cwd=out, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-5000:])


wanted = np.concatenate([atoms.arrays["REF_forces"][:, 2] for atoms in longer])
figure, axes = plt.subplots(figsize=(4.5, 4), layout="constrained")
axes.axline((0, 0), slope=1, color="k", lw=0.8)
plain = ("training_module.model._target_=nequip.model.NequIPGNNModel", "~training_module.model.charges",
         "~training_module.model.long_range", "trainer.callbacks=[${checkpoint}]")  # fmt: skip
for name, color, changes in (("NequIP", "C0", plain), ("NequIP with charges", "C3", ())):
    folder = name.replace(" ", "_")
    run("nequip-train", "-cp", str(here), "-cn", "quickstart_nequip.yaml", f"hydra.run.dir={folder}",
        f"training_module.model.per_type_energy_shifts={{Na: {mean}, Cl: {mean}}}", *changes)  # fmt: skip
    run("nequip-compile", f"{folder}/best.ckpt", f"{folder}.nequip.pt2", "--mode", "aotinductor", "--device", "cpu",
        "--target", "ase")  # fmt: skip
    calculator = NequIPCalculator.from_compiled_model(out / f"{folder}.nequip.pt2")
    near, far = (salt_cells.error(calculator, systems) for systems in (tests, longer))
    print(f"{name}: error of forces {near:.0f} meV/A in cells as in training, {far:.0f} meV/A in cells four times as "
          "long, with a wave", flush=True)  # fmt: skip
    predicted = np.concatenate([atoms.get_forces()[:, 2] for atoms in longer])
    axes.plot(wanted, predicted, color + ".", label=f"{name}: {far:.0f} meV/A")
axes.set(xlabel="force along the wave, GFN1-xTB, eV/A", ylabel="predicted, eV/A", title="NaCl, cells of 32 ions")
axes.legend(frameon=False)
figure.savefig("out/quickstart_nequip.png", dpi=100)
print("figure: out/quickstart_nequip.png")
