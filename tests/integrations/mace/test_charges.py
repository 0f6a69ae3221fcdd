"""Charges that are given, in MACE: energies, derivatives, what is fitted at the start, and what is refused."""

import functools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from atoms import check_forces_and_stress, salt, slab
from mace_models import batch_of, energy, loader
from space import error
from tg_equiattn.integrations.mace import add_long_range

from tg_equiattn.functional import charge_energies

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("double"),
]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}


@pytest.fixture
def charged(make):
    """A model with charges, of which every parameter counts."""

    def charged(batch=None, learn=False, width=1.2, charges=CHARGES, **options):
        torch.manual_seed(3)
        batch = batch_of(salt(), slab(), molecule("H2O")) if batch is None else batch
        model = add_long_range(make(**options), charges=charges, batch=batch, learn=learn, width=width)
        if learn:
            with torch.no_grad():
                model.long_range.weights.normal_(0, 3)
                model.long_range.scale.fill_(1.1)
        return model

    return charged


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize(("kind", "make_atoms"), [("MACE", salt), ("ScaleShiftMACE", salt), ("ScaleShiftMACE", slab)])
def test_forces_and_stress_are_derivatives(kind, make_atoms, learn, charged):
    model, atoms = charged(kind=kind, learn=learn), make_atoms()
    out = model(batch_of(atoms).to_dict(), compute_stress=True)
    assert error(model(batch_of(atoms).to_dict())["forces"], out["forces"]) < 1e-9
    stress = out["stress"][0] if atoms.pbc.all() else None  # MACE divides by a volume that it chose across a slab
    check_forces_and_stress(functools.partial(energy, model), atoms, out["forces"], stress)


def test_energies_of_charges_join_those_of_the_model(charged, make):
    """With the constant in eV A, less an energy of each element; node energies sum to the total."""
    systems = [salt(), molecule("H2O")]
    batch, model = batch_of(*systems), charged()
    out, plain = model(batch.to_dict()), charged()
    del plain.long_range
    added = out["energy"] - plain(batch.to_dict())["energy"]
    for n, atoms in enumerate(systems):
        charges = torch.tensor([CHARGES[s] for s in atoms.symbols])
        cell = torch.tensor(atoms.cell.array) if atoms.pbc.any() else None
        wanted = 14.3996454785 * charge_energies(charges, torch.tensor(atoms.positions), width=1.2, cell=cell).sum()
        torch.testing.assert_close(out["long_range_energy"][n], wanted, rtol=1e-10, atol=0)
        offsets = sum(model.long_range.offsets[[1, 6, 8, 11, 17].index(z)] for z in atoms.numbers)
        torch.testing.assert_close(added[n], wanted - offsets, rtol=1e-9, atol=1e-12)
    sums = torch.zeros(2).index_add(0, batch.batch, out["node_energy"])
    torch.testing.assert_close(sums, out["energy"], rtol=1e-10, atol=1e-12)


def test_charges_repel_as_they_should(charged):
    """Far from each other, two molecules interact as their charges do."""
    model = charged()
    first, second = molecule("H2O"), molecule("H2O")
    second.rotate(70, "x")

    def apart(distance):
        moved = second.copy()
        moved.positions += [distance, 0, 0]
        return first + moved

    found = energy(model, apart(12.0)) - energy(model, apart(15.0))
    charges = np.array([CHARGES[s] for s in first.symbols])

    def pairs(atoms):
        distances = np.linalg.norm(atoms.positions[:3, None] - atoms.positions[None, 3:], axis=2)
        return 14.3996454785 * (charges[:, None] * charges / distances).sum()

    assert abs(found - (pairs(apart(12.0)) - pairs(apart(15.0)))) < 1e-9
    assert abs(found) > 1e-4


def test_start_takes_off_what_charges_add(charged, make):
    """Offsets leave energies of charges on the batch to first order, and single atoms that are not in it as they
    were."""
    systems = [salt(), salt((2, 1, 1)), molecule("H2O")]
    for atoms in systems:
        atoms.info["energy"], atoms.arrays["forces"] = 1.0, np.random.default_rng(0).normal(size=(len(atoms), 3))
    model = charged(batch=loader(systems, 2), kind="ScaleShiftMACE")
    out = model(batch_of(*systems).to_dict())
    del model.long_range
    rest = out["energy"] - model(batch_of(*systems).to_dict())["energy"]
    assert (rest.abs() < 1e-8 * out["long_range_energy"]).all()
    assert (out["long_range_energy"] > 1e-3).all()
    labels = torch.tensor(np.concatenate([atoms.arrays["forces"] for atoms in systems]))
    plain = make(kind="ScaleShiftMACE").scale_shift.scale
    far = charged(kind="ScaleShiftMACE")
    model.scale_shift.scale.zero_()
    own = model(batch_of(*systems).to_dict())["forces"]
    model.long_range, model.scale_shift.scale = far.long_range, torch.zeros(1)
    lack = labels - (model(batch_of(*systems).to_dict())["forces"] - own)
    ratio = lack.square().sum().sqrt() / labels.square().sum().sqrt()
    torch.testing.assert_close(charged(batch=loader(systems, 2)).scale_shift.scale, plain * ratio, rtol=1e-8, atol=0)
    assert abs(ratio - 1) > 1e-4


def test_born_charges_sum_to_zero_and_survive_wrapping(charged):
    model, atoms = charged(learn=True), salt()
    found = model(batch_of(atoms).to_dict(), compute_born_charges=True)["born_charges"]
    assert found.sum(0).abs().max() < 1e-12
    assert (found - found.mT).abs().max() > 1e-6  # not constants alone
    moved = atoms.copy()
    moved.positions += [3.0, -70.0, 11.0]
    moved.wrap()
    assert error(model(batch_of(moved).to_dict(), compute_born_charges=True)["born_charges"], found) < 1e-11
    assert "born_charges" not in model(batch_of(atoms).to_dict())


def test_what_is_missing_is_named(charged, make):
    with pytest.raises(ValueError, match="charges must be of elements of the model, H, C, O, Na, Cl, got K"):
        charged(charges={"K": 1})
    with pytest.raises(ValueError, match="charge for the element of every atom, got none for H, O"):
        charged(charges={"Na": 1, "Cl": -1})
    with pytest.raises(ValueError, match=r"graph 0 they sum to 4, and total_charge is 0; give the total charge"):
        charged(charges=CHARGES | {"Na": 1.7})
    with pytest.raises(ValueError, match="after and gain must be None with charges"):
        add_long_range(make(), (0,), charges=CHARGES, batch=batch_of(salt()))
    model, ion = charged(), batch_of(Atoms("Na")).to_dict()
    with pytest.raises(ValueError, match=r"graph 0 they sum to 0.7, and total_charge is 0"):
        model(ion)
    assert model(ion | {"total_charge": torch.tensor([0.7])})["energy"].isfinite().all()
