"""Small MACE models, and batches of molecules, crystals and slabs as MACE's loaders give them."""

import warnings

import numpy as np
import torch

with warnings.catch_warnings():  # of MACE and e3nn 0.4.4 at import
    warnings.simplefilter("ignore")
    from mace import data, modules, tools
    from mace.tools.torch_geometric.dataloader import DataLoader
    from tg_equiattn.integrations.mace import add_long_range

from ase import Atoms
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
    info = {"energy": "energy", "total_charge": "charge"}
    keys = data.KeySpecification(info_keys=info, arrays_keys={"forces": "forces"})
    configurations = [data.config_from_atoms(atoms, key_specification=keys) for atoms in systems]
    return [data.AtomicData.from_config(one, z_table=table, cutoff=3.0) for one in configurations]


def loader(systems, batch_size, numbers=NUMBERS):
    return DataLoader(graphs(systems, numbers), batch_size=batch_size, shuffle=False)


def batch_of(*systems, numbers=NUMBERS):
    return next(iter(loader(systems, len(systems), numbers)))


def mixed():
    return [molecule("CH3CH2OH"), salt(), molecule("H2O"), slab()]


def energy(model, atoms):
    return model(data_of(atoms), compute_force=False)["energy"].item()


def data_of(*systems):
    """Data of a batch, with the total charges of its frames."""
    charges = torch.tensor([atoms.info.get("charge", 0.0) for atoms in systems])
    return batch_of(*systems).to_dict() | {"total_charge": charges}


def charged_systems(charges):
    """Systems for the fit of charges. Those that are predicted need a total charge."""
    ion = [Atoms("Na", info={"charge": 1.0})]
    return [salt(), slab(), molecule("H2O")] + (ion if charges == "predicted" else [])


def make(after=(0,), charges=None, systems=None, **options):
    """A model with long range; ``systems`` may have labels."""
    torch.manual_seed(3)
    own = {"after": after, "gain": 0.5} if charges is None else {"charges": charges, "width": 1.2}
    systems = (mixed() if charges is None else charged_systems(charges)) if systems is None else systems
    batch = loader(systems, 2) if "energy" in systems[0].info else data_of(*systems)
    return add_long_range(make_mace(), batch=batch, **own | options)


def layer_of(model):
    """Its first layer of long range."""
    return model.products[0].long_range if model.long_range is None else model.long_range


def outputs(model, *systems):
    """By names that hosts share. MACE divides the stress of a slab by a volume of its own: it has none here."""
    asked = {}
    if model.long_range is not None:
        asked = {
            "compute_long_range_energy": True,
            "compute_shared_charge": True,
            "compute_born_charges": "Predicted" not in type(layer_of(model)).__name__,
        }
    out = model(data_of(*systems), compute_stress=True, **asked)
    return out if all(atoms.pbc.all() for atoms in systems) else out | {"stress": None}


def displaced(model, atoms):
    """A function of displacements and a strain that gives the energy, forces and stress; positions and parameters."""
    data = data_of(atoms)

    def call(moved, strain):
        matrix = torch.eye(3) + strain
        near = data | {"positions": (data["positions"] + moved) @ matrix}
        near |= {name: data[name] @ matrix for name in ("cell", "shifts")}
        out = model(near, training=True, compute_stress=bool(atoms.pbc.all()))
        return out["energy"], out["forces"], out["stress"][0] if atoms.pbc.all() else None

    return call, data["positions"]
