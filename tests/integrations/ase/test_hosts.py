"""Long range in MACE and in NequIP, attention and charges: derivatives, symmetries, batches, and what is far."""

import copy
import functools

import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk, molecule
from ase.calculators.fd import calculate_numerical_stress
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from atoms import check_derivatives, check_far, check_forces_and_stress, salt, slab, turned, waters
from space import error, motion

from tg_equiattn.functional import charge_energies

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}
COULOMB = 14.3996454785  # eV A
LEARNED, PREDICTED = {"charges": CHARGES, "learn": True}, {"charges": "predicted"}
KINDS = [{}, {"after": (1,)}, {"after": (0, 1)}, {"charges": CHARGES}, LEARNED, PREDICTED]


@pytest.fixture
def model(host):
    """A function that makes a model of which every parameter counts."""

    def make(**options):
        model = host.make(**options)
        torch.manual_seed(3)
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "long_range" in name and not name.endswith("gain"):
                    x += 0.3 * torch.randn_like(x)
        return model

    return make


def systems():
    return [salt(), molecule("H2O"), slab()]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("make_atoms", [salt, slab])
def test_forces_and_stress_are_derivatives(make_atoms, options, host, model):
    model, atoms = model(**options), make_atoms()
    out = host.outputs(model, atoms)
    stress = None if out["stress"] is None else out["stress"][0]
    check_forces_and_stress(functools.partial(host.energy, model), atoms, out["forces"], stress)


@pytest.mark.parametrize("method", ["direct", "ewald", "nufft"])
@pytest.mark.parametrize("options", [{}, {"after": (0, 1)}, LEARNED])
def test_derivatives_of_a_loss_on_forces(options, method, host, model):
    if method == "nufft":
        pytest.importorskip("finufft")
    atoms = waters(2.5) if method == "direct" else salt()
    more = {} if "charges" in options else {"num_gaussians": 1, "num_coulomb": 1}
    error = 1e-9 if method == "nufft" else 1e-6
    model = model(method=method, error=error, systems=[atoms], **options, **more)
    call, positions = host.displaced(model, atoms)
    own = [x for name, x in model.named_parameters() if "long_range" in name and x.requires_grad]
    check_derivatives(call, positions, own, atoms.get_volume() if atoms.pbc.all() else None)


@pytest.mark.parametrize("options", [{}, LEARNED, PREDICTED])
@pytest.mark.parametrize("reflect", [False, True])
def test_equivariance(reflect, options, host, model):
    model, r = model(**options), motion(reflect=reflect)
    out, other = (host.outputs(model, *x) for x in (systems(), turned(systems(), r.numpy())))
    found = {"energy": (out["energy"], 1e-10), "forces": (out["forces"] @ r.T, 1e-9)}
    if "charges" in options:
        found |= {"charges": (out["charges"], 1e-10), "dipole": (out["dipole"] @ r.T, 1e-10)}
    if "born_charges" in out and out["born_charges"] is not None:
        found["born_charges"] = r @ out["born_charges"] @ r.T, 1e-10
    for name, (wanted, tolerance) in found.items():
        assert error(other[name], wanted) < tolerance, name


@pytest.mark.parametrize("options", [{}, LEARNED, PREDICTED])
def test_alone_as_in_a_batch(options, host, model):
    """Charges that are predicted sum to the total charge of each frame."""
    model, frames = model(**options), systems()
    if options is PREDICTED:
        for atoms, charge in zip(frames, (-2.0, 1.0, 0.0), strict=True):
            atoms.info["charge"] = charge
    out = host.outputs(model, *frames)
    assert error(out["energy"], torch.tensor([host.energy(model, atoms) for atoms in frames])) < 1e-10
    if options is PREDICTED:
        sums = torch.stack([charges.sum() for charges in out["charges"].split([8, 3, 8])])
        assert error(sums, torch.tensor([-2.0, 1.0, 0.0])) < 1e-12
        assert out["shared_charge"].abs().min() > 1e-3
        assert error(host.outputs(model, frames[0])["shared_charge"][0], out["shared_charge"][0]) < 1e-10


def test_what_is_far_counts_and_repeats(host):
    model = host.make()
    check_far(functools.partial(host.energy, model), host.layer_of(model).gain)


def test_energies_of_charges_join_those_of_the_model(host):
    """With the constant in eV A, less an energy of each element, which is fitted to the batch of the start."""
    frames = [salt(), molecule("H2O")]
    model = host.make(charges=CHARGES, systems=frames)
    out = host.outputs(model, *frames)
    for n, atoms in enumerate(frames):
        charges = torch.tensor([CHARGES[s] for s in atoms.symbols])
        cell = torch.tensor(atoms.cell.array) if atoms.pbc.any() else None
        wanted = COULOMB * charge_energies(charges, torch.tensor(atoms.positions), width=1.2, cell=cell).sum()
        assert error(out["long_range_energy"][n], wanted) < 1e-10
    plain = copy.deepcopy(model)
    host.layer_of(plain).constants.zero_()
    host.layer_of(plain).offsets.zero_()
    near = host.outputs(plain, *frames)["energy"]
    assert (out["energy"] - near).abs().max() < 1e-8 * out["long_range_energy"].min()
    wide = salt()
    wide.set_cell(1.2 * wide.cell.array, scale_atoms=True)
    far, near = host.outputs(model, wide), host.outputs(plain, wide)
    offsets = 4 * host.layer_of(model).offsets[3:].sum()  # of Na and Cl
    assert error(far["energy"] - near["energy"], far["long_range_energy"] - offsets) < 1e-8


def test_born_charges(host, model):
    """Derivatives of dipoles times the root of the dielectric constant; they sum to zero, whatever is wrapped."""
    model, atoms = model(dielectric=4.0, **LEARNED), salt()
    born = host.outputs(model, atoms)["born_charges"]
    near = [atoms.copy(), atoms.copy()]
    for sign, moved in zip((1, -1), near, strict=True):
        moved.positions[3, 1] += sign * 1e-4
    dipoles = host.outputs(model, *near)["dipole"]
    assert error(born[3, :, 1], 2 * (dipoles[0] - dipoles[1]) / 2e-4) < 1e-6
    assert born.sum(0).abs().max() < 1e-12
    assert (born - born.mT).abs().max() > 1e-6  # not constants alone
    moved = atoms.copy()
    moved.positions += [3.0, -70.0, 11.0]
    moved.wrap()
    assert error(host.outputs(model, moved)["born_charges"], born) < 1e-11
    assert error(host.outputs(model, salt((2, 1, 1)))["born_charges"], born.repeat(2, 1, 1)) < 1e-11


def test_scale_is_found_from_forces(host):
    """Forces of charges beside forces between pairs, from oxidation states; and labels whose charges attract alike."""
    frames = []
    for n in range(3):
        atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat((2, 1, 1))
        atoms.rattle(0.05, seed=n)
        pos = torch.tensor(atoms.positions, requires_grad=True)
        charges = torch.tensor([{"Na": 0.63, "Cl": -0.63}[s] for s in atoms.symbols])
        far = COULOMB * charge_energies(charges, pos, width=0.3, cell=torch.tensor(atoms.cell.array)).sum()
        distances = torch.tensor(atoms.get_all_distances(mic=True))
        vectors = torch.tensor(atoms.get_all_distances(mic=True, vector=True))
        near = torch.where((distances > 0) & (distances < 3), (1 - distances / 3).clamp(min=0) ** 4, 0.0)
        forces = -torch.autograd.grad(far, pos)[0] - (near[..., None] * vectors).sum(1)
        atoms.info["energy"], atoms.arrays["forces"] = 0.0, forces.numpy()
        frames.append(atoms)
    options = {"charges": {"Na": 1, "Cl": -1}, "learn": "scale", "systems": frames}
    layer = host.layer_of(host.make(**options))
    assert abs(layer.scale.item() - 0.63) < 0.03
    for atoms in frames:
        atoms.arrays["forces"] = -np.array(atoms.arrays["forces"])
    with pytest.raises(ValueError, match="charges must attract and repel as the forces of the data do"):
        host.make(**options)


def test_dynamics(host, calculator):
    """Stress is a derivative. NVE keeps energies as well as the host's own model does (gain 0), or to 1e-5 of what
    long range adds, and by the square of the step."""
    own, far = (calculator(host.make(gain=gain)) for gain in (0.0, 0.5))
    start, kept = [], []
    for calc, step in ((own, 2.0), (far, 2.0), (far, 1.0)):
        atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
        atoms.rattle(0.05, seed=1)
        atoms.calc = calc
        stress = atoms.get_stress()
        assert np.abs(stress - calculate_numerical_stress(atoms, eps=3e-5)).max() < 1e-6 * np.abs(stress).max()
        start.append(atoms.get_potential_energy())
        MaxwellBoltzmannDistribution(atoms, temperature_K=100, rng=np.random.default_rng(0))
        dynamics, energies = VelocityVerlet(atoms, step * units.fs), [atoms.get_total_energy()]
        for _ in range(int(20 / step)):
            dynamics.run(1)
            energies.append(atoms.get_total_energy())
        kept.append(np.abs(np.array(energies) - energies[0]).max())
    added = abs(start[1] - start[0])
    assert added > 1e-3
    assert kept[1] < max(1.2 * kept[0], 1e-5 * added)
    assert kept[2] < 0.4 * kept[1]
