"""Small MACE models, and batches of molecules, crystals and slabs as MACE's loaders give them."""

import warnings

import numpy as np
import torch

with warnings.catch_warnings():  # of MACE and e3nn 0.4.4 at import
    warnings.simplefilter("ignore")
    from mace import data, modules, tools
    from mace.tools.torch_geometric.dataloader import DataLoader

from ase.build import molecule
from atoms import salt, slab
from e3nn import o3

NUMBERS = [1, 6, 8, 11, 17]


def make_mace(kind="ScaleShiftMACE", hidden="4x0e+4x1o", blocks=2, heads=("Default",), first=None, numbers=NUMBERS):
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    options = {
        "r_max": 3.0, "num_bessel": 4, "num_polynomial_cutoff": 5, "max_ell": 2, "interaction_cls": block,
        "interaction_cls_first": first or block, "num_interactions": blocks, "num_elements": len(numbers),
        "hidden_irreps": o3.Irreps(hidden), "MLP_irreps": o3.Irreps("4x0e"), "gate": torch.nn.functional.silu,
        "atomic_energies": np.arange(len(numbers) * 1.0) + np.arange(len(heads))[:, None], "heads": list(heads),
        "avg_num_neighbors": 4.0, "atomic_numbers": numbers, "correlation": 2,
    }  # fmt: skip
    if kind == "ScaleShiftMACE":
        options |= {"atomic_inter_scale": [1.3] * len(heads), "atomic_inter_shift": [0.2] * len(heads)}
    return getattr(modules, kind)(**options)


def graphs(systems, numbers=NUMBERS):
    table = tools.AtomicNumberTable(numbers)
    keys = data.KeySpecification(info_keys={"energy": "energy"}, arrays_keys={"forces": "forces"})
    configurations = [data.config_from_atoms(atoms, key_specification=keys) for atoms in systems]
    return [data.AtomicData.from_config(one, z_table=table, cutoff=3.0) for one in configurations]


def loader(systems, batch_size, numbers=NUMBERS):
    return DataLoader(graphs(systems, numbers), batch_size=batch_size, shuffle=False)


def batch_of(*systems, numbers=NUMBERS):
    return next(iter(loader(systems, len(systems), numbers)))


def mixed():
    return [molecule("CH3CH2OH"), salt(), molecule("H2O"), slab()]


def energy(model, atoms):
    return model(batch_of(atoms).to_dict(), compute_force=False)["energy"].item()
