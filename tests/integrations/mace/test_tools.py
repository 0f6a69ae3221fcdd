"""MACE's own commands and converters on a model with long range, and what takes their place."""

import importlib
import sys

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from atoms import salt
from mace.tools.scripts_utils import extract_model, remove_pt_head
from mace_models import batch_of, data_of, make_mace, mixed
from space import error
from tg_equiattn.integrations.mace import LongRangeCalculator, add_long_range, copy_long_range, select_head
from tg_equiattn.integrations.mace.train import described, long_range_flags

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("double")]


@pytest.fixture
def saved(far, tmp_path):
    """The path of a model of two heads."""
    torch.save(far(heads=("first", "second")), tmp_path / "far.model")
    return tmp_path / "far.model"


@pytest.mark.parametrize(
    ("command", "words", "reason"),
    [
        ("select_head", ("--head_name", "first"), r"To select a head call .*select_head\(model, head\)"),
        ("create_lammps_model", ("--head", "first", "--format=mliap"), "LAMMPS' ML-IAP .* would lose its long range"),
        ("create_lammps_model", ("--head", "first"), "LAMMPS cannot run it: it gives each process a part of the atoms"),
        ("convert_e3nn_cueq", (), "cuequivariance, .* would lose its long range"),
        ("convert_e3nn_oeq", (), "everything else that builds a model .* would lose its long range"),
    ],
)
def test_commands_that_build_a_model_anew_say_why_they_cannot(command, words, reason, saved, monkeypatch):
    """mace_select_head, mace_create_lammps_model and the converters."""
    monkeypatch.setattr(sys, "argv", [command, *words, str(saved)])
    with pytest.raises(NotImplementedError, match=reason):
        importlib.import_module(f"mace.cli.{command}").main()


def test_converters_of_models_say_why_they_cannot(far):
    model = far(heads=("first", "second"))
    for build in (lambda: remove_pt_head(model, "first"), lambda: extract_model(model)):
        with pytest.raises(NotImplementedError, match=r"ML-IAP.*select_head\(model, head\)"):
            build()


def test_selecting_a_head_keeps_long_range(charged):
    model = charged(heads=("first", "second"))
    for n, head in enumerate(("first", "second")):
        single, data = select_head(model, head), batch_of(*mixed()).to_dict()
        assert single.heads == [head]
        wanted = model(data | {"head": torch.full((4,), n)})["energy"]
        assert error(single(data)["energy"], wanted) < 1e-10


def test_fine_tuning_on_fewer_elements_keeps_long_range(charged):
    """Rows of elements follow atomic numbers; elements that the source lacks are refused."""
    source = charged()
    target = make_mace(numbers=[1, 8])
    copy_long_range(source, target)
    ours, theirs = (model.products[0].long_range.attention.neutral for model in (target, source))
    assert torch.equal(ours.embedding, theirs.embedding[[0, 2]])
    assert torch.equal(ours.constants, theirs.constants[[0, 2]])
    data = batch_of(molecule("H2O"), numbers=[1, 8]).to_dict()
    assert (target(dict(data))["energy"] - make_mace(numbers=[1, 8])(data)["energy"]).abs() > 1e-9
    with pytest.raises(ValueError, match=r"target must have elements of source, .*, got \[9\] beside them"):
        copy_long_range(source, make_mace(numbers=[1, 9]))


def test_long_range_of_a_frozen_model_learns_again(charged):
    """mace_run_train freezes a model before it saves that of stage two."""
    target = copy_long_range(charged().requires_grad_(False), make_mace())
    assert all(x.requires_grad for x in target.parameters())


def test_a_calculator_reads_both_names_of_the_total_charge(charged):
    model, atoms = charged(), Atoms("Na2", [[0, 0, 0], [6, 0, 0]])

    def energy(info, **options):
        ions = atoms.copy()
        ions.info, ions.calc = info, LongRangeCalculator(models=[model], default_dtype="float64", **options)
        return ions.get_potential_energy()

    wanted, named = energy({"charge": 2.0}), {"info_keys": {"total_charge": "q"}}
    assert abs(wanted - energy({})) > 1e-6
    assert (
        energy({"total_charge": 2}) == energy({"charge": 2, "total_charge": 2.0}) == energy({"q": 2}, **named) == wanted
    )
    with pytest.raises(ValueError, match=r"one total charge, got \{'charge': 0.0, 'total_charge': 2.0\}: leave out"):
        energy({"charge": 0, "total_charge": 2})
    data = batch_of(atoms).to_dict()
    both = {name: torch.tensor([2.0]) for name in ("charge", "total_charge")}
    assert model(data | both)["energy"].item() == pytest.approx(wanted, abs=1e-10)
    with pytest.raises(ValueError, match=r"must be equal, got \[0.0\] and \[2.0\]: leave out one"):
        model(data | {"total_charge": torch.zeros(1), "charge": both["charge"]})


def test_a_calculator_refuses_crystals_without_a_cell(charged):
    atoms = molecule("H2O")
    atoms.pbc, atoms.calc = True, LongRangeCalculator(models=[charged()], default_dtype="float64")
    with pytest.raises(ValueError, match=r"atoms\.cell must have a lattice vector wherever atoms\.pbc is true"):
        atoms.get_potential_energy()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("", {}),
        ("--charges Na=1 Cl=-1 --learn scale", {"charges": {"Na": 1.0, "Cl": -1.0}, "learn": "scale"}),
        ("--charges predicted --width 2", {"charges": "predicted", "width": 2.0}),
        ("--after 0 1 --gain 0.1", {"after": [0, 1], "gain": 0.1}),
    ],
)
def test_flags_of_the_training_command(words, settings):
    assert long_range_flags([*words.split(), "--name", "far"]) == (settings, ["--name", "far"])


@pytest.mark.parametrize("words", ["--charges predicted Na=1", "--charges Na", "--learn True"])
def test_flags_that_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        long_range_flags(words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_a_line_says_what_long_range_a_model_has():
    """By kind: charges that are given, charges that are predicted, attention."""
    waters, salts = batch_of(molecule("H2O"), molecule("H2O")), batch_of(salt())
    held = add_long_range(make_mace(), charges={"Na": 1, "Cl": -1}, width=2.0, batch=salts)
    held.long_range.scale.fill_(1.038)
    line = "long range: charges Na +1.04, Cl -1.04 (scale 1.038, from 1 frames), width 2 A"
    assert described(held, "from 1 frames") == line
    ions = data_of(Atoms("Na", info={"charge": 1.0}))
    predicted = add_long_range(make_mace(), charges="predicted", batch=ions)
    assert described(predicted, "kept").startswith(
        "long range: predicted charges (kept), width 1.8 A; the loss adds 10"
    )
    attention = add_long_range(make_mace(), (0, 1), batch=waters, num_coulomb=0)
    line = "long range: attention after blocks 0, 1 (4 Gaussian and 0 Coulomb kernels, kept), widths 1.5 to 12 A"
    assert described(attention, "kept") == line


@pytest.mark.parametrize("names", [["Na"], ["Na", "H", "Cl"]])
def test_a_batch_of_single_atoms_is_refused(names):
    """Their attention is rounding noise, from which the scale would be 1e15. In crystals atoms see their images."""
    batch = batch_of(*(Atoms(name) for name in names))
    with pytest.raises(ValueError, match=f"batch must have .* got {len(names)} open graphs of one atom each"):
        add_long_range(make_mace(), batch=batch)
    batch = batch_of(*(Atoms(name) for name in names), Atoms("Na", cell=[4, 4, 4], pbc=True))
    scale = add_long_range(make_mace(), batch=batch).products[0].long_range.scale_out
    assert float(scale.max()) < 1e6
