"""Charged and lone atoms, and slabs, in a MACE with long range."""

import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from atoms import differences, salt
from mace_models import batch_of, energy, mixed
from space import error
from tg_equiattn.integrations.mace import LongRangeCalculator, add_long_range, without_long_range

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("double"),
]
AFTER = [(0,), (1,), "energies"]


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
    assert abs(near) > abs(far) > 1e-9
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


def test_scale_follows_the_energies_of_the_batch(make):
    """On an untrained model, whose own outputs are far from what it is to learn."""
    systems = mixed()
    for n, atoms in enumerate(systems):
        atoms.info["energy"] = atoms.numbers.astype(float).sum() + (7.0 * n - 3.0) * len(atoms)
    batch = batch_of(*systems)
    model = add_long_range(make(), "energies", batch=batch, gain=1.0)
    wanted = torch.tensor([7.0 * n for n in range(4)]).std()
    out = model(batch.to_dict())
    each = out["long_range_energy"] / batch.ptr.diff()
    assert 0.01 * wanted < each.abs().max() < 30 * wanted
    small = add_long_range(make(), "energies", batch=batch_of(*mixed()), gain=1.0)  # without labels: of the readouts
    assert small(batch.to_dict())["long_range_energy"].abs().max() < 0.1 * out["long_range_energy"].abs().max()


def repelling(distances, strength=10.0):
    """Pairs of water molecules with labels of forces, of which only the net forces on molecules are of interest."""
    frames = []
    for distance in distances:
        first, second = molecule("H2O"), molecule("H2O")
        second.rotate(50, "y")
        second.positions += [distance, 0, 0]
        frames.append(first + second)
        force = np.zeros((6, 3))
        force[0, 0], force[3, 0] = -strength / distance**2, strength / distance**2
        force[[1, 2, 4, 5], 1] = [5, -5, 7, -7]  # within molecules
        frames[-1].arrays["forces"] = force
        frames[-1].info["energy"] = strength / distance
    return frames


def net_forces(model, frames, charge):
    data = batch_of(*frames).to_dict()
    out = model(data | {"total_charge": torch.full((len(frames),), charge)})
    return out["forces"].detach().view(len(frames), 2, 3, 3).sum(2)[:, 1, 0]


@pytest.mark.parametrize("charge", [0.0, 2.0])
def test_long_range_starts_from_net_forces_on_fragments(charge, make):
    """Messages give every fragment a net force of zero, so what labels have is long range's, also on new models."""
    near, far = repelling(np.linspace(5, 9, 9)), repelling([10.0, 12.0])
    batch = batch_of(*near)
    batch.total_charge = torch.full((9,), charge)
    assert net_forces(make(), near, charge).abs().max() < 1e-10
    model = add_long_range(make(), "energies", batch=batch)
    assert model.readouts[-1].long_range.gain == 1
    for frames, allowed in ((near, 0.1), (far, 0.4)):
        wanted = torch.tensor(np.array([atoms.arrays["forces"][3, 0] for atoms in frames]))
        assert (net_forces(model, frames, charge) - wanted).abs().max() < allowed * wanted.max()


def test_fragments_without_forces_between_them_leave_finite_weights(make):
    """Labels whose forces cancel in every fragment, and kernels without sources."""
    for strength, options in ((0.0, {}), (10.0, {"num_gaussians": 0})):
        batch = batch_of(*repelling(np.linspace(5, 9, 3), strength))
        model = add_long_range(make(), "energies", batch=batch, **options)
        assert all(x.isfinite().all() for x in model.parameters())


def test_long_range_energies_keep_their_scale_while_messages_grow(make):
    """Features of an untrained model grow a hundredfold in the first steps of training."""
    frames = repelling(np.linspace(5, 9, 9))
    model = add_long_range(make(), "energies", batch=batch_of(*frames))
    before = net_forces(model, frames, 0.0)
    with torch.no_grad():
        for weight in model.products[-1].parameters():
            weight.mul_(10)
    assert error(net_forces(model, frames, 0.0), before) < 0.5


def test_energy_of_long_range_is_apart(charged):
    model, batch = charged(kind="ScaleShiftMACE", heads=("first", "second")), batch_of(*mixed())
    out, plain = model(batch.to_dict()), without_long_range(model)(batch.to_dict())
    torch.testing.assert_close(out["long_range_energy"], out["energy"] - plain["energy"], rtol=1e-10, atol=1e-12)
    atoms = molecule("CH3CH2OH")
    atoms.calc = LongRangeCalculator(models=[charged()], default_dtype="float64")
    atoms.get_potential_energy()
    assert abs(atoms.calc.results["long_range_energy"]) > 1e-9


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
