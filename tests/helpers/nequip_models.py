"""Small NequIP models with long range, and frames as NequIP's data modules give them."""

from ase.build import molecule
from atoms import salt, slab
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.utils.global_state import set_global_state
from tg_equiattn.integrations.nequip import LongRangeNequIPGNNModel

SPECIES = ["H", "C", "O", "Na", "Cl"]


def make_nequip(dtype="float64", after=(0,), options=None, charges=None, **model):
    set_global_state()
    own = {"after": list(after), "long_range": {"gain": 0.5, **(options or {})}}
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
    return model(frame(atoms))["total_energy"].item()
