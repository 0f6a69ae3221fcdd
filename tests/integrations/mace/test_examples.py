"""Potentials that load in a line."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from tg_equiattn.integrations.mace import LongRangeCalculator, load_example
from tg_equiattn.integrations.mace.examples import FOLDER

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("name", "side", "charge", "modes"), [("NaCl", 5.59, 1.090, 5.1), ("MgO", 4.22, 1.979, 11.9)])
def test_a_potential_is_that_of_its_card(name, side, charge, modes):
    """Born charges, forces of the perfect crystal, and the transverse optical mode at Gamma; whatever dtype is on."""
    before = torch.get_default_dtype()
    model = load_example(name)
    assert torch.get_default_dtype() == before
    assert {x.dtype for x in model.parameters()} == {torch.float64}
    assert (FOLDER / f"{name}.pt").stat().st_size < 1e6
    atoms = bulk(name, "rocksalt", a=side, cubic=True)
    atoms.calc = LongRangeCalculator(models=model, default_dtype="float64")
    assert np.abs(atoms.get_forces()).max() < 1e-8
    born = atoms.calc.get_property("born_charges", atoms)
    np.testing.assert_allclose(born[atoms.numbers > 10][:1], [charge * np.eye(3)], rtol=0, atol=0.01)
    first, step = atoms.numbers == atoms.numbers[0], 0.01
    atoms.positions[first, 0] += step
    force = -atoms.get_forces()[first, 0].mean() / step
    masses = np.array([atoms.get_masses()[first][0], atoms.get_masses()[~first][0]])
    assert 15.633 * np.sqrt(force / (masses.prod() / masses.sum())) == pytest.approx(modes, rel=0.03)


def test_others_are_refused():
    with pytest.raises(ValueError, match="name must be one of MgO, NaCl, got 'KCl'"):
        load_example("KCl")
