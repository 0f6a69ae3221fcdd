"""Scripts of a user of MACE, NequIP and ASE, where these are installed: trained, saved, loaded, run."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hosts import missing
from running import EXAMPLES

LABELS = """
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.io import write

systems = [molecule(("H2O", "CH3OH", "CH4")[n % 3]) for n in range(12)]
for n, atoms in enumerate(systems):
    atoms.rattle(0.05, seed=n)
    atoms.calc = EMT()
    atoms.info["REF_energy"], atoms.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = None
write("train.xyz", systems)
for n, atoms in enumerate(systems):
    atoms.info["total_charge"] = n % 2
write("ions.xyz", systems)
"""
FLAGS = """--train_file train.xyz --valid_fraction 0.25 --E0s average --model ScaleShiftMACE --r_max 3 --batch_size 3
--lr 0.01 --ema --default_dtype float64 --seed 1"""

TRAIN = "-c", "from tg_equiattn.integrations.mace.train import main; main()"  # the command tg_equiattn_mace_train


def said(host, folder, *command, needs="tblite"):
    """What a script, or a module behind -m, says."""
    if missing(host):
        pytest.skip(f"{host} is not installed")
    pytest.importorskip(needs)
    command = [sys.executable, "-W", "ignore", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("host", ["mace", "nequip"])
def test_quick_starts(host, tmp_path):
    """Charges lower the error of forces, most where a wave is long; in MACE's, a trained potential has its phonons."""
    out = said(host, tmp_path, EXAMPLES / f"quickstart_{host}.py")
    alone, charged = (
        list(map(float, re.findall(r"(\d+) meV", line))) for line in re.findall(r"^.*A in cells.*", out, re.M)
    )
    assert charged[0] < 1.2 * alone[0]
    assert charged[1] < alone[1]
    if host == "mace":
        longitudinal, transverse = map(float, re.search(r"LO (\S+) .*TO (\S+) ", out).groups())
        assert (longitudinal, transverse) == pytest.approx((7.59, 5.07), rel=0.02)
    assert (tmp_path / "out" / f"quickstart_{host}.png").stat().st_size > 5000


def test_ion_pairs(tmp_path):
    """The study of ions and molecules that part: data, training, tables."""
    pytest.importorskip("lightning")
    models = "--models", "MACE", "predicted", "formal"
    out = said("mace", tmp_path, EXAMPLES / "studies" / "ion_pairs.py", "--quick", "--output", "out", *models)
    assert "| predicted | 1 | 0.02 |" in out
    assert "| formal | 1 | 0.02 |" in out


def test_pet(tmp_path):
    """The study of ions and molecules that part trains PET by metatrain and reads forces from what it saves."""
    for package in ("ase", "lightning", "metatrain", "torchpme"):
        pytest.importorskip(package)
    import ase.io

    folder, random, names = tmp_path / "out" / "ion_pairs" / "lithium", np.random.default_rng(0), ("PET", "PET+long")
    folder.mkdir(parents=True)
    for part in "train", "validation", "test":
        frames = [ase.Atoms("Li2", [[0, 0, 0], [0, 0, 2 + n]]) for n in range(12)]
        for n, atoms in enumerate(frames):
            atoms.info = {"REF_energy": 1 / (2 + n), "first": 1, "pair": "Li-Li", "distance": 2.0 + n, "line": 0}
            atoms.arrays["REF_forces"] = random.normal(size=(2, 3))
        ase.io.write(folder / f"{part}.xyz", frames)
    command = sys.executable, "-W", "ignore", EXAMPLES / "studies" / "ion_pairs.py", "--quick", "--output", "out"
    words = [*map(str, command), "--sets", "lithium", "--models", *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(f"| {name} | 1 | 0.02 |" in done.stdout for name in names)


def test_pet_without_its_packages_says_what_to_install(monkeypatch, tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("ase")
    from baselines.pet import PET
    from harness.settings import SettingsError
    from ion_pairs import IonPairsStudy

    monkeypatch.setitem(sys.modules, "metatrain.cli.train", None)
    monkeypatch.setitem(sys.modules, "metatomic_ase", None)
    with pytest.raises(SettingsError, match="pip install metatrain torch-pme"):
        PET(IonPairsStudy(models=("PET",), output=tmp_path), [], []).fit()


def test_formal_charges():
    """Coulomb's law between two fragments: a bare ion has its charge itself, others spread it. Forces are slopes."""
    ase = pytest.importorskip("ase")
    from ion_pairs import COULOMB_CONSTANT, coulomb

    positions = np.random.default_rng(0).normal(size=(8, 3)) + [[0, 0, 9 * (n > 3)] for n in range(8)]
    atoms = ase.Atoms("NaOH2HCO2", positions, info={"first": 4, "pair": "Na-HCOO"})
    energy, forces = coulomb(atoms)
    assert energy == pytest.approx(sum(-COULOMB_CONSTANT / 4 / math.dist(positions[0], far) for far in positions[4:]))
    for place in (0, 0), (2, 1), (5, 2):
        there = []
        for step in (1e-4, -1e-4):
            moved = atoms.copy()
            moved.positions[place] += step
            there.append(coulomb(moved)[0])
        assert forces[place] == pytest.approx((there[1] - there[0]) / 2e-4, abs=1e-9)
    alone = ase.Atoms("Na", info={"first": 1, "pair": "Na"})
    assert coulomb(alone)[0] == 0


def test_crystal(tmp_path):
    out = said("mace", tmp_path, EXAMPLES / "ase_crystal.py")
    numbers = {name: float(x) for name, x in re.findall(r"(stress against differences|supercell): (\S+) relative", out)}
    assert numbers["stress against differences"] < 1e-6
    assert abs(numbers["supercell"]) < 1e-6
    assert abs(float(re.search(r"drift (\S+) meV", out)[1])) < 0.5
    assert "relaxation: done" in out


def test_the_training_command(tmp_path):
    """From flags, a checkpoint, a foundation model. What it saves runs without it."""

    def run(*command):
        return said("mace", tmp_path, *command, needs="ase")

    def train(name, epochs, *more, line=""):
        names = "--name", name, "--max_num_epochs", epochs
        out = run(*TRAIN, *names, *FLAGS.split(), *more)
        assert (f"long range: {line}" in out) if line else ("long range" not in out)
        return [float(loss) for loss in re.findall(r"loss=\s*([\d.]+)", out)]

    run("-c", LABELS)
    shape, attention, line = ("--hidden_irreps", "8x0e + 8x1o"), ("--after", "0"), "attention after blocks 0 "
    first = train("far", 2, *shape, *attention, line=line)
    assert first[-1] < 0.8 * first[0]
    again = train("far", 3, *shape, *attention, "--restart_latest", line=line)
    assert again[0] == first[-1]
    assert again[-1] < again[0]
    run("-m", "mace.cli.eval_configs", "--configs", "train.xyz", "--model", "far.model", "--output", "out.xyz")
    assert "MACE_energy" in (tmp_path / "out.xyz").read_text()
    assert "products.0.long_range.gain" in torch.load(tmp_path / "far.model", weights_only=False).state_dict()
    plain, tune = train("plain", 2, *shape), ("--multiheads_finetuning", "False")
    assert not any("long_range" in key for key in torch.load(tmp_path / "plain.model", weights_only=False).state_dict())
    charges = *shape, "--charges", "predicted"
    ions = "--train_file", "ions.xyz"
    train("predicted", 1, *charges, *ions, line="predicted charges (from 9 frames), width 1.8 A")
    # data that do not say what charges are: MACE alone, to the bit
    assert train("neutral", 2, *charges, line="none, as no frame of the training set has a total charge") == plain
    same = [torch.load(tmp_path / f"{name}.model", weights_only=False).state_dict() for name in ("plain", "neutral")]
    torch.testing.assert_close(*same, rtol=0, atol=0)
    tuned = train("tuned", 1, "--foundation_model", "plain.model", *tune, *attention, line=line)
    assert tuned[0] < 0.8 * plain[0]
    tuned = train("farther", 1, "--foundation_model", "far.model", *tune, line=line)
    assert tuned[0] < 0.8 * first[0]
    models = [torch.load(tmp_path / f"{name}.model", weights_only=False) for name in ("far", "farther")]
    kept = "products.0.long_range.scale_out"
    assert torch.equal(*(model.state_dict()[kept] for model in models))
    with pytest.raises(AssertionError, match="long range does not go with --lora"):
        train("no", 1, *shape, *attention, "--lora", "True")


@pytest.mark.slow
def test_the_training_command_fine_tunes_what_it_saves(tmp_path):
    """One head of two, whose files the flag --heads names; and the model of stage two, which MACE may save frozen."""
    pytest.importorskip("ase")

    def run(name, *more):
        flags = FLAGS.replace("--train_file train.xyz", "").replace("--lr 0.01", "")
        words = "--name", name, "--max_num_epochs", 2, *flags.split(), *more
        return said("mace", tmp_path, *TRAIN, *words, needs="ase")

    def losses(out, head):
        return [float(loss) for loss in re.findall(rf"head: {head}, loss=\s*([\d.]+)", out)]

    def parameters(name):
        return dict(torch.load(tmp_path / f"{name}.model", weights_only=False).named_parameters())

    said("mace", tmp_path, "-c", LABELS, needs="ase")
    data, tune = ("--train_file", "train.xyz"), ("--multiheads_finetuning", "False", "--E0s", "foundation")
    heads = {name: {"train_file": "train.xyz", "E0s": "average"} for name in ("first", "second")}
    shape = ("--hidden_irreps", "8x0e + 8x1o")
    shape = (*shape, "--after", "0")
    two = losses(run("two", *shape, "--heads", str(heads)), "second")
    model = ("--foundation_model", "two.model", "--foundation_head", "second")
    assert losses(run("tuned", *data, *tune, *model, "--lr", "0"), "Default") == pytest.approx([two[-1]] * 3)
    with pytest.raises(AssertionError, match=r"two\.model has long range, which is kept: leave out after"):
        run("no", *data, *tune, *model, "--after", "0")
    run("stages", *data, *shape, "--swa", "--start_swa", "1")
    run("again", *data, *tune, "--foundation_model", "stages_stagetwo.model")
    before, after = parameters("stages_stagetwo"), parameters("again")
    assert all(x.requires_grad for x in after.values())
    same = [name for name, x in after.items() if "long_range" in name and torch.equal(x, before[name])]
    assert set(same) <= {"products.0.long_range.attention.neutral.charges"}  # all frames are neutral
