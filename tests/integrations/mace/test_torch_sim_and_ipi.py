"""Models with long range in torch-sim, which runs many systems at once, and in i-PI."""

import json

import numpy as np
import pytest
import torch
from ase.units import Bohr, Hartree
from atoms import salt
from mace_models import charged_systems, data_of, make_mace
from tg_equiattn.integrations.mace import LongRangeCalculator, add_long_range

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
IONS = {"H": 0.4, "C": 0.0, "O": -0.8, "Na": 1.0, "Cl": -1.0}


def make(charges, randomise):
    model = add_long_range(make_mace(), charges=charges, batch=data_of(*charged_systems(charges)))
    return model if charges else randomise(model, 0.1)


@pytest.mark.parametrize("charges", [None, IONS, "predicted"])
def test_torch_sim_has_the_energy_forces_and_stress_of_ase(charges, randomise):
    """Two crystals in one batch."""
    torch_sim = pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")
    from torch_sim.models.mace import MaceModel

    systems = [salt(), salt()]
    systems[0].rattle(0.05, seed=0)
    systems[1].set_cell(1.02 * systems[1].cell, scale_atoms=True)
    model, device = make(charges, randomise), torch.device("cpu")
    found = MaceModel(model, device=device)(torch_sim.initialize_state(systems, device, torch.float64))
    for n, atoms in enumerate(systems):
        atoms.calc = LongRangeCalculator(models=model)
        assert float(found["energy"][n]) == pytest.approx(atoms.get_potential_energy(), rel=1e-9)
        forces, stress = torch.from_numpy(atoms.get_forces()), torch.from_numpy(atoms.get_stress(voigt=False))
        there = found["forces"][n * len(atoms) : (n + 1) * len(atoms)]
        torch.testing.assert_close(there, forces, rtol=0, atol=1e-9 * float(forces.abs().max() + 1e-3))
        torch.testing.assert_close(found["stress"][n], stress, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("charges", [None, IONS, "predicted"])
def test_ipi_has_the_energy_and_the_forces_of_ase(charges, randomise, tmp_path):
    """Up to the constants of units, which differ in the eighth digit."""
    driver = pytest.importorskip("ipi.pes._mace", reason="needs ipi")
    atoms, (structure, model, settings) = salt(), (str(tmp_path / name) for name in ("a.extxyz", "far.model", "a.json"))
    atoms.rattle(0.05, seed=0)
    atoms.write(structure)
    torch.save(make(charges, randomise), model)
    (tmp_path / "a.json").write_text(json.dumps({"default_dtype": "float64"}))
    call = driver.MACE_driver(structure, model, mace_kwargs=settings)
    energy, forces, *_ = call(atoms.cell.array.T / Bohr, atoms.positions / Bohr)
    batch = call.compute([atoms.cell.array.T / Bohr] * 2, [atoms.positions / Bohr] * 2)
    assert [float(one[0]) for one in batch] == pytest.approx([float(energy)] * 2, rel=1e-12)
    atoms.calc = LongRangeCalculator(model)
    assert energy * Hartree == pytest.approx(atoms.get_potential_energy(), rel=1e-6)
    found = forces * Hartree / Bohr
    np.testing.assert_allclose(found, atoms.get_forces(), rtol=0, atol=1e-6 * abs(found).max())
