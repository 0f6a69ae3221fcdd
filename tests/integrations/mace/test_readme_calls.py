"""The call of MACE that README advertises: charges act beyond the cutoff of the messages."""

import functools

import pytest
import readme
from atoms import pull, salt
from mace_models import add_long_range, energy, loader, make_mace

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


def test_charges_beyond_the_cutoff():
    names = {"add_long_range": add_long_range, "loader": loader([salt(), salt((2, 1, 1))], 1)}
    alone, model = make_mace(), eval(readme.CALLS["add_long_range"], names | {"model": make_mace()})
    assert abs(pull(functools.partial(energy, alone))) < 1e-10
    assert pull(functools.partial(energy, model)) == pytest.approx(14.4 * (1 / 12 - 1 / 20), rel=0.01)
