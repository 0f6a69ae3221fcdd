"""Small NequIP models with long range, and frames as NequIP's data modules give them."""

import types

import torch
from ase.build import molecule
from atoms import salt, slab
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.utils.global_state import set_global_state
from tg_equiattn.integrations.nequip import FitCharges, LongRangeNequIPGNNModel

SPECIES = ["H", "C", "O", "Na", "Cl"]
SCALES = {"per_type_energy_scales": 1.3, "per_type_energy_shifts": 0.2}


def make_nequip(dtype="float64", after=(0,), options=None, charges=None, **model):
    set_global_state()
    own = {"after": list(after) if isinstance(after, tuple) else after, "long_range": {"gain": 0.5, **(options or {})}}
    own = own if charges is None else {"charges": charges, "long_range": options}
    return LongRangeNequIPGNNModel(
        seed=0, model_dtype=dtype, type_names=SPECIES, **own,
        **{"r_max": 3.0, "num_layers": 2, "l_max": 1, "num_features": 4, "avg_num_neighbors": 4.0,
           "radial_mlp_width": 8, **model},
    ).eval()  # fmt: skip


def transforms():
    return [ChemicalSpeciesToAtomTypeMapper(SPECIES), NeighborListTransform(r_max=3.0)]


def frame(atoms):
    data = from_ase(atoms)
    for transform in transforms():
        data = transform(data)
    return data


def frames(*systems):
    return AtomicDataDict.batched_from_list([frame(atoms) for atoms in systems])


def mixed():
    """Molecules, one of them in a box that does not repeat, a crystal and a slab."""
    boxed = molecule("H2O")
    boxed.center(vacuum=4.0)
    return [molecule("CH3CH2OH"), salt(), boxed, slab()]


def energy(model, atoms):
    return model(data_of(atoms))["total_energy"].item()


def data_of(*systems):
    """Data of a batch, with the total charges of its frames."""
    return frames(*systems) | {"charge": torch.tensor([[atoms.info.get("charge", 0.0)] for atoms in systems])}


def labelled(*systems):
    """A batch with labels of forces."""
    torch.manual_seed(1)
    forces = [torch.as_tensor(x.arrays.get("forces", torch.randn(len(x), 3).numpy())) for x in systems]
    return data_of(*systems) | {"forces": torch.cat(forces)}


def fit(model, *batches):
    """By the callback, as a trainer calls it."""
    trainer = types.SimpleNamespace(
        datamodule=types.SimpleNamespace(train_dataloader=lambda: [dict(batch) for batch in batches]),
        strategy=types.SimpleNamespace(broadcast=lambda state: state),
    )
    FitCharges().on_fit_start(trainer, types.SimpleNamespace(model={"sole_model": model}))
    return model


def make(after=(0,), charges=None, systems=None, dtype="float64", **options):
    """A model with long range; ``systems`` may have labels of forces."""
    if charges is None:
        return make_nequip(dtype, after=after, options=options)
    own = {"width": 1.2, "born_charges": charges != "predicted", **options}
    model = make_nequip(dtype, charges=charges, options=own, **SCALES)
    if systems is None:
        ion = [molecule("OH", info={"charge": -1.0})] if charges == "predicted" else []  # or data do not say charges
        systems = [salt(), molecule("H2O"), *ion]
    return fit(model, labelled(*systems))


def layer_of(model):
    """Its first layer of long range."""
    network = model.model.func
    return network.long_range.interaction if hasattr(network, "long_range") else network.layer0_long_range


NAMES = {"total_energy": "energy", "polarization": "dipole", "born_effective_charges": "born_charges"}


def outputs(model, *systems):
    """By names that hosts share."""
    out = {NAMES.get(name, name): x for name, x in model(data_of(*systems)).items()}
    return {name: x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x for name, x in out.items()}


def displaced(model, atoms):
    """A function of displacements and a strain that gives the energy, forces and stress; positions."""
    model, data = model.train(), data_of(atoms)

    def call(moved, strain):
        matrix = torch.eye(3) + strain
        near = {"pos": (data["pos"] + moved) @ matrix} | ({"cell": data["cell"] @ matrix} if atoms.pbc.all() else {})
        out = model(data | near)
        return out["total_energy"], out["forces"], out["stress"][0]

    return call, data["pos"]
