"""Charges that are given, in NequIP: energies, derivatives, the fit before training, labels, and what is refused."""

import copy
import functools
import types

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from atoms import check_forces_and_stress, salt, slab, turned
from nequip.scripts import _package_utils
from nequip.train import MeanSquaredError, MetricsManager
from nequip_models import energy, frame, frames, make_nequip
from space import error, motion
from tg_equiattn.integrations.nequip import FitCharges

from tg_equiattn.functional import charge_energies

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}
COULOMB = 14.3996454785  # eV A
SCALES = {"per_type_energy_scales": 1.3, "per_type_energy_shifts": 0.2}


def labelled(*systems):
    """A batch with labels of forces."""
    torch.manual_seed(1)
    return frames(*systems) | {"forces": torch.randn(sum(map(len, systems)), 3)}


def fit(model, *batches):
    """By the callback, as a trainer calls it."""
    trainer = types.SimpleNamespace(
        datamodule=types.SimpleNamespace(train_dataloader=lambda: [dict(batch) for batch in batches]),
        strategy=types.SimpleNamespace(broadcast=lambda state: state),
    )
    FitCharges().on_fit_start(trainer, types.SimpleNamespace(model={"sole_model": model}))
    return model


def charged(learn=False, batches=(), charges=None, dtype="float64", **options):
    """A model of which every parameter counts."""
    options = {"learn": learn, "width": 1.2, "born_charges": True, **options}
    model = make_nequip(dtype, charges=CHARGES if charges is None else charges, options=options, **SCALES)
    fit(model, *(batches or [labelled(salt(), molecule("H2O"))]))
    if learn is True:
        layer = model.model.func.long_range.interaction
        with torch.no_grad():
            layer.weights.normal_(0, 3)
            layer.scale.fill_(1.1)
    return model


def predicted(*systems, charges=None):
    """A model with charges that are predicted, of which every parameter counts."""
    batch = labelled(*(systems or (salt(), molecule("H2O"))))
    batch["charge"] = torch.zeros(len(batch["num_atoms"]), 1) if charges is None else torch.tensor(charges)
    model = charged(charges="predicted", born_charges=False, batches=[batch])
    with torch.no_grad():
        for p in model.model.func.long_range.parameters():
            p += torch.randn_like(p)
    return model


@pytest.mark.parametrize("make", [charged, functools.partial(charged, True), predicted])
@pytest.mark.parametrize("make_atoms", [salt, slab])
def test_forces_and_stress_are_derivatives(make_atoms, make):
    model, atoms = make(), make_atoms()
    charge = {"charge": torch.zeros(1, 1)}

    def of(atoms):
        return model(frame(atoms) | charge)["total_energy"].item()

    out = model(frame(atoms) | charge)
    check_forces_and_stress(of, atoms, out["forces"], out["stress"][0])


def test_predicted_charges_sum_to_total_charges():
    """And frames of a batch are as alone; the start needs total charges; what does not fit is refused."""
    systems, model = [molecule("H2O"), molecule("CO2"), salt()], predicted()
    charges = torch.tensor([[1.0], [0.0], [-2.0]])
    out = model(frames(*systems) | {"charge": charges})
    sums = torch.stack([q.sum() for q in out["charges"].flatten().split([3, 3, 8])])
    assert error(sums, charges.flatten()) < 1e-12
    assert out["shared_charge"].abs().min() > 1e-3
    for n, atoms in enumerate(systems):
        alone = model(frame(atoms) | {"charge": charges[n : n + 1]})
        assert error(alone["total_energy"][0], out["total_energy"][n]) < 1e-10
    with pytest.raises(ValueError, match="total_charge must be given for predicted charges"):
        charged(charges="predicted", born_charges=False)
    for wrong in ({"charges": "learned", "born_charges": False}, {"charges": "predicted"}):
        with pytest.raises(ValueError, match='charges must be a charge for each type, or "predicted" without learn'):
            charged(**wrong)


def test_a_loss_of_the_shared_charge_lowers_it():
    """By NequIP's own metrics, as a step of its training module computes them."""
    coefficients = {"total_energy": 1e-3, "forces": 1e-3, "shared_charge": 10.0}
    metrics = [{"field": name, "coeff": x, "metric": MeanSquaredError()} for name, x in coefficients.items()]
    loss, batch = MetricsManager(metrics), labelled(molecule("OH"), molecule("H2O"), molecule("CO2"))
    batch |= {"charge": torch.tensor([[-1.0], [0.0], [0.0]]), "total_energy": torch.zeros(3, 1)}
    model = predicted().train()
    optimizer, sizes = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(30):
        out = model(dict(batch))
        optimizer.zero_grad()
        loss(out, batch | {"shared_charge": torch.zeros(3, 1)})["weighted_sum"].backward()
        optimizer.step()
        sizes.append(out["shared_charge"].square().mean().item())
    assert sizes[-1] < 0.05 * sizes[0]


def test_energies_of_charges_join_those_of_the_model():
    systems, model = [salt(), molecule("H2O")], charged()
    out, network = model(frames(*systems)), model.model.func
    layer = network.long_range.interaction
    for n, atoms in enumerate(systems):
        charges = torch.tensor([CHARGES[s] for s in atoms.symbols])
        cell = torch.tensor(atoms.cell.array) if atoms.pbc.any() else None
        wanted = COULOMB * charge_energies(charges, torch.tensor(atoms.positions), width=1.2, cell=cell).sum()
        assert error(out["long_range_energy"][n, 0], wanted) < 1e-10
    layer.constants.zero_()
    layer.offsets.zero_()  # which are those of the batch
    plain = model(frames(*systems))["total_energy"]
    assert (out["total_energy"] - plain).abs().max() < 1e-8 * out["long_range_energy"].min()


@pytest.mark.parametrize("reflect", [False, True])
def test_equivariance(reflect):
    model, systems, r = charged(True), [salt(), molecule("H2O"), slab()], motion(reflect=reflect)
    out, other = (model(frames(*x)) for x in (systems, turned(systems, r.numpy())))
    for name in ("total_energy", "charges"):
        assert error(other[name], out[name]) < 1e-11
    for name in ("forces", "polarization"):
        assert error(other[name], out[name] @ r.T) < 1e-10
    assert error(other["born_effective_charges"], r @ out["born_effective_charges"] @ r.T) < 1e-10


def test_born_charges():
    model, atoms = charged(True, dielectric=4.0), salt()
    born = model(frame(atoms))["born_effective_charges"]
    near = [atoms.copy(), atoms.copy()]
    for sign, moved in zip((1, -1), near, strict=True):
        moved.positions[3, 1] += sign * 1e-4
    dipoles = model(frames(*near))["polarization"]
    assert error(born[3, :, 1], 2 * (dipoles[0] - dipoles[1]) / 2e-4) < 1e-6
    assert born.sum(0).abs().max() < 1e-12
    moved = atoms.copy()
    moved.positions += [3.0, -70.0, 11.0]
    moved.wrap()
    assert error(model(frame(moved))["born_effective_charges"], born) < 1e-11


def test_alone_as_in_a_batch():
    model, systems = charged(True), [salt(), molecule("H2O"), slab()]
    together = model(frames(*systems))["total_energy"]
    assert error(together[:, 0], torch.tensor([energy(model, atoms) for atoms in systems])) < 1e-10


def test_the_fit_sets_offsets_and_scales():
    """Once: another fit of a fitted model changes nothing. Scales are those of forces without those of charges."""
    batch = labelled(salt(), molecule("H2O"))
    model, plain = charged(batches=[batch]), charged(batches=[labelled(molecule("H2O"))])
    kept = copy.deepcopy(model.state_dict())
    fit(model, labelled(salt()))
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, kept[name], rtol=0, atol=0, equal_nan=True)
    network, layer = model.model.func, model.model.func.long_range.interaction
    out = model(dict(batch))["forces"]
    layer.constants.zero_()
    rest = batch["forces"] - (out - model(dict(batch))["forces"])
    assert error(network.per_type_energy_scale_shift.scales[0, 0], 1.3 * rest.norm() / batch["forces"].norm()) < 1e-8
    assert error(plain.model.func.long_range.interaction.offsets, layer.offsets) > 1e-3


def test_scale_is_found_from_forces():
    systems, forces = [], []
    for n in range(3):
        atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat((2, 1, 1))
        atoms.rattle(0.05, seed=n)
        pos = torch.tensor(atoms.positions, requires_grad=True)
        charges = torch.tensor([{"Na": 0.63, "Cl": -0.63}[s] for s in atoms.symbols])
        far = COULOMB * charge_energies(charges, pos, width=0.3, cell=torch.tensor(atoms.cell.array)).sum()
        systems.append(atoms)
        forces.append(-torch.autograd.grad(far, pos)[0])
    batch = frames(*systems) | {"forces": torch.cat(forces)}
    model = charged("scale", batches=[batch], charges={"Na": 1, "Cl": -1})
    assert abs(model.model.func.long_range.interaction.scale.item() - 0.63) < 0.03


def test_it_learns_from_born_charges():
    """As NequIP's trainer does, in training mode: every parameter of ours moves."""
    model, atoms = charged(True).train(), salt()
    layer, batch = model.model.func.long_range.interaction, frames(atoms)
    wanted = torch.eye(3) * torch.tensor([1.0 if s == "Na" else -1.0 for s in atoms.symbols])[:, None, None]
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.02), []
    for _ in range(20):
        out = model(dict(batch))
        loss = (out["born_effective_charges"] - wanted).square().mean() + 1e-6 * out["forces"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_packages(tmp_path):
    """As nequip-package writes them: with this library's code, which loads without it."""
    model, path = charged(True), tmp_path / "far.nequip.zip"
    with torch.package.PackageExporter(path) as exporter:
        exporter.mock([f"{name}.**" for name in _package_utils._MOCK_MODULES])
        exporter.extern([f"{name}.**" for name in _package_utils._EXTERNAL_MODULES])
        exporter.intern([f"{name}.**" for name in _package_utils._INTERNAL_MODULES])
        exporter.save_pickle("model", "model.pkl", model, dependencies=True)
    loaded = torch.package.PackageImporter(path).load_pickle("model", "model.pkl")
    for atoms in (salt(), molecule("H2O")):
        assert energy(loaded, atoms) == energy(model, atoms)


def test_float32_and_copies():
    model, single = charged(True), charged(True, dtype="float32")
    single.load_state_dict(model.state_dict())
    out, wanted = (m(frames(salt(), molecule("H2O"))) for m in (single, model))
    assert error(out["total_energy"].double(), wanted["total_energy"]) < 1e-5
    assert torch.equal(copy.deepcopy(model)(frame(salt()))["total_energy"], model(frame(salt()))["total_energy"])


def test_what_is_refused():
    with pytest.raises(ValueError, match="charges must be fitted before training: add FitCharges to the trainer's"):
        make_nequip(charges=CHARGES)(frame(salt()))
    with pytest.raises(ValueError, match="charges must be of types H, C, O, Na, Cl, got K"):
        make_nequip(charges={"K": 1})
    with pytest.raises(ValueError, match=r'learn must be False, True or "scale", got 1\.5'):
        make_nequip(charges=CHARGES, options={"learn": 1.5})
    with pytest.raises(ValueError, match="charge for the element of every atom, got none for C"):
        charged()(frame(molecule("CH3OH")))
    model, ion = charged(), molecule("OH")
    with pytest.raises(ValueError, match=r"in graph 0 they sum to -0\.4, and no total_charge is given"):
        model(frame(ion))
    assert np.isfinite(model(frame(ion) | {"charge": torch.tensor([[-0.4]])})["total_energy"].item())
