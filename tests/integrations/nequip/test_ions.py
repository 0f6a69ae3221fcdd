"""Charged and lone atoms in a NequIP with long range."""

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from nequip_models import energy, frames, make_nequip, mixed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def charged(**options):
    """A model of which every parameter of long range counts."""
    model = make_nequip(**options)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "long_range" in name and not name.endswith("gain"):
                x += 0.2 * torch.randn_like(x)
    return model


def test_lone_atoms_attract_and_are_told_apart():
    """Beyond r_max of all others."""
    model, water = charged(), molecule("H2O")
    alone = energy(model, Atoms("Na")) + energy(model, Atoms("Cl"))
    near, far = (energy(model, Atoms("NaCl", [[0, 0, 0], [d, 0, 0]])) - alone for d in (6.0, 12.0))
    assert abs(near) > abs(far) > 1e-9
    found = [energy(model, water + Atoms(name, [[8, 0, 0]])) - energy(model, Atoms(name)) for name in ("Na", "Cl", "C")]
    assert min(abs(found[0] - found[1]), abs(found[0] - found[2])) > 1e-9


def test_a_single_atom_has_its_own_energy():
    """Whatever the gain is; in a crystal an atom sees its images."""
    model, plain = charged(), charged(options={"gain": 0.0})
    assert abs(energy(model, Atoms("Na")) - energy(plain, Atoms("Na"))) < 1e-12
    crystal = Atoms("Na", cell=[4, 4, 4], pbc=True)
    assert abs(energy(model, crystal) - energy(plain, crystal)) > 1e-9


def test_total_charge_is_read():
    """The integer field of NequIP's data, for each frame of a batch."""
    model, data = charged(), frames(*mixed())
    neutral = model(dict(data))["total_energy"]
    ions = model(data | {"charge": torch.tensor([[1], [0], [-2], [0]])})["total_energy"]
    changed = (ions - neutral).abs().flatten() > 1e-9
    assert changed.tolist() == [True, False, True, False]
