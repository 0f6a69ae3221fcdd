"""Charged and lone atoms, and slabs, in a MACE with long range."""

import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from atoms import differences, salt
from mace_models import batch_of, energy
from tg_equiattn.integrations.mace import LongRangeCalculator, without_long_range

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("double"),
]
AFTER = [(0,), (1,)]


def pair(first, second, distance):
    return Atoms([first, second], [[0, 0, 0], [distance, 0, 0]])


def with_charge(atoms, charge):
    data = batch_of(atoms).to_dict()
    return data | {"total_charge": torch.tensor([float(charge)])}


@pytest.mark.parametrize("after", AFTER)
def test_lone_atoms_attract_and_are_told_apart(after, charged):
    """Beyond r_max of all others, in a model whose first block gives them no features."""
    model, water = charged(after), molecule("H2O")
    alone = energy(model, Atoms("Na")) + energy(model, Atoms("Cl"))
    near, far = (energy(model, pair("Na", "Cl", d)) - alone for d in (6.0, 12.0))
    assert min(abs(near), abs(far), abs(near - far)) > 1e-9
    found = [energy(model, water + Atoms(name, [[8, 0, 0]])) - energy(model, Atoms(name)) for name in ("Na", "Cl", "C")]
    assert min(abs(found[0] - found[1]), abs(found[0] - found[2])) > 1e-9


@pytest.mark.parametrize("after", AFTER)
def test_a_single_atom_has_its_own_energy(after, charged):
    """That of the model without long range, whatever its charge; in a crystal it sees its images."""
    model, plain = charged(after), without_long_range(charged(after))
    for charge in (0, 1):
        data = with_charge(Atoms("Na"), charge)
        assert abs(model(data)["energy"].item() - plain(data)["energy"].item()) < 1e-12
    crystal = Atoms("Na", cell=[4, 4, 4], pbc=True)
    assert abs(energy(model, crystal) - energy(plain, crystal)) > 1e-9


def test_total_charge_is_read(charged):
    model, atoms = charged(), pair("Na", "Na", 6.0)
    neutral, ions = (model(with_charge(atoms, charge))["energy"].item() for charge in (0, 2))
    assert abs(neutral - ions) > 1e-9


def test_a_crystal_with_vacuum_tends_to_the_slab(charged):
    """Energies of a slab in ever more vacuum; they used to grow in proportion to it."""
    model = charged()
    slab = Atoms("NaCl", [[0, 0, 0], [0.3, 0.2, 2.4]], cell=[4, 4, 30], pbc=[True, True, False])
    wanted, found = energy(model, slab), []
    for height in (40, 80, 160):
        crystal = slab.copy()
        crystal.cell[2, 2], crystal.pbc = height, True
        found.append(abs(energy(model, crystal) - wanted))
    assert found[1] < 0.6 * found[0]
    assert found[2] < 0.6 * found[1]


def test_stress_of_slabs_is_of_their_own_cell(charged):
    """Wherever the slab lies; and none if the cell has no volume."""
    calculator = LongRangeCalculator(models=[charged()], default_dtype="float64")
    atoms = salt()
    atoms.pbc, atoms.cell[2] = [True, True, False], [0, 0, 20]
    atoms.calc = calculator

    def strained(size):
        near, strain = atoms.copy(), np.eye(3)
        strain[0, 0] += size
        near.set_cell(near.cell.array @ strain, scale_atoms=True)
        near.calc = calculator
        return near.get_potential_energy()

    wanted = differences(strained) / atoms.get_volume()
    for height in (0.0, 150.0):
        moved = atoms.copy()
        moved.positions[:, 2] += height
        moved.calc = calculator
        assert abs(moved.get_stress()[0] - wanted) < 1e-6 * abs(wanted)
    flat = atoms.copy()
    flat.cell[2] = 0
    flat.calc = calculator
    assert np.isfinite(flat.get_potential_energy())
    with pytest.raises(PropertyNotImplementedError):
        flat.get_stress()


def test_stress_of_a_slab_by_mace_itself_is_a_warning(far):
    atoms = salt()
    atoms.pbc = [True, True, False]
    with pytest.warns(UserWarning, match="MACE divides the stress of slabs by the volume of a padded cell"):
        far()(batch_of(atoms).to_dict(), compute_stress=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MACE divides")
        far()(batch_of(salt()).to_dict(), compute_stress=True)
