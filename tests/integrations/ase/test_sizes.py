"""What ASE sees of models with long range: systems and supercells, fragments apart and their sum, dynamics."""

import numpy as np
import pytest
from ase import units
from ase.calculators.fd import calculate_numerical_stress
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from hosts import missing

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = [pytest.param(host, marks=pytest.mark.skipif(missing(host), reason=f"{host} is not installed"))
          for host in ("mace", "nequip")]  # fmt: skip


@pytest.fixture(params=MODELS)
def calculator(request):
    """ASE's calculator of a host, for a float64 model with such options. Its parameters are as after training, but
    constants of elements are zero, as in a new model."""

    import torch

    def make(**options):
        if request.param == "mace":
            from mace.calculators import MACECalculator
            from mace_models import batch_of, make_mace, mixed
            from tg_equiattn.integrations.mace import add_long_range

            torch.manual_seed(0)
            model = add_long_range(make_mace(), batch=batch_of(*mixed()), **{"gain": 0.5, **options})
            with torch.no_grad():
                for name, x in model.products[0].long_range.named_parameters():
                    if name != "gain" and not name.endswith("neutral.constants"):
                        x += 0.2 * torch.randn_like(x)
            return MACECalculator(models=[model], default_dtype="float64")
        from nequip.integrations.ase import NequIPCalculator
        from nequip_models import make_nequip, transforms

        return NequIPCalculator(make_nequip(options=options), "cpu", transforms=transforms())

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which NequIP keeps positions
    yield make
    torch.set_default_dtype(before)


def salt():
    from ase.build import bulk

    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.05, seed=1)
    return atoms


def energy(atoms, calculator):
    atoms = atoms.copy()
    atoms.calc = calculator
    return atoms.get_potential_energy()


def test_dynamics(calculator):
    """Stress is a derivative. NVE keeps energies as well as the host's own model does (gain 0), or to 1e-5 of what
    long range adds, and by the square of the step."""
    far, own, kept = calculator(), calculator(gain=0.0), []
    for calculator, step in ((own, 2.0), (far, 2.0), (far, 1.0)):
        atoms = salt()
        atoms.calc = calculator
        assert (
            np.abs(atoms.get_stress() - calculate_numerical_stress(atoms, eps=3e-5)).max()
            < 1e-6 * np.abs(atoms.get_stress()).max()
        )
        MaxwellBoltzmannDistribution(atoms, temperature_K=100, rng=np.random.default_rng(0))
        dynamics, energies = VelocityVerlet(atoms, step * units.fs), [atoms.get_total_energy()]
        for _ in range(int(20 / step)):
            dynamics.run(1)
            energies.append(atoms.get_total_energy())
        kept.append(np.abs(np.array(energies) - energies[0]).max())
    added = abs(energy(salt(), far) - energy(salt(), own))
    assert added > 1e-3
    assert kept[1] < max(1.2 * kept[0], 1e-5 * added)
    assert kept[2] < 0.4 * kept[1]
