"""Ions that part: does the energy of charged fragments fall as one over their distance beyond the training range?

MACE with long range, by default or with narrow Coulomb kernels alone, beside MACE alone, and MACE whose r_max is 2 A
larger, all with the same epochs. Trained up to 9 A; slopes of the energy by 1 / distance over 9.5 to 14 A:

like        Na+ .. Na+, each with a water molecule, by GFN2-xTB, if each fragment's charge is within 0.05 e of 1
water       Cl- .. H2O, the ion with a water molecule, by GFN2-xTB: forces between them
neutral     H2O .. H2O, by GFN2-xTB: forces between them, which should vanish
unlike      a dimer of charged molecules in a periodic cell of 30 A (LODE, --data): energies and forces at 5 distances

    python examples/ions.py --sets like water neutral --seeds 0 1 2
    python examples/ions.py --sets unlike --data ~/lode
"""

import argparse
import time

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import CalculationFailed
from mace import data, modules, tools
from mace.modules.models import o3  # of e3nn 0.4.4, which loads after mace alone
from mace.tools.torch_geometric.dataloader import DataLoader
from tg_equiattn.integrations.mace import add_long_range

R_MAX, NEAR, FAR = 4.0, (4.5, 9.0), (9.5, 14.0)
MODELS = {  # r_max, and settings of long range
    "MACE": (R_MAX, None),
    "MACE, r_max + 2": (R_MAX + 2, None),
    "long range": (R_MAX, {}),
    "narrow Coulomb": (R_MAX, {"num_gaussians": 0, "num_coulomb": 2, "max_width": R_MAX}),
}


def fragment(ion, seed):
    """An ion with water at its usual distance, or water alone, the first atom at the origin."""
    water = molecule("H2O")
    water.rattle(0.05, seed=seed)
    water.positions -= water.positions[0]
    water.rotate(90, "y")
    if ion is None:
        return water
    water.positions[:, 0] -= 2.3
    return Atoms(ion) + water


def labelled(first, second, distance, charges):
    """Both at a distance, with energy and forces of GFN2-xTB; None if a fragment does not have its charge, or if the
    calculation does not converge."""
    from tblite.ase import TBLite

    second = second.copy()
    second.rotate(180, "z")
    second.positions[:, 0] += distance
    atoms = first + second
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0, charge=sum(charges))
    try:
        energy, forces, found = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_charges()
    except CalculationFailed:
        return None
    parts = found[: len(first)].sum(), found[len(first) :].sum()
    if np.abs(np.array(parts) - charges).max() > 0.05:
        return None
    atoms.calc = None
    atoms.info |= {"energy": energy, "total_charge": sum(charges), "distance": distance, "second": len(first)}
    atoms.arrays["ref_forces"] = forces
    return atoms


def computed(name, count):
    """Frames to train on, and frames beyond."""
    first, second = {"like": ("Na", "Na"), "water": ("Cl", None), "neutral": (None, None)}[name]
    charges = tuple({"Na": 1, "Cl": -1, None: 0}[ion] for ion in (first, second))
    random = np.random.default_rng(0)
    near = [(random.uniform(*NEAR), seed) for seed in range(count)]
    far = [(distance, 500) for distance in np.linspace(*FAR, 10)]
    make = lambda each: [labelled(fragment(first, s), fragment(second, s + 999), d, charges) for d, s in each]  # noqa: E731
    return [[atoms for atoms in make(each) if atoms is not None] for each in (near, far)]


def published(folder):
    """A dimer of charged molecules: inter_energy is its energy in the cell less that of each molecule alone."""
    frames = []
    for part in ("train", "test"):
        for atoms in ase.io.read(f"{folder}/{part}-id0.xyz", ":"):
            atoms.arrays["ref_forces"] = atoms.get_forces()
            atoms.info |= {"energy": atoms.info["inter_energy"], "total_charge": 0, "second": atoms.info["indexB"]}
            atoms.calc = None
            frames.append(atoms)
    near = [atoms for atoms in frames if atoms.info["distance"] <= NEAR[1]]
    far = [atoms for atoms in frames if FAR[0] <= atoms.info["distance"] <= FAR[1]]
    return near, far


def batches(frames, r_max, table, size):
    keys = data.KeySpecification(
        info_keys={"energy": "energy", "total_charge": "total_charge"}, arrays_keys={"forces": "ref_forces"}
    )
    graphs = [data.AtomicData.from_config(data.config_from_atoms(a, keys), table, cutoff=r_max) for a in frames]
    return DataLoader(graphs, batch_size=size, shuffle=size < len(graphs))


def trained(train, elements, r_max, far, seed, epochs):
    """MACE as mace_run_train builds it, after ``epochs``."""
    torch.manual_seed(seed)
    table = tools.AtomicNumberTable(elements)
    counts = np.array([[(a.numbers == z).sum() for z in elements] for a in train])
    single = np.linalg.lstsq(counts, np.array([a.info["energy"] for a in train]), rcond=None)[0]
    kinds = modules.interaction_classes
    model = modules.ScaleShiftMACE(
        r_max=r_max, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, num_interactions=2, num_elements=len(elements),
        interaction_cls=kinds["RealAgnosticResidualInteractionBlock"], hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        interaction_cls_first=kinds["RealAgnosticInteractionBlock"], MLP_irreps=o3.Irreps("16x0e"), correlation=2,
        gate=torch.nn.functional.silu, atomic_energies=single, avg_num_neighbors=8.0, atomic_numbers=elements,
        atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    loader = batches(train, r_max, table, 5)
    if far is not None:
        batch = next(iter(batches(train, r_max, table, min(40, len(train)))))
        add_long_range(model, "energies", batch=batch, **far)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = modules.WeightedEnergyForcesLoss(10.0, 10.0)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, epochs)
    start = time.process_time()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss(batch, model(batch.to_dict(), training=True)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
            optimizer.step()
        rate.step()
    return model.eval(), table, time.process_time() - start


def report(name, model, test, r_max, table, seconds, label):
    out = model(next(iter(batches(test, r_max, table, len(test)))).to_dict())
    inverse, energy = np.array([1 / a.info["distance"] for a in test]), out["energy"].detach().numpy()
    wanted = np.array([a.info["energy"] for a in test])
    words = [f"slope {np.polyfit(inverse, energy, 1)[0]:.2f} of {np.polyfit(inverse, wanted, 1)[0]:.2f} eV A"]
    forces, exact = out["forces"].detach().numpy(), np.concatenate([a.arrays["ref_forces"] for a in test])
    off = 1000 * (forces - exact).reshape(len(test), -1, 3)
    between = np.abs([each[a.info["second"] :].sum(0) for each, a in zip(off, test, strict=True)])
    words.append(f"forces off by {np.sqrt((off**2).mean()):.1f} meV/A, between fragments by up to {between.max():.1f}")
    parameters = sum(x.numel() for x in model.parameters())
    print(f"{name}, {label}: {', '.join(words)}; {parameters} parameters, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["like", "water", "neutral"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--data", help="folder of LODE's dimers, for the set unlike")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in flags.sets:
        train, test = published(flags.data) if name == "unlike" else computed(name, flags.frames)
        elements = sorted({int(z) for atoms in train + test for z in atoms.numbers})
        for seed in flags.seeds:
            for label in flags.models:
                r_max, far = MODELS[label]
                model, table, seconds = trained(train, elements, r_max, far, seed, flags.epochs)
                report(name, model, test, r_max, table, seconds, f"{label}, seed {seed}")
