"""Ewald's sum, crystals of soft charges, and the study of what attention adds to messages with a cutoff."""

import dataclasses
import itertools

import pytest
import torch
from ewald import CAESIUM_CHLORIDE, ROCK_SALT, by_torch_pme, caesium_chloride, lattice, rock_salt

OPERATORS = "none", "EwaldAttention"


@pytest.fixture(scope="module")
def few():
    from data.periodic_charges import periodic_charges

    return periodic_charges(3, 4, 3.0, 0.4, seed=1)


@pytest.fixture
def make(randomise):
    def make(kind, **changes):
        from crystals import PRESETS, Model

        torch.manual_seed(0)
        model = Model(dataclasses.replace(PRESETS["quick"], operators=(kind,), **changes))
        return randomise(model).double().eval()

    return make


def test_energies_of_salts():
    """Madelung's constants by narrow soft charges."""
    from data.periodic_charges import ewald

    for (charges, positions, cell, nearest), known in (
        (rock_salt(), ROCK_SALT),
        (caesium_chloride(), CAESIUM_CHLORIDE),
    ):
        soft, forces = ewald(charges, positions, cell, 0.08)
        assert float(soft) * nearest / (len(charges) / 2) == pytest.approx(-known, rel=1e-12)
        assert forces.abs().max() < 1e-10


def test_ewald(few):
    """Against torch-pme and its derivatives."""
    for charges, positions, cell, energy, forces in zip(*few, strict=True):
        places = positions.clone().requires_grad_()
        wanted = by_torch_pme(charges, places, cell, 0.4)
        (slope,) = torch.autograd.grad(wanted, places)
        assert float(energy) == pytest.approx(wanted.item(), rel=1e-11)
        torch.testing.assert_close(forces, -slope, rtol=0, atol=1e-11)
        assert abs(float(by_torch_pme(charges, positions, cell, 0.45)) - float(energy)) > 1e-3  # of softer charges


def test_crystals_are_neutral_and_described_in_many_ways(few):
    from data.periodic_charges import crystals_at, in_another_cell, moved, periodic_charges, repeated, widths

    assert (few.charges.sum(1) == 0).all()
    volumes = torch.linalg.det(few.cells)
    torch.testing.assert_close(volumes.abs(), torch.full_like(volumes, 27))
    assert widths(few.cells).min() > 2
    inside = few.positions @ torch.linalg.inv(few.cells)
    assert 0 <= inside.min() < 0.2 < 0.8 < inside.max() <= 1
    again = periodic_charges(3, 4, 3.0, 0.4, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(few, again, strict=True))
    others = moved(few, 2), in_another_cell(few), repeated(few, (2, 1, 1)), repeated(few, (1, 2, 2))
    for other in others:
        assert other.positions.shape != few.positions.shape or (other.positions != few.positions).any()
        computed = crystals_at(other.charges, other.positions, other.cells, 0.4)
        times = other.charges.shape[1] // 4
        torch.testing.assert_close(other.energies, times * few.energies, rtol=1e-12, atol=0)
        for found, wanted in ((other.energies, computed.energies), (other.forces, computed.forces)):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert (torch.linalg.det(in_another_cell(few).cells) * volumes < 0).all()
    back = others[1].positions @ torch.linalg.inv(others[1].cells)
    assert back.min() >= 0
    assert back.max() < 1
    halfway = few.positions.clone()
    halfway[:, 0] += few.cells[:, 0] / 2  # not by a lattice vector
    other = crystals_at(few.charges, halfway, few.cells, 0.4)
    assert (other.energies - few.energies).abs().min() > 1e-3


@pytest.mark.parametrize("radius", [1.2, 4.2])
def test_edges(few, radius):
    """All images within the radius, one by one, an atom's own images and atoms outside the cell among them."""
    from crystals import edges
    from data.periodic_charges import moved

    part = moved(few, 3)
    (source, target), shift = edges(part.positions, part.cells, radius)
    flat = part.positions.flatten(0, 1)
    found = sorted(zip(target.tolist(), source.tolist(), *(flat[source] + shift).T.tolist(), strict=True))
    wanted = []
    for box, i, j in itertools.product(range(3), range(4), range(4)):
        images = part.positions[box, j] + lattice(part.cells[box], radius + 12)
        apart = (images - part.positions[box, i]).norm(dim=1)
        wanted += [(4 * box + i, 4 * box + j, *image) for image in images[(apart > 1e-9) & (apart < radius)].tolist()]
    assert len(found) == len(wanted) > 5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(sorted(wanted)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", OPERATORS)
def test_what_each_model_tells_apart(few, make, kind):
    """Crystals described otherwise are the same crystals; the open clouds of these descriptions are not."""
    from crystals import Units, change, same
    from data.periodic_charges import opened

    model, units, alone = make(kind), Units.of(few), opened(few, 0.4)
    for other in same(few).values():
        assert change(model, few, other, units) < 1e-10
        assert change(model, alone, opened(other, 0.4), units) > 1e-2
