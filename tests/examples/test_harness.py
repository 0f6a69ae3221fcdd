"""The examples' harness: settings and commands, rows, checkpoints, batches; killed, resumed and shared trainings."""

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import lightning
import pytest
import torch
import toy_study as toy
from devices import DEVICES
from harness import loading, results
from harness.loading import tensor_batches
from harness.settings import command, parse
from harness.tables import at_best_rates
from harness.training import CheckpointError, load, logged
from report import STUDIES, kind_of
from running import EXAMPLES, rows_of

SLOW = pytest.mark.slow
TOY = Path(__file__).parents[1] / "helpers/toy_study.py"


def start(*arguments, launcher=(), **environment):
    command = [sys.executable, "-W", "ignore", *launcher, str(TOY), *map(str, arguments)]
    environment = {name: str(value) for name, value in environment.items()}
    always = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES / "studies")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | always | environment)


def start_here(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(TOY), *map(str, arguments)])
    toy.study.main(toy.Toy(), toy.PRESETS, toy.__doc__, toy.train, toy.report)


def toy_rows(folder):
    return rows_of(folder, "toy_study")


def run_folder(folder):
    (one,) = (folder / "toy_study" / "runs").iterdir()
    return one


def losses(folder, **changes):
    return logged(toy.Toy(output=folder, **changes), "loss")


def test_a_command_gives_its_settings():
    changed = toy.Toy(seeds=(3, 5), widths=(4, 9), epochs=7, validate=False, patience=2, precision="bf16-mixed")
    words = command(changed).split()
    assert words[:2] == ["python", "examples/studies/toy_study.py"]
    assert parse(toy.Toy(), toy.PRESETS, "", words[2:]) == changed
    assert command(toy.Toy(device="cpu", output=Path("elsewhere"), again=True)).split() == words[:2]
    assert parse(toy.Toy(), toy.PRESETS, "", ["--quick", "--batch", "4"]) == toy.Toy(epochs=1, batch=4)


def test_every_preset_of_every_example_has_a_command():
    for name in STUDIES:
        module = import_module(name)
        for preset in module.PRESETS.values():
            again = parse(kind_of(module)(), module.PRESETS, "", shlex.split(command(preset))[2:])
            assert again.identity() == preset.identity()
            runs = list(preset.runs())
            assert len({run.folder for run in runs}) == len(runs) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--learning-rate", "nan"], "--learning-rate must be positive, got nan"),
        (["--patience", "-2"], "--patience must not be negative, got -2"),
        (["--seeds", "1", "1"], "--seeds must be one or more different values, got [1, 1]"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--seeds", "-1"], "--seeds must not be negative, got (-1,)"),
        (["--precision", "16-mixed"], "--precision 16-mixed needs --device cuda"),
        (["--batch", "9", "--devices", "2"], "--batch must divide among --devices 2, got 9"),
        (["--quick", "--full"], "--quick and --full exclude each other"),
    ],
)
def test_settings_that_cannot_be(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(toy.Toy(), toy.PRESETS | {"full": toy.Toy()}, "", flags)


def test_help_and_refusals_for_a_newcomer(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        start_here(monkeypatch, "--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    for words in ("A study of seconds", "--quick", "seconds: does it run?", "--learning-rate FLOAT", "of Adam, at the"):
        assert words in said
    with pytest.raises(SystemExit) as end:
        start_here(monkeypatch, "--epochs", 0)
    assert end.value.code == "toy_study.py: --epochs must be positive, got 0"  # which python prints, and returns 1


@pytest.fixture
def row():
    return results.Row(
        "toy_study", "error", 0.125, 41, 2.5, "one, CPU", "v1", 'python "x", y', {"seeds": [0]}, {"validation": 2.0}
    )


def test_rows_come_back_and_one_cut_short_is_overwritten(tmp_path, row, capsys):
    path = tmp_path / "deep" / "results.csv"
    assert results.read(path) == []
    second = dataclasses.replace(row, value=0.5, settings={"seeds": [1]})
    for each in (row, second):
        results.append(path, each)
    assert results.read(path) == [row, second]
    assert second.setting("seeds") == 1
    path.write_bytes(path.read_bytes()[:-20])
    assert results.read(path) == [row]
    assert "cut short" in capsys.readouterr().err
    results.append(path, dataclasses.replace(row, value=3.0))
    assert [r.value for r in results.read(path)] == [0.125, 3.0]


def test_rows_are_found_by_their_settings(row):
    settings = toy.Toy()
    old = {name: value for name, value in settings.identity().items() if name != "dropout"}  # a field came later
    rows = [dataclasses.replace(row, settings=old, value=1.0), dataclasses.replace(row, settings=old, value=2.0)]
    assert results.find(rows, settings).value == 2.0
    assert results.find(rows, toy.Toy(dropout=0.5)) is None
    assert results.find(rows, toy.Toy(epochs=5)) is None
    assert [r.value for r in results.latest(rows, toy.Toy)] == [2.0]
    whole = dataclasses.replace(row, settings=settings.identity(), value=3.0)
    assert [r.value for r in results.latest([*rows, whole], toy.Toy)] == [3.0]


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 0.03), ("error", 0.01)])
def test_validation_data_choose_the_learning_rate(row, metric, best):
    """By the mean over the seeds that all rates have, and never by test data."""

    def measured(rate, seed, value, validation):
        settings = {"models": ["one"], "seeds": [seed], "learning_rate": rate}
        return dataclasses.replace(row, metric=metric, value=value, settings=settings, more={"validation": validation})

    rows = [
        measured(0.03, 0, 50.0, 72.0),
        measured(0.01, 0, 90.0, 73.0),  # the better one of the first seed
        measured(0.01, 1, 99.0, 65.0),
        measured(0.03, 1, 51.0, 70.0),
        measured(0.01, 2, 99.0, 1.0),  # the other rate lacks this seed
    ]
    ((key, chosen),) = at_best_rates(rows, "models").items()
    assert key == ("one",)
    assert {r.setting("learning_rate") for r in chosen} == {best}
    assert [r.setting("seeds") for r in chosen] == ([0, 1] if best == 0.03 else [0, 1, 2])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_damaged_checkpoints_are_named(tmp_path, damage):
    path = tmp_path / "a.ckpt"
    torch.save({"x": torch.arange(1000.0)}, path)
    whole = bytearray(path.read_bytes())
    if damage == "flipped":
        whole[whole.find(torch.arange(3.0, 6.0).numpy().tobytes())] ^= 1  # one bit of one number
    path.write_bytes({"cut": whole[:-300], "flipped": whole, "empty": b"", "text": b"weights"}[damage])
    with pytest.raises(CheckpointError, match=f"{path} is not a whole checkpoint"):
        load(path)


def gathered(batches, monkeypatch, world):
    shares = []
    for rank in range(world):
        monkeypatch.setattr(loading, "rank_and_world", lambda rank=rank: (rank, world))
        shares.append([batch[0].tolist() for batch in batches])
    return shares


def add_noise(batch, generator):
    return [batch[0] + torch.randint(100, batch[0].shape, generator=generator)]


@pytest.mark.parametrize("augment", [None, add_noise], ids=["plain", "augmented"])
def test_processes_share_every_batch(monkeypatch, augment):
    batches = tensor_batches([torch.arange(29)], 6, seed=3, augment=augment)
    (alone,) = gathered(batches, monkeypatch, 1)
    first, second = gathered(batches, monkeypatch, 2)
    assert len(alone) == len(batches) == 4
    for whole, a, b in zip(alone, first, second, strict=True):
        assert [whole[0::2], whole[1::2]] == [a, b]
    batches.set_epoch(1)
    (later,) = gathered(batches, monkeypatch, 1)
    assert later != alone
    batches.set_epoch(0)
    assert gathered(batches, monkeypatch, 1) == [alone]
    assert tensor_batches([torch.arange(29)], 6, seed=4).size == 6
    assert gathered(tensor_batches([torch.arange(29)], 6, seed=4, augment=augment), monkeypatch, 1) != [alone]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        start_here(patch, "--output", folder)
    return folder


def checkpoint(folder, name="last"):
    return load(run_folder(folder) / f"{name}.ckpt")["state_dict"]


def assert_same(folder, other):
    for name in ("last", "best"):
        ours, theirs = checkpoint(folder, name), checkpoint(other, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert losses(folder) == losses(other)
    (ours,), (theirs,) = toy_rows(folder), toy_rows(other)
    assert (ours.value, ours.more, ours.command) == (theirs.value, theirs.more, theirs.command)


def test_what_a_run_leaves(uninterrupted):
    (row,) = toy_rows(uninterrupted)
    assert row.metric == "error"
    assert 0 < row.value < 2
    assert row.parameters == 8 * 4 + 9
    assert row.command == "python examples/studies/toy_study.py"
    assert row.more["validation"] > 0
    assert sorted(losses(uninterrupted)) == [0, 1, 2, 3]
    assert list(run_folder(uninterrupted).glob("tensorboard/*/events*"))
    assert (uninterrupted / "toy_study" / "errors.md").read_text().startswith("| widths | error |")


@SLOW
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_run_resumes_to_the_same_result(tmp_path, uninterrupted, device):
    killed = start("--device", device, "--output", tmp_path, KILL_IN_EPOCH=2)
    assert killed.returncode == -9
    assert not toy_rows(tmp_path)
    resumed = start("--device", device, "--output", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    if device == "cpu":
        assert_same(tmp_path, uninterrupted)
    logs = sorted(run_folder(tmp_path).glob("csv/version_*/metrics.csv"))
    assert len(logs) == 2  # and it did not begin anew
    assert "\n0," not in logs[1].read_text()


def test_rows_are_not_made_twice(tmp_path, monkeypatch, capsys, uninterrupted):
    file = uninterrupted / "toy_study" / "results.csv"
    start_here(monkeypatch, "--output", tmp_path, "--results", file)
    assert "[1/1]" not in capsys.readouterr().out
    assert not (tmp_path / "toy_study" / "runs").exists()
    assert len(toy_rows(uninterrupted)) == 1


def test_a_corrupt_checkpoint_is_refused(tmp_path, monkeypatch, uninterrupted):
    folder = shutil.copytree(uninterrupted, tmp_path / "copy")
    (folder / "toy_study" / "results.csv").unlink()
    last = run_folder(folder) / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(SystemExit) as refused:
        start_here(monkeypatch, "--output", folder)
    assert refused.value.code.startswith(f"toy_study.py: {last} is not a whole checkpoint")
    assert "--again" in refused.value.code
    start_here(monkeypatch, "--output", folder, "--again")
    assert len(toy_rows(folder)) == 1


@pytest.mark.parametrize("device", DEVICES[: 1 + (torch.cuda.device_count() > 1)])
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="--devices 2"),
        pytest.param(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), id="torchrun"),
    ],
)
@SLOW
def test_two_processes_learn_as_one(tmp_path, monkeypatch, launcher, device):
    """On the CPU by gloo, with two GPUs by NCCL."""
    flags = ("--device", device, "--dropout", 0, "--output")  # each process drops on its own
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    slurm = {"SLURM_NTASKS": 1, "SLURM_JOB_NAME": "toy", "SLURM_PROCID": 0, "SLURM_LOCALID": 0}  # as in a batch script
    start_here(monkeypatch, *flags, alone)
    result = start(*flags, shared, *(() if launcher else ("--devices", 2)), launcher=launcher, **slurm)
    assert result.returncode == 0, result.stderr
    one, two = (losses(f, dropout=0.0, devices=n) for n, f in ((1, alone), (2, shared)))
    assert sorted(one) == sorted(two) == [0, 1, 2, 3]
    assert two == pytest.approx(one, rel=1e-5)
    (first,), (second,) = toy_rows(alone), toy_rows(shared)
    assert second.value == pytest.approx(first.value, rel=1e-5)
    assert second.machine.startswith("2 x")
    weights, others = checkpoint(alone), checkpoint(shared)
    for name in weights:
        torch.testing.assert_close(others[name], weights[name], rtol=1e-4, atol=1e-6)


def fitted(**changes):
    settings = toy.Toy(**changes)
    lightning.seed_everything(0, verbose=False)
    with contextlib.redirect_stderr(None):
        return toy.train(settings)


def test_early_stopping(tmp_path):
    stopped = fitted(output=tmp_path, epochs=40, patience=2, learning_rate=0.3)
    assert len(losses(tmp_path, epochs=40, patience=2, learning_rate=0.3)) < 20
    assert stopped.more["validation"] > 0
    with pytest.raises(ValueError, match="--patience needs validation data"):
        fitted(output=tmp_path, patience=2, validate=False)


def test_mixed_precision_stays_close(tmp_path, device):
    halves = ("bf16-mixed", "16-mixed") if device == "cuda" else ("bf16-mixed",)
    full, *others = (fitted(output=tmp_path, device=device, precision=p) for p in ("32-true", *halves))
    for half in others:
        assert half.value != full.value
        assert half.value == pytest.approx(full.value, rel=0.1)
