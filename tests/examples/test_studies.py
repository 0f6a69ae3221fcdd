"""What every study has in common: presets, models of one size, rows, tables and figures."""

import math
import re
from importlib import import_module

import pytest
from devices import DEVICES
from harness.settings import parse
from harness.training import parameters
from report import STUDIES, kind_of
from running import rows_of, run, run_here

SIZES = {  # the largest model's parameters over the smallest's, which in depots is ours by random features
    "far_digits": 1.1, "matching": 1.15, "depots": 1.3, "molecules": 1.2, "micrographs": 1.45,
    "proteins": 1.1, "surfaces": 1.05,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_models_are_of_one_size(name):
    module = import_module(name)
    for task in ("displacement", "distance", "nearest") if name == "depots" else (None,):
        runs = kind_of(module)(**({"tasks": (task,)} if task else {})).runs()
        sizes = [parameters(module.build(run)) for run in runs]
        assert max(sizes) < SIZES[name] * min(sizes)


# What each of them shows, from its rows, of a run with --quick and these flags


def check_rotated_digits(rows, module, folder):
    pairs = [(row.setting("models"), row.setting("relation")) for row in rows]
    errors = {pair: row.more["max error"] for pair, row in zip(pairs, rows, strict=True) if "max error" in row.more}
    assert set(errors) == set(pairs) - {("Z2_SA", "ge_vit")}
    assert all(error < 5e-6 for (_, relation), error in errors.items() if relation == "ge_vit")
    # after four steps of training the broken relation shows little, and yet
    assert all(error > 5 * errors[name, "ge_vit"] for (name, relation), error in errors.items() if relation == "gsa")


def check_pixel_graphs(rows, module, folder):
    for row in rows:
        assert list(row.more["shifts"]) == ["-1", "0", "1"]
        assert row.more["shiftable"] == 40
        assert row.more["shifts"]["0"] == pytest.approx(row.value)  # all test images can be shifted
        if row.setting("positions") == "none":  # no positions, no borders: shifts change nothing
            assert len(set(row.more["shifts"].values())) == 1
    line = (folder / "accuracy.md").read_text().splitlines()[3].split(" | ")
    assert "±" in line[1]
    assert line[3] == "98.8"


def check_pyg_mixed_model(rows, module, folder):
    by_name = {row.setting("models"): row for row in rows}
    for name, row in by_name.items():
        assert row.more["change"] > 1e-2 if name == "Performer + positions" else row.more["change"] < 1e-4
    assert by_name["local only"].parameters == pytest.approx(by_name["ours"].parameters, rel=0.2)


def check_far_digits(rows, module, folder):
    for row in rows:
        assert row.more["angles"]["0"] == pytest.approx(row.value)
        assert (row.more["change"] > 1e-3) == (row.setting("models") == "global, no rotations")
    assert "best guess from one digit" in (folder / "accuracy.md").read_text()


def check_depots(rows, module, folder):
    for row in rows:
        name = row.setting("models")
        if row.setting("tasks") == "nearest":
            assert row.more["1 times the nodes"] == pytest.approx(row.value)
            continue
        moved, turned = (row.more.get(f"change, {change}", 0.0) for change in ("moved", "turned"))
        assert (moved < 1e-5) == (name not in ("Performer", "Performer, shifts", "dense, shifts")), name
        if row.setting("tasks") == "distance":
            assert (turned < 1e-5) == (name.split(",")[0] not in ("Performer", "dense")), name


def check_molecules(rows, module, folder):
    for row in rows:
        assert row.more["turned"] < 1e-5


def check_vision_transformers(rows, module, folder):
    for row in rows:
        seconds = [s for s, _ in row.more["curve"]]
        assert seconds == sorted(seconds)
        assert max(v for _, v in row.more["curve"]) == pytest.approx(row.more["validation"], abs=0.01)
        assert ("larger" in row.more) == row.setting("models").startswith("frames")


FLAGS = {
    "pixel_graphs": ["--seeds", 0, 1],
    "nbody": ["--augment"],
    "long_range": ["--operators", "none", "EwaldAttention", "--task", "fields", "forces"],
    "molecules": ["--messages", "bonds", "pairs"],
    "depots": ["--tasks", "displacement", "distance", "nearest"],
    "proteins": ["--tasks", "response", "drag", "--models", "Ewald", "Hyena, implicit"],
    "surfaces": ["--models", "messages, potentials", "GPS, multihead", "Ewald (e3nn)", "Ewald (PyG), no messages"],
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ("polar_crystals", "ion_pairs")])  # for MACE
def test_a_quick_run(tmp_path, name, device):
    """A row for every run, and tables that hold them."""
    module, folder = import_module(name), tmp_path / name
    flags = ["--quick", *map(str, FLAGS.get(name, [])), "--output", str(tmp_path), "--device", device]
    if name == "nbody":
        flags += ["--cache", str(tmp_path)]
    result = run_here(f"studies/{name}.py", *flags)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path, name)
    assert [row.settings for row in rows] == [
        one.identity() for one in parse(kind_of(module)(), module.PRESETS, "", flags).runs()
    ]
    for row in rows:
        assert math.isfinite(row.value)
        assert row.parameters > 0 or row.seconds == 0  # a reference has none
        assert row.machine
    for title, table in module.report(rows).items():
        written = (folder / f"{title}.md").read_text()
        # but for seconds, which rows round
        assert re.sub(r" \d+ \|", "", written) == re.sub(r" \d+ \|", "", table + "\n")
        assert f"\n{title}:\n" in result.stdout
    globals().get(f"check_{name}", lambda *_: None)(rows, module, folder)


def test_it_starts_in_a_process_of_its_own():
    result = run("studies/nbody.py", "--help")
    assert result.returncode == 0, result.stderr
    assert "usage: nbody.py" in result.stdout
