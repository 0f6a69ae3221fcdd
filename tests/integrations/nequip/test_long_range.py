"""Long range in NequIP: energies, forces and stress are right whatever repeats, in batches and alone."""

import copy

import pytest
import torch
from ase.build import molecule
from atoms import salt, slab
from nequip.model.modify_utils import modify
from nequip.scripts import _package_utils
from nequip_models import energy, frame, frames, layer_of, make, make_nequip, mixed
from space import error
from tg_equiattn.integrations.nequip import LongRange

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def test_pbc_is_read_and_cells_are_not():
    model, boxed = make_nequip(), mixed()[2]
    free, repeated, wanted = boxed.copy(), boxed.copy(), energy(model, boxed)
    free.set_cell(None)
    repeated.pbc = True
    assert abs(energy(model, free) - wanted) < 1e-12 * abs(wanted)
    assert abs(energy(model, repeated) - wanted) > 1e-6 * abs(wanted)


def without_pbc(model, atoms, **fields):
    """As NequIP's compiled models get data."""
    data = frame(atoms)
    del data["pbc"]
    return model(data | fields)["total_energy"].item()


def thick():
    """A slab beside so much vacuum that no edge tells that it does not repeat."""
    atoms = slab()
    atoms.center(vacuum=4.0, axis=1)
    return atoms


def test_edges_tell_what_repeats():
    model = make_nequip()
    for atoms in (salt(), molecule("H2O")):
        assert abs(without_pbc(model, atoms) - energy(model, atoms)) < 1e-12 * abs(energy(model, atoms))
    boxed, flat = mixed()[2], thick()
    flat.cell[1] = 0
    assert abs(without_pbc(model, flat) - energy(model, flat)) < 1e-10 * abs(energy(model, flat))
    for atoms in (boxed, thick()):
        with pytest.raises(RuntimeError, match="an edge must cross each lattice vector that is not zero, or"):
            without_pbc(model, atoms)


def test_modifiers_tell_what_repeats():
    """By nequip-compile's names, of all modules of a model."""
    wide = salt()
    wide.center(vacuum=4.0)
    for name, atoms, pbc in (
        ("crystals", wide, True),
        ("molecules", wide, False),
        ("slabs", wide, [True, True, False]),
    ):
        model = make_nequip(after=(0, 1))
        atoms.pbc = pbc
        wanted = energy(model, atoms)
        model = modify(model, [{"modifier": f"far_{name}"}])
        assert abs(without_pbc(model, atoms) - wanted) < 1e-12 * abs(wanted)
        assert abs(energy(model, atoms) - wanted) < 1e-12 * abs(wanted)
        if name != "crystals":
            with pytest.raises(RuntimeError, match="no edge must cross lattice vectors that do not repeat"):
                without_pbc(model, salt())


def test_fewer_features():
    """What attends is as wide as asked for, and no wider than there is."""
    for features, wanted in ((2, 2), (None, 4), (16, 4)):
        layer = make_nequip(options={"features": features}).model.func.layer0_long_range
        assert {mul for mul, _ in layer.attention.irreps_in} == {wanted}
        assert layer.irreps_out["node_features"] == layer.irreps_in["node_features"]


KINDS = [{}, {"charges": {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}, "learn": True}]


@pytest.mark.parametrize("options", KINDS)
def test_float32_and_copies(options):
    model, single = make(**options), make(dtype="float32", **options)
    single.load_state_dict(model.state_dict())
    out, wanted = (m(frames(salt(), molecule("H2O")))["total_energy"] for m in (single, model))
    assert error(out.double(), wanted) < 1e-5
    assert torch.equal(copy.deepcopy(model)(frames(salt(), molecule("H2O")))["total_energy"], wanted)


@pytest.mark.parametrize("options", KINDS)
def test_packages(options, tmp_path):
    """As nequip-package writes them: with this library's code, which loads without it."""
    model, path = make(**options), tmp_path / "far.nequip.zip"
    with torch.package.PackageExporter(path) as exporter:
        exporter.mock([f"{name}.**" for name in _package_utils._MOCK_MODULES])
        exporter.extern([f"{name}.**" for name in _package_utils._EXTERNAL_MODULES])
        exporter.intern([f"{name}.**" for name in _package_utils._INTERNAL_MODULES])
        exporter.save_pickle("model", "model.pkl", model, dependencies=True)
    loaded = torch.package.PackageImporter(path).load_pickle("model", "model.pkl")
    assert type(layer_of(loaded)) is not type(layer_of(model))
    for atoms in (salt(), molecule("H2O")):
        assert energy(loaded, atoms) == energy(model, atoms)


def test_total_charge_is_read():
    """The integer field of NequIP's data, for each frame of a batch."""
    model, data = make_nequip(), frames(*mixed())
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "long_range" in name and not name.endswith("gain"):
                x += 0.2 * torch.randn_like(x)
    neutral = model(dict(data))["total_energy"]
    ions = model(data | {"charge": torch.tensor([[1], [0], [-2], [0]])})["total_energy"]
    assert ((ions - neutral).abs().flatten() > 1e-9).tolist() == [True, False, True, False]


def test_every_parameter_learns():
    """From energies and forces, in training."""
    model = make_nequip(after=(0, 1)).train()
    out = model(frames(*mixed()) | {"charge": torch.tensor([[1], [0], [-1], [0]])})
    (out["total_energy"].square().sum() + out["forces"].square().sum()).backward()
    ours = {name: x.grad for name, x in model.named_parameters() if "long_range" in name}
    assert len(ours) > 10
    assert all(x is not None and x.abs().max() > 0 for x in ours.values())


def test_what_is_refused():
    for after in ((), (2,), (0, 0), (-1,), (0.0,), (True,), ("0",), "0", 0, {0}):
        with pytest.raises(ValueError, match=r"after must be different layers from 0 to 1, such as \(0,\), got"):
            make_nequip(after=after)
    for options, message in (
        ({"features": -1}, "features must be None or a positive integer"),
        ({"max_num_nodes": -1}, "max_num_nodes must be None or a positive integer"),
        ({"max_hkl": [1, 2]}, "max_hkl must be None or a tuple of 3 positive integers"),
    ):
        with pytest.raises(ValueError, match=message):
            make_nequip(options=options)
    layer = make_nequip().model.func.layer0_long_range
    with pytest.raises(NotImplementedError, match="sums over all atoms, and LAMMPS' ML-IAP gives each process a part"):
        layer({"num_local_ghost_atoms": torch.tensor([3, 4])})
    with pytest.raises(ValueError, match="node_features"):
        LongRange(1.0, type_names=["H"], r_max=3.0, irreps_in={})
