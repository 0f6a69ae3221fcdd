"""Stress of slabs in a MACE with long range."""

import warnings

import numpy as np
import pytest
from ase.calculators.calculator import PropertyNotImplementedError
from atoms import differences, salt
from mace_models import batch_of
from tg_equiattn.integrations.mace import LongRangeCalculator

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


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
