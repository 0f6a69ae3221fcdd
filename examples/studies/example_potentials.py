"""Train the potentials of tg_equiattn.integrations.mace.load_example, and print their errors.

The data are examples of phonopy and phono3py (data/polar_crystals.py); --data is the folder of the files.

    python examples/studies/example_potentials.py NaCl --data ~/polar_crystals
"""

import argparse
import time
import types
from pathlib import Path

import numpy as np
import torch
from ase.data import chemical_symbols
from baselines.polar_potentials import Potential, rms
from data.polar_crystals import branches, dynamical_matrix, load
from mace.tools.torch_geometric.dataloader import DataLoader
from tg_equiattn.integrations.mace import add_long_range
from tg_equiattn.integrations.mace.examples import FOLDER, build_example

RATES = {"NaCl": 0.03, "MgO": 0.06}
PARTS = 2, 12

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("crystal", choices=list(RATES))
parser.add_argument("--data", type=Path, required=True, help="folder of the files")
parser.add_argument("--train", type=int, default=40, help="cells of 64 atoms to train on; the others are test cells")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--output", type=Path, default=FOLDER)
options = parser.parse_args()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Example(Potential):
    """A potential with charges Z*/sqrt(eps) that are held, built as load_example builds it."""

    def build(self) -> torch.nn.Module:
        counts = [graph.edge_index.shape[1] / graph.num_nodes for graph in self.graphs]
        self.arguments = {"atomic_numbers": list(self.table.zs), "avg_num_neighbors": float(np.mean(counts))}
        charges = {chemical_symbols[z]: self.charges[chemical_symbols[z]] for z in self.table.zs}
        options = {"charges": charges, "width": self.settings.width, "dielectric": self.dielectric}
        model = build_example(**self.arguments)
        model.scale_shift.scale.fill_(self.scale)
        add_long_range(model, batch=DataLoader(self.graphs[:10], batch_size=2), **options)
        layer = model.long_range
        neighbors = layer.avg_num_neighbors
        self.long_range = options | {"cutoff": layer.cutoff, "avg_num_neighbors": neighbors}
        return model


crystal = load(options.data, options.crystal)
settings = types.SimpleNamespace(
    models=("charges",), train=options.train, cutoff=5.0, layers=2, width=2.0, charge=None, dielectric=True,
    epochs=options.epochs, batch=1, learning_rate=RATES[options.crystal], warmup=0.1, clip=10.0,
)  # fmt: skip
potential, start = Example(crystal, settings), time.process_time()
potential.fit()
print(f"{time.process_time() - start:.0f} s of one core, charges {potential.charges}")
for name, frames in {"64 atoms": crystal.small[options.train :], "512 atoms": crystal.large}.items():
    labels = rms([atoms.arrays["REF_forces"] for atoms in frames])
    error = rms(potential.lacking(frames))
    print(f"{name}, {len(frames)} cells: error of forces {1000 * error:.2f} of {1000 * labels:.0f} meV/A")


def matrix(axis: int, n: int) -> np.ndarray:
    return dynamical_matrix(potential.lacking, crystal, axis, n)


for kind, found in branches(matrix, crystal, (2,), PARTS).items():
    print(kind, ", ".join(f"{found[str(n)]:.2f} THz at 1/{n}" for n in PARTS))
potential.model.atomic_energies_fn.atomic_energies += potential.mean
state = potential.model.state_dict()
torch.save({"model": potential.arguments, "charges": potential.long_range, "state": state},
           options.output / f"{options.crystal}.pt")  # fmt: skip
