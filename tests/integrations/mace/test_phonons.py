"""The recipe of docs/mace.md: phonons of a polar crystal by phonopy, from the potential itself."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk
from mace_models import batch_of, make_mace
from tg_equiattn.integrations.mace import add_long_range

pytest.importorskip("phonopy")
THZ = 15.633302  # of the root of eV / (A^2 u)
PAGE = Path(__file__).parents[3] / "docs" / "mace.md"


def recipe():
    section = PAGE.read_text().split("### Phonons of polar crystals")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("double")
def test_the_recipe_runs_and_charges_split_the_optical_modes(tmp_path, monkeypatch):
    """Charges add a term along q + G for every reciprocal vector G, whose trace is known; G = 0 is the splitting."""
    monkeypatch.chdir(tmp_path)
    unit, squares = bulk("NaCl", "rocksalt", a=5.6, cubic=True), {}
    for charge in (0.7, 0.1):
        torch.manual_seed(0)
        model = make_mace(kind="MACE", numbers=[11, 17])
        batch, charges = batch_of(unit, numbers=[11, 17]), {"Na": charge, "Cl": -charge}
        torch.save(add_long_range(model, charges=charges, batch=batch, width=2.0), "salt.model")
        names = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(recipe(), names)
        frequencies = names["frequencies"][0] / THZ
        squares[charge] = np.sum(np.sign(frequencies) * frequencies**2)
        np.testing.assert_allclose(names["born"].sum(0), 0, atol=1e-10)
    vectors = 2 * np.pi / 5.6 * (np.indices((9, 9, 9)).reshape(3, -1).T - 4)
    along, still = (np.exp(-2.0 * ((vectors + q) ** 2).sum(1)) for q in ([0, 0, 2 * np.pi / 5.6 / 4], [0, 0, 0]))
    phases = np.where(unit.symbols == "Na", 1, -1)[:, None] * np.exp(1j * unit.positions @ vectors.T)
    others = (still * phases.conj() * phases.sum(0)).real.sum(1)  # an atom moves in the potential of the lattice
    wanted = 4 * np.pi * 14.3996 / unit.get_volume() * ((along.sum() - others) / unit.get_masses()).sum()
    assert squares[0.7] - squares[0.1] == pytest.approx((0.7**2 - 0.1**2) * wanted, rel=1e-4)
