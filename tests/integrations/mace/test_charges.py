"""Charges that are given, in MACE: energies, derivatives, what is fitted at the start, labels, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from atoms import salt
from mace import modules, tools
from mace_models import batch_of, charged_systems, data_of, energy, graphs, loader, make_mace
from space import error
from tg_equiattn.integrations.mace import (
    ChargeLoss,
    LongRangeCalculator,
    add_long_range,
    can_predict_charges,
    copy_long_range,
    select_head,
    without_long_range,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]
CHARGES = {"Na": 0.7, "Cl": -0.7, "H": 0.4, "O": -0.8}


@pytest.fixture
def charged():
    """A model with charges, of which every parameter counts."""

    def charged(batch=None, learn=False, width=1.2, charges=CHARGES, dielectric=1.0, **options):
        torch.manual_seed(3)
        batch = data_of(*charged_systems(charges)) if batch is None else batch
        own = {"charges": charges, "learn": learn, "width": width, "dielectric": dielectric}
        model = add_long_range(make_mace(**options), batch=batch, **own)
        if charges == "predicted":
            with torch.no_grad():
                for p in model.long_range.parameters():
                    p += torch.randn_like(p)
        if learn is True:
            with torch.no_grad():
                model.long_range.weights.normal_(0, 3)
                model.long_range.scale.fill_(1.1)
        return model

    return charged


def test_outputs(charged):
    """Programs such as i-PI stop at outputs that they do not know. Node energies sum to the total."""
    model, batch = charged(), batch_of(salt(), molecule("H2O"))
    out = model(batch.to_dict())
    assert not {"long_range_energy", "born_charges"} & {*out}
    sums = torch.zeros(2).index_add(0, batch.batch, out["node_energy"])
    torch.testing.assert_close(sums, out["energy"], rtol=1e-10, atol=1e-12)


def labelled(model, systems):
    """Energies and forces of a model on some systems, as their labels."""
    for atoms in systems:
        out = model(batch_of(atoms).to_dict())
        atoms.info["energy"], atoms.arrays["forces"] = out["energy"].item(), out["forces"].detach().numpy()
    return systems


def test_start_takes_off_what_charges_add(charged):
    """Energies of charges on the batch by composition; the scale is that of the forces without those of charges."""
    systems = [salt(), salt((2, 1, 1)), molecule("H2O")]
    for atoms in systems:
        atoms.info["energy"], atoms.arrays["forces"] = 1.0, np.random.default_rng(0).normal(size=(len(atoms), 3))
    model, batch = charged(batch=loader(systems, 2)), batch_of(*systems)
    plain = without_long_range(model)
    out, near = model(batch.to_dict(), compute_long_range_energy=True), plain(batch.to_dict())
    assert ((out["energy"] - near["energy"]).abs() < 1e-8 * out["long_range_energy"]).all()
    assert (out["long_range_energy"] > 1e-3).all()
    rest = batch.forces - (out["forces"] - near["forces"])
    wanted = make_mace().scale_shift.scale * rest.norm() / batch.forces.norm()
    torch.testing.assert_close(model.scale_shift.scale, wanted, rtol=1e-8, atol=0)
    # an element that is not in the batch keeps its atomic energy
    lone, data = charged(batch=batch_of(molecule("H2O"))), batch_of(Atoms("Na")).to_dict()
    data["total_charge"] = torch.tensor([0.7])
    torch.testing.assert_close(lone(data)["energy"], without_long_range(lone)(dict(data))["energy"])


def test_start_of_a_trained_model_keeps_its_forces(charged):
    """Its own forces get the factor that fits labels without forces of charges."""
    torch.manual_seed(3)
    systems = labelled(make_mace(), [salt(), molecule("H2O")])
    model, batch = charged(batch=batch_of(*systems)), batch_of(*systems)
    plain = without_long_range(model)
    own, far = plain(batch.to_dict())["forces"], model(batch.to_dict())["forces"]
    rest = batch.forces - (far - own)
    assert abs((own * (rest - own)).sum()) < 1e-9 * own.square().sum()
    assert error(own, batch.forces) > 1e-6


def test_mace_learns_charges_from_born_charges(charged, tmp_path):
    """By MACE's own loop: NaN means that a frame has no label, and without labels charges stay."""
    frames = [bulk("NaCl", "rocksalt", a=5.6, cubic=True) for _ in range(4)]
    for n, atoms in enumerate(frames):
        atoms.rattle(0.02, seed=n)
        atoms.info["energy"], atoms.arrays["forces"] = 0.0, np.zeros((8, 3))
    model, data = charged(learn=True), graphs(frames)
    with torch.no_grad():
        model.long_range.weights.zero_()
    for n, graph in enumerate(data):
        unit = torch.eye(3) * torch.tensor([1.0 if z == 11 else -1.0 for z in frames[n].numbers])[:, None, None]
        graph.born_charges = torch.full_like(unit, torch.nan) if n % 2 else unit
    train = tools.torch_geometric.dataloader.DataLoader(data, batch_size=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def train_with(loss):
        tools.train(
            model=model, loss_fn=loss, train_loader=train, valid_loaders={"Default": train}, optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), start_epoch=0, max_num_epochs=12,
            patience=99, checkpoint_handler=tools.CheckpointHandler(str(tmp_path), "far"), eval_interval=12,
            logger=tools.MetricsLogger(str(tmp_path), "far"), device=torch.device("cpu"), log_errors="PerAtomRMSE",
            output_args={"energy": True, "forces": True, "virials": False, "stress": False},
        )  # fmt: skip
        out = model(batch_of(frames[0]).to_dict(), compute_born_charges=True)["born_charges"]
        return out.diagonal(dim1=1, dim2=2).abs().mean().item()

    base = modules.WeightedEnergyForcesLoss(1.0, 1e-3)
    assert abs(train_with(ChargeLoss(base, born_charges=10.0)) - 1) < 0.1
    with pytest.raises(ValueError, match="graphs must have born_charges of shape"):
        ChargeLoss(base, born_charges=1.0)(ref=batch_of(frames[0]), pred=model(batch_of(frames[0]).to_dict()))


def test_losses_of_dipoles_and_total_charges(charged):
    """Mean squares; a frame with a weight of zero has no dipole."""
    base = modules.WeightedEnergyForcesLoss(0.0, 0.0)
    batch, model = batch_of(molecule("H2O"), molecule("H2O")), charged(learn=True)
    batch.dipole_weight[1] = 0
    out = model(batch.to_dict(), training=True)
    found = ChargeLoss(base, dipole=3.0)(ref=batch, pred=out)
    torch.testing.assert_close(found, 3 * out["dipole"][0].square().sum() / 6)
    batch.total_charge = torch.tensor([0.0, 0.2])
    found = ChargeLoss(base, total_charge=5.0)(ref=batch, pred=out)
    torch.testing.assert_close(found, torch.tensor(5 * 0.02))
    batch.total_charge = 2 * torch.zeros(2).index_add(0, batch.batch, out["charges"].detach() + 0.1)
    found = ChargeLoss(base, total_charge=1.0, dielectric=4.0)(ref=batch, pred=out)
    torch.testing.assert_close(found, torch.tensor(0.6**2))  # three atoms
    batch.dipole = 2 * out["dipole"].detach()
    torch.testing.assert_close(ChargeLoss(base, dipole=1.0, dielectric=4.0)(ref=batch, pred=out), torch.tensor(0.0))


def test_calculator(charged):
    """Charges and Born charges, and dipoles where they are defined, alone and as a committee."""
    models = [charged(learn=True), charged(learn=True, width=1.4)]
    atoms, crystal = molecule("H2O"), salt()
    for some in (models[:1], models):
        atoms.calc = crystal.calc = LongRangeCalculator(models=some, default_dtype="float64")
        asked = {"compute_born_charges": True, "compute_long_range_energy": True}
        each = [model(batch_of(atoms).to_dict(), **asked) for model in some]
        mean = {name: torch.stack([out[name] for out in each]).mean(0).detach().numpy() for name in each[0]
                if name in ("charges", "dipole", "born_charges", "long_range_energy")}  # fmt: skip
        assert np.abs(atoms.get_charges() - mean["charges"]).max() < 1e-12
        assert np.abs(atoms.get_dipole_moment() - mean["dipole"][0]).max() < 1e-12
        assert np.abs(atoms.calc.get_property("born_charges", atoms) - mean["born_charges"]).max() < 1e-12
        assert abs(atoms.calc.get_property("long_range_energy", atoms) - mean["long_range_energy"][0]) < 1e-12
        assert crystal.get_charges().shape == (8,)
        with pytest.raises(PropertyNotImplementedError):
            crystal.get_dipole_moment()
    ion = Atoms("Na", info={"charge": 0.7}, calculator=atoms.calc)
    assert np.isfinite(ion.get_potential_energy())
    with pytest.raises(PropertyNotImplementedError):
        ion.get_dipole_moment()


@pytest.mark.parametrize("charges", [CHARGES, "predicted"])
def test_an_external_field(charges, charged):
    """From the data, where MACE has zeros by default, and by the calculator from atoms.info."""
    model, atoms, field = charged(charges=charges), molecule("H2O"), [0.3, -0.2, 0.5]
    data, crystal = data_of(atoms, molecule("H2O")), data_of(salt())
    fields = torch.tensor([field, [0.0, 0.0, 0.0]])
    plain, out = model(dict(data)), model(data | {"external_field": fields})
    assert error(out["energy"], plain["energy"] - (fields * plain["dipole"]).sum(1)) < 1e-12
    pulls, step = torch.zeros_like(data["positions"]), 1e-4
    for place in np.ndindex(*pulls.shape):
        each = []
        for moved in (-step, step):
            positions = data["positions"].clone()
            positions[place] += moved
            each.append(model(data | {"external_field": fields, "positions": positions})["energy"].sum())
        pulls[place] = (each[0] - each[1]) / (2 * step)
    assert error(out["forces"], pulls) < 1e-5
    atoms.info["external_field"], atoms.calc = field, LongRangeCalculator(models=[model], default_dtype="float64")
    assert abs(atoms.get_potential_energy() - out["energy"][0].item()) < 1e-10
    assert model(dict(crystal))["energy"].isfinite().all()
    with pytest.raises(ValueError, match="external_field must be zero for graphs that repeat"):
        model(crystal | {"external_field": torch.tensor([field])})


def test_copies_heads_and_fine_tuning_keep_charges(charged, tmp_path):
    model, batch = charged(learn=True, heads=("first", "second")), batch_of(salt(), molecule("H2O"))
    torch.save(model, tmp_path / "far.model")
    loaded, fresh = (
        torch.load(tmp_path / "far.model", weights_only=False),
        charged(learn=True, heads=("first", "second")),
    )
    with torch.no_grad():
        fresh.long_range.weights.zero_()
    fresh.load_state_dict(model.state_dict())
    wanted = model(batch.to_dict(), compute_long_range_energy=True)
    for other in (copy.deepcopy(model), loaded, fresh):
        assert torch.equal(other(batch.to_dict())["energy"], wanted["energy"])
    single = select_head(model, "second")
    found = single(batch.to_dict())["energy"]
    assert error(found, model(batch.to_dict() | {"head": torch.ones(2, dtype=torch.int64)})["energy"]) < 1e-10
    few = copy_long_range(charged(learn=True), make_mace(numbers=[1, 8]))
    assert few.long_range.names == ("H", "O")
    data = batch_of(molecule("H2O"), numbers=[1, 8])
    found = few(data.to_dict(), compute_long_range_energy=True)["long_range_energy"]
    assert error(found, wanted["long_range_energy"][1:]) > 0  # other features
    assert error(few.long_range.offsets, model.long_range.offsets[[0, 2]]) < 1e-12
    kept = copy.deepcopy(make_mace().state_dict())
    lacking, unexpected = charged().load_state_dict(kept, strict=False)
    assert not unexpected
    assert all(name.startswith("readouts.1.long_range.") for name in lacking)


def test_what_is_missing_is_named(charged):
    with pytest.raises(ValueError, match="names of elements of the model, 'H', 'C', 'O', 'Na', 'Cl', got 'K'"):
        charged(charges={"K": 1})
    with pytest.raises(ValueError, match="names of elements of the model, 'H', 'C', 'O', 'Na', 'Cl', got 11, 17"):
        charged(charges={11: 1, 17: -1})
    with pytest.raises(ValueError, match=r"charges must be None, a dictionary of finite numbers or .* got \[1, -1\]"):
        charged(charges=[1, -1])
    with pytest.raises(ValueError, match='batches must have forces of the data with learn="scale", got none, or zeros'):
        charged(learn="scale")
    with pytest.raises(ValueError, match="charge for the element of every atom, got none for H, O"):
        charged(charges={"Na": 1, "Cl": -1})
    with pytest.raises(ValueError, match=r"graph 0 they sum to 4, and total_charge is 0; give the total charge"):
        charged(charges=CHARGES | {"Na": 1.7})
    with pytest.raises(ValueError, match="learn must be True or False or 'scale', got 'factor'"):
        charged(learn="factor")
    for more in ({"after": (0,)}, {"gain": 1.0}, {"num_coulomb": 2}):
        with pytest.raises(ValueError, match="after, gain and settings of attention must be left out with charges"):
            add_long_range(make_mace(), charges=CHARGES, batch=batch_of(salt()), **more)
    model, ion = charged(), batch_of(Atoms("Na")).to_dict()
    with pytest.raises(ValueError, match=r"graph 0 they sum to 0\.7, and total_charge is 0"):
        model(ion)
    assert model(ion | {"total_charge": torch.tensor([0.7])})["energy"].isfinite().all()
    screened = charged(dielectric=4.0)
    with pytest.raises(ValueError, match=r"sum to 1\.4 times the root of dielectric=4, and total_charge is 0\.7"):
        screened(ion | {"total_charge": torch.tensor([0.7])})


def test_calculator_with_predicted_charges(charged):
    """It reads total charges. Neutral systems have a dipole, and those that do not repeat have Born charges."""
    model, systems = charged(charges="predicted"), [molecule("H2O"), molecule("CH3OH"), salt()]
    for atoms, charge in zip(systems, (-1.0, 0.0, 2.0), strict=True):
        atoms.info["charge"] = charge
    calculator = LongRangeCalculator(models=[model], default_dtype="float64")
    for atoms in systems:
        atoms.calc = calculator
        assert abs(atoms.get_potential_energy() - energy(model, atoms)) < 1e-8
    assert np.isfinite(systems[1].get_dipole_moment()).all()
    with pytest.raises(PropertyNotImplementedError):
        systems[0].get_dipole_moment()  # charged
    born = calculator.get_property("born_charges", systems[1])
    assert np.abs(born.sum(0)).max() < 1e-10
    with pytest.raises(ValueError, match="born_charges must be asked of open graphs where charges are predicted"):
        calculator.get_property("born_charges", systems[2])


def test_predicted_charges_start_from_total_charges(charged):
    """And are copied, saved and refused as others are; the loss of the total charge is that of what is shared."""
    ions = [Atoms("Na", info={"charge": 1.0}), Atoms("Cl", info={"charge": -1.0}), molecule("H2O")]
    torch.manual_seed(3)
    model = add_long_range(make_mace(), charges="predicted", batch=data_of(*ions))
    assert "shared_charge" not in model(data_of(*ions))  # programs stop at it
    out = model(data_of(*ions), training=True)
    torch.testing.assert_close(model(data_of(*ions), compute_shared_charge=True)["shared_charge"], out["shared_charge"])
    assert out["shared_charge"].abs().max() < 0.2  # of charges of 1 and -1
    assert model.long_range.offsets.isfinite().all()
    base, batch = modules.WeightedEnergyForcesLoss(0.0, 0.0), batch_of(*ions)
    found = ChargeLoss(base, total_charge=5.0)(ref=batch, pred=out)
    torch.testing.assert_close(found, 5 * out["shared_charge"].square().mean())
    few = copy_long_range(model, make_mace(numbers=[1, 8]))
    data = batch_of(molecule("H2O"), numbers=[1, 8]).to_dict()
    assert few.long_range.names == ("H", "O")
    assert few(data)["charges"].sum().abs() < 1e-12
    for wrong in ({"charges": "learned"}, {"charges": "predicted", "learn": True}):
        with pytest.raises(ValueError, match=r"charges must be .*predicted"):
            add_long_range(make_mace(), batch=batch_of(*ions), **wrong)


def test_data_that_do_not_say_what_charges_are_are_refused():
    """Neutral graphs of one fragment, crystals, and pairs without forces; labels of charge say it, too."""
    waters = [molecule("H2O"), molecule("H2O")]
    waters[1].positions += [0, 0, 7]
    pair, crystal = waters[0] + waters[1], salt()
    for atoms in (*waters, crystal):
        atoms.arrays["forces"] = np.ones((len(atoms), 3))
    silent = [*waters, pair, crystal]
    assert not can_predict_charges(loader(silent, 1))
    with pytest.raises(ValueError, match=r'say what charges are for charges="predicted", got no graph .* leave out'):
        add_long_range(make_mace(), charges="predicted", batch=loader(silent, 1))
    pushed, ion, labelled = pair.copy(), Atoms("Na", info={"charge": 1.0}), data_of(*waters)
    pushed.arrays["forces"] = np.ones((6, 3))
    labelled["dipole"] = torch.ones(2, 3)
    assert can_predict_charges([*graphs(silent), batch_of(pushed)])
    assert can_predict_charges(data_of(*waters, ion))
    assert not can_predict_charges(labelled)  # the energy does not say it
    for batch in (graphs([*silent, pushed]), data_of(*waters, ion), labelled):
        model = add_long_range(make_mace(), charges="predicted", batch=batch)
        assert model(data_of(*waters))["charges"].shape == (6,)
