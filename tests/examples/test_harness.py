"""The examples' harness: settings and commands, rows, checkpoints, batches; killed, resumed and shared trainings."""

import dataclasses
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch
import toy_study as toy
from devices import DEVICES
from harness import results
from harness.loading import tensor_batches
from harness.settings import command, parse
from harness.tables import at_best_rates
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


def test_a_command_gives_its_settings():
    changed = toy.Toy(seeds=(3, 5), widths=(4, 9), epochs=7, validate=False, precision="bf16-mixed")
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
        (["--seeds", "1", "1"], "--seeds must be one or more different values, got [1, 1]"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--seeds", "-1"], "--seeds must not be negative, got (-1,)"),
        (["--precision", "16-mixed"], "--precision 16-mixed needs --device cuda"),
        (["--clip", "-2"], "--clip must not be negative, got -2"),
        (["--quick", "--full"], "--quick and --full exclude each other"),
    ],
)
def test_settings_that_cannot_be(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(toy.Toy(), toy.PRESETS | {"full": toy.Toy()}, "", flags)


@pytest.fixture
def row():
    return results.Row("error", 0.125, 41, 2.5, "one, CPU", "v1", 'python "x", y', {"seeds": [0]}, {"validation": 2.0})


def test_rows_come_back_and_are_found_by_their_settings(tmp_path, row):
    """Files hold what differs from the defaults; of runs that were repeated the last row counts."""
    path, settings = tmp_path / "deep" / "results.csv", toy.Toy()
    assert results.read(path, toy.Toy) == []
    for value, run in ((1.0, settings), (0.5, toy.Toy(seeds=(1,))), (2.0, settings)):
        results.append(path, dataclasses.replace(row, value=value, settings=run.identity()), toy.Toy)
    rows = results.read(path, toy.Toy)
    assert [r.value for r in rows] == [2.0, 0.5]
    assert results.find(rows, settings) == dataclasses.replace(row, value=2.0, settings=settings.identity())
    assert rows[1].setting("seeds") == 1
    assert results.find(rows, toy.Toy(dropout=0.5)) is None
    assert '"epochs"' not in path.read_text()
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="must begin with the line metric,value"):
        results.read(path, toy.Toy)


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


def add_noise(batch, generator):
    return [batch[0] + torch.randint(100, batch[0].shape, generator=generator)]


@pytest.mark.parametrize("augment", [None, add_noise], ids=["plain", "augmented"])
def test_batches_follow_from_the_seed_and_the_epoch(augment):
    def drawn(batches):
        return [batch[0].tolist() for batch in batches]

    batches = tensor_batches([torch.arange(29)], 6, seed=3, augment=augment)
    first = drawn(batches)
    assert len(first) == len(batches) == 4
    batches.epoch = 1
    assert drawn(batches) != first
    batches.epoch = 0
    assert drawn(batches) == first
    assert drawn(tensor_batches([torch.arange(29)], 6, seed=4, augment=augment)) != first
    assert [n for part in drawn(tensor_batches([torch.arange(29)], 6)) for n in part] == list(range(29))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        start_here(patch, "--output", folder)
    return folder


def test_what_a_run_leaves(uninterrupted):
    (row,) = toy_rows(uninterrupted)
    assert row.metric == "error"
    assert 0 < row.value < 2
    assert row.parameters == 8 * 4 + 9
    assert row.command == "python examples/studies/toy_study.py"
    assert row.more["validation"] > 0
    assert (uninterrupted / "toy_study" / "errors.md").read_text().startswith("| widths | error |")


@SLOW
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_run_resumes_to_the_same_result(tmp_path, uninterrupted, device):
    killed = start("--device", device, "--output", tmp_path, KILL_IN_EPOCH=2)
    assert killed.returncode == -9
    assert not toy_rows(tmp_path)
    resumed = start("--device", device, "--output", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (ours,), (theirs,) = toy_rows(tmp_path), toy_rows(uninterrupted)
    if device == "cpu":
        assert (ours.value, ours.more, ours.command) == (theirs.value, theirs.more, theirs.command)
    logs = sorted(run_folder(tmp_path).glob("csv/version_*/metrics.csv"))
    assert len(logs) == 2  # and it did not begin anew
    assert "\n0," not in logs[1].read_text()


def test_rows_are_not_made_twice(tmp_path, monkeypatch, capsys, uninterrupted):
    file = uninterrupted / "toy_study" / "results.csv"
    start_here(monkeypatch, "--output", tmp_path, "--results", file)
    assert "[1/1]" not in capsys.readouterr().out
    assert not (tmp_path / "toy_study" / "runs").exists()
    assert len(toy_rows(uninterrupted)) == 1


@pytest.mark.parametrize(("asked", "status"), [("--help", 0), ("--quick", 1)])
def test_a_study_without_its_packages_says_what_to_install(asked, status, monkeypatch, capsys):
    study = types.ModuleType("__main__", "What it does.")
    study.__file__ = str(EXAMPLES / "studies" / "ion_pairs.py")
    monkeypatch.setitem(sys.modules, "__main__", study)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", [study.__file__, asked])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "studies" / "harness" / "__init__.py"))
    assert ended.value.code == status
    assert re.search(r"What it does.*pip install '\.\[mace,xtb,examples\]'", capsys.readouterr().out, re.DOTALL)
