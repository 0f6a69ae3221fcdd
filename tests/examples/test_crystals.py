"""Ewald's sum, crystals of soft charges, and the study of what attention adds to messages with a cutoff."""

import dataclasses

import pytest
import torch
from crystals import PRESETS, Model, Units, change, same
from data.periodic_charges import ewald, opened, periodic_charges
from ewald import CAESIUM_CHLORIDE, ROCK_SALT, by_torch_pme, caesium_chloride, rock_salt


@pytest.fixture(scope="module")
def few():
    return periodic_charges(3, 4, 3.0, 0.4, seed=1)


@pytest.fixture
def make(randomise):
    def make(kind, **changes):
        torch.manual_seed(0)
        model = Model(dataclasses.replace(PRESETS["quick"], operators=(kind,), **changes))
        return randomise(model).double().eval()

    return make


def test_energies_of_salts():
    """Madelung's constants by narrow soft charges."""
    for (charges, positions, cell, nearest), known in (
        (rock_salt(), ROCK_SALT),
        (caesium_chloride(), CAESIUM_CHLORIDE),
    ):
        soft, forces = ewald(charges, positions, cell, 0.08)
        assert float(soft) * nearest / (len(charges) / 2) == pytest.approx(-known, rel=1e-12)
        assert forces.abs().max() < 1e-10


def test_ewald(few):
    for charges, positions, cell, energy, forces in zip(*few, strict=True):
        places = positions.clone().requires_grad_()
        wanted = by_torch_pme(charges, places, cell, 0.4)
        (slope,) = torch.autograd.grad(wanted, places)
        assert float(energy) == pytest.approx(wanted.item(), rel=1e-11)
        torch.testing.assert_close(forces, -slope, rtol=0, atol=1e-11)
        assert abs(float(by_torch_pme(charges, positions, cell, 0.45)) - float(energy)) > 1e-3  # of softer charges


@pytest.mark.parametrize("kind", ["none", "EwaldAttention"])
def test_what_each_model_tells_apart(few, make, kind):
    """Crystals described otherwise are the same crystals; the open clouds of these descriptions are not."""
    model, units, alone = make(kind), Units.of(few), opened(few, 0.4)
    for other in same(few).values():
        assert change(model, few, other, units) < 1e-10
        assert change(model, alone, opened(other, 0.4), units) > 1e-2
