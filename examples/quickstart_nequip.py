"""Quick start with NequIP: Ewald attention behind its first layer, by nequip-train, nequip-compile and ASE.

100 molecules with energies and forces of GFN2-xTB (tblite); three epochs; compiled, 100 steps of dynamics.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
from ase import units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from nequip.integrations.ase import NequIPCalculator
from tblite.ase import TBLite

here, commands = Path(__file__).parent.resolve(), Path(sys.executable).parent
out = Path("out/quickstart_nequip").resolve()
out.mkdir(parents=True, exist_ok=True)
systems = [molecule(("CH3CH2OH", "HCOOH", "CH3OH", "H2O", "CH3CHO")[n % 5]) for n in range(100)]
for n, atoms in enumerate(systems):
    atoms.rattle(0.05, seed=n)
    atoms.center(vacuum=5.0)  # without a cell stress is no number, which nequip-compile refuses
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
counts = np.array([[(atoms.numbers == z).sum() for z in (1, 6, 8)] for atoms in systems])
single = np.linalg.lstsq(counts, np.array([atoms.get_potential_energy() for atoms in systems]), rcond=None)[0]
shifts = "{" + ", ".join(f"{name}: {energy}" for name, energy in zip("HCO", single, strict=True)) + "}"
ase.io.write(out / "molecules.xyz", systems)


def run(*words):
    done = subprocess.run([str(commands / words[0]), *words[1:]], cwd=out, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-5000:])
    return done.stdout + done.stderr


plain = ("training_module.model._target_=nequip.model.NequIPGNNModel", "~training_module.model.after",
         "~training_module.model.long_range")  # fmt: skip
for name, changes in {"NequIP": plain, "NequIP with long range": ()}.items():
    folder = name.replace(" ", "_")
    said = run("nequip-train", "-cp", str(here), "-cn", "quickstart_nequip.yaml", f"hydra.run.dir={folder}",
               f"training_module.model.per_type_energy_shifts={shifts}", *changes)  # fmt: skip
    error = float(re.findall(r"test0_epoch/forces_mae\D+([\d.e-]+)", said)[-1])
    run("nequip-compile", f"{folder}/best.ckpt", f"{folder}.nequip.pt2", "--mode", "aotinductor", "--device", "cpu",
        "--target", "ase")  # fmt: skip
    atoms = systems[0].copy()
    atoms.calc = NequIPCalculator.from_compiled_model(out / f"{folder}.nequip.pt2")
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=100)
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
    energies = [atoms.get_total_energy()]
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    for _ in range(100):
        dynamics.run(1)
        energies.append(atoms.get_total_energy())
    drift = 1000 * np.abs(np.array(energies) - energies[0]).max() / len(atoms)
    print(f"{name}: error of forces {1000 * error:.0f} meV/A; NVE within {drift:.2f} meV an atom")
