"""The call of MACE that README advertises: charges act beyond the cutoff of the messages."""

import functools

import pytest
import readme
from atoms import pull, salt
from mace_models import add_long_range, data_of, energy, loader, make_mace

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def labelled(charge):
    """Crystals with forces of ions of this charge, and of a new model."""
    systems = [salt(), salt((2, 1, 1))]
    model = add_long_range(make_mace(), charges={"Na": charge, "Cl": -charge}, batch=loader(systems, 1))
    for atoms in systems:
        atoms.arrays["forces"] = model(data_of(atoms))["forces"].detach().numpy()
        atoms.info["energy"] = 0.0
    return systems


def test_charges_beyond_the_cutoff():
    """The factor of the charges is found from forces, to which a new model adds some of its own."""
    names = {"add_long_range": add_long_range, "loader": loader(labelled(0.8), 1)}
    alone, model = make_mace(), eval(readme.CALLS["add_long_range"], names | {"model": make_mace()})
    assert abs(pull(functools.partial(energy, alone))) < 1e-10
    assert pull(functools.partial(energy, model)) == pytest.approx(0.64 * 14.4 * (1 / 12 - 1 / 20), rel=0.25)
