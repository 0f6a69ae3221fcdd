"""Models with long range in OpenMM, which calls MACE's model itself."""

import numpy as np
import pytest
import torch
from ase.build import molecule
from atoms import salt
from mace_models import charged_systems, data_of, make_mace
from tg_equiattn.integrations.mace import LongRangeCalculator, add_long_range

pytest.importorskip("openmmml", reason="needs openmm and openmmml")
import openmm
from openmm import app, unit
from openmmml import MLPotential

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
IONS = {"H": 0.4, "C": 0.0, "O": -0.8, "Na": 1.0, "Cl": -1.0}


def in_openmm(path, atoms, charge):
    """Energy in eV and forces in eV/A."""
    topology = app.Topology()
    residue = topology.addResidue("all", topology.addChain())
    for number in atoms.numbers:
        topology.addAtom("atom", app.Element.getByAtomicNumber(int(number)), residue)
    if atoms.pbc.all():
        topology.setPeriodicBoxVectors(atoms.cell.array / 10 * unit.nanometer)
    system = MLPotential("mace", modelPath=path).createSystem(topology, returnEnergyType="energy", charge=charge)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(atoms.positions / 10)
    state = context.getState(getEnergy=True, getForces=True)
    energy, forces = state.getPotentialEnergy() / 96.4853, state.getForces(asNumpy=True) / 96.4853  # per eV
    mole = unit.kilojoule_per_mole
    return energy.value_in_unit(mole), forces.value_in_unit(mole / unit.angstrom)


@pytest.mark.parametrize("charges", [None, IONS, "predicted"])
@pytest.mark.parametrize(("system", "charge"), [("salt", 0), ("water", 0), ("water", 1)])
def test_openmm_has_the_energy_and_the_forces_of_ase(charges, system, charge, randomise, tmp_path):
    if charge and charges is IONS:
        pytest.skip("charges that are given sum to another charge")
    atoms = salt() if system == "salt" else molecule("H2O")
    if atoms.pbc.all():
        atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)  # as OpenMM wants it
    atoms.rattle(0.05, rng=np.random.default_rng(0))
    model = add_long_range(make_mace(), charges=charges, batch=data_of(*charged_systems(charges)))
    torch.save(model if charges is IONS else randomise(model, 0.1), tmp_path / "far.model")
    atoms.info["charge"], atoms.calc = charge, LongRangeCalculator(str(tmp_path / "far.model"))
    energy, forces = in_openmm(str(tmp_path / "far.model"), atoms, charge)
    assert energy == pytest.approx(atoms.get_potential_energy(), rel=1e-9)
    np.testing.assert_allclose(forces, atoms.get_forces(), rtol=0, atol=1e-9 * abs(forces).max())
