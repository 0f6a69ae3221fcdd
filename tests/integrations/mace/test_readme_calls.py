"""The call of MACE that README advertises: charges act beyond the cutoff of the messages."""

import pytest
import readme
from ase import Atoms
from atoms import salt
from mace_models import add_long_range, energy, loader, make_mace

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def pull(model):
    """The energy that parts two ions from 12 to 20 A: no path of edges joins them."""
    near, far = (energy(model, Atoms("NaCl", [[0, 0, 0], [0, 0, distance]])) for distance in (12.0, 20.0))
    return far - near


def test_charges_beyond_the_cutoff():
    names = {"add_long_range": add_long_range, "loader": loader([salt(), salt((2, 1, 1))], 1)}
    alone, model = make_mace(), eval(readme.CALLS["add_long_range"], names | {"model": make_mace()})
    assert abs(pull(alone)) < 1e-10
    assert pull(model) == pytest.approx(14.4 * (1 / 12 - 1 / 20), rel=0.01)
