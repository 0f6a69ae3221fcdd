"""The escnn examples run end to end, and what their tables say is what their rows hold."""

import dataclasses

import pytest
import torch
from image_writers import AMAT, write_rotmnist
from running import rows_of, run_here

TINY = {"channels": 4, "heads": 1, "head_channels": 2, "blocks": 1, "size": 8}
ATTENTION = ["Z2_SA", "R4_SA", "R8_SA", "R12_SA", "R4M_SA"]


@pytest.fixture(scope="module")
def digits():
    import rotated_digits

    return rotated_digits


@pytest.fixture(scope="module")
def mixed():
    import escnn_mixed_model

    return escnn_mixed_model


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def row(digits, value=50.0, more=None, **swept):
    """A result row made up for a single run."""
    from harness.study import row_of
    from harness.training import Outcome

    settings = digits.RotatedDigits(**{"relation": ("ge_vit",), **{name: (x,) for name, x in swept.items()}})
    return row_of(settings, Outcome("accuracy", value, 1234, 5.0, more or {}))


def test_published_files_choose_the_epoch(tmp_path):
    write_rotmnist(tmp_path, train=24, test=5)
    flags = [x for name, value in TINY.items() for x in (f"--{name.replace('_', '-')}", value)]
    result = run_here("studies/rotated_digits.py", *flags, "--data", tmp_path, "--models", "R4_SA", "C4 G-CNN",
                      "--relation", "relative", "--epochs", 2, "--no-progress", "--output", tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path, "rotated_digits")
    assert [row.setting("models") for row in rows] == ["R4_SA", "C4 G-CNN"]
    for one in rows:
        assert [epoch for epoch, _ in one.more["curve"]] == [1, 2]
        assert one.more["max error"] < 1e-5
    assert (tmp_path / "rotated_digits" / "errors.png").stat().st_size > 5000
    (tmp_path / AMAT["test"]).unlink()
    again = run_here("studies/rotated_digits.py", "--data", tmp_path, "--output", tmp_path)
    assert again.returncode != 0
    assert str(tmp_path / AMAT["test"]) in again.stderr.strip().splitlines()[-1]
    assert "Traceback" not in again.stderr


def test_runs_leave_out_what_is_the_same_model(digits):
    settings = digits.RotatedDigits(
        models=("Z2_SA", "R4_SA", "C4 G-CNN"), relation=("gsa", "lifted"), kernel_size=(5, 0), seeds=(7,)
    )
    runs = [(run.models[0], run.relation[0], run.kernel_size[0]) for run in settings.runs()]
    assert runs == [
        ("Z2_SA", "ge_vit", 5), ("Z2_SA", "ge_vit", 0), ("R4_SA", "gsa", 5), ("R4_SA", "gsa", 0),
        ("R4_SA", "lifted", 5), ("R4_SA", "lifted", 0), ("C4 G-CNN", "ge_vit", 3),
    ]  # fmt: skip


def test_the_two_commands_of_the_study(digits):
    study = digits.PRESETS["study"]
    assert len(list(study.runs())) == 5 * (1 + 3 * 3 + 3)
    long = {"epochs": 24, "seeds": (0, 1, 2)}
    windows = dataclasses.replace(
        study, models=("R4_SA", "C4 G-CNN"), relation=("relative",), kernel_size=(3, 5, 7, 0), **long
    )
    windows.check()
    assert len(list(windows.runs())) == 3 * (4 + 1)
    assert len(list(digits.PRESETS["ablations"].runs())) == 3 * 5


def test_a_quarter_turn_of_the_data_is_exact():
    from data.rotated_digits import rotate

    images = torch.rand(2, 1, 7, 7)
    turned = rotate(images, torch.tensor([torch.pi / 2, 0.0]), 7, 1.0)
    torch.testing.assert_close(turned, torch.stack([images[0].rot90(1, (-2, -1)), images[1]]), rtol=0, atol=1e-5)


def test_the_convolutional_network(digits):
    """As many parameters as the attention network, equivariant, and its checkpoints load in either mode."""
    settings = digits.RotatedDigits(models=("C8 G-CNN",), relation=("ge_vit",), channels=12)
    model = digits.build(settings)
    wanted = sum(p.numel() for p in digits.build(dataclasses.replace(settings, models=("R8_SA",))).parameters())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(wanted, rel=0.2)
    images = torch.rand(3, 1, 16, 16)
    model.train()(images)
    model.eval()
    errors = digits.equivariance(model, images)
    assert errors["max error"] < 1e-5
    assert 0 < errors["mean error"] < errors["max error"]
    other = digits.build(settings).eval()
    assert not torch.allclose(other(images), model(images))
    state = model.state_dict()
    assert not any(name.endswith(".filter") for name in state)
    other.load_state_dict(state)
    torch.testing.assert_close(other.eval()(images), model(images))
    digits.build(settings).train().load_state_dict(state)


def test_the_broken_relation_shows(digits):
    errors = {}
    for relation in ("ge_vit", "gsa"):
        model = digits.build(digits.RotatedDigits(models=("R4_SA",), relation=(relation,))).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.7)
        errors[relation] = digits.equivariance(model, torch.rand(2, 1, 16, 16))["max error"]
    assert errors["ge_vit"] < 1e-5
    assert errors["gsa"] > 1e-3


def test_tables_from_rows(digits, tmp_path):
    gsa = {"models": "R4_SA", "relation": "gsa", "locality": None}
    broken = {"mean error": 0.1, "max error": 0.5}
    rows = [
        row(digits, 60.0, {"mean error": 1e-7, "max error": 2e-6}, models="R4_SA", relation="ge_vit", seeds=0),
        row(digits, 64.0, {"mean error": 3e-7, "max error": 1e-6}, models="R4_SA", relation="ge_vit", seeds=1),
        row(digits, 55.0, models="R4_SA", relation="ge_vit", locality=None),
        row(digits, 50.0, broken, **gsa),
        row(digits, 70.0, broken, **gsa, kernel_size=0),
        row(digits, 55.0, broken, **gsa, kernel_size=5),
        row(digits, 40.0, models="Z2_SA"),
        row(digits, 80.0, {"mean error": 1e-8, "max error": 1e-7}, models="C4 G-CNN", locality=None),
        row(digits, 85.0, models="C4 G-CNN", locality=None, learning_rate=0.04),
        row(digits, 30.0, models="R4_SA", relation="relative", learning_rate=0.04),
        row(digits, 66.0, models="R4_SA", relation="relative"),
        row(digits, 65.0, models="R4_SA", relation="relative", locality=1.0),
        row(digits, 45.0, models="R4_SA", relation="relative", without="places"),
    ]
    tables = digits.report(rows, tmp_path)
    assert list(tables) == ["accuracy", "windows", "ablations", "equivariance"]
    assert cells(tables["accuracy"]) == [
        ["Z2_SA", "-", "40.00", "-", "-", "-", "1,234", "96.63", "96.63"],
        ["R4_SA", "-", "62.00 ± 2.83", "55.00", "50.00", "66.00", "1,234", "97.58", "97.46"],
        ["C4 G-CNN", "80.00", "-", "-", "-", "-", "1,234", "98.21", "-"],
        ["C4 G-CNN, rate 0.04", "85.00", "-", "-", "-", "-", "1,234", "98.21", "-"],
    ]
    assert cells(tables["windows"]) == [
        ["3 x 3", "50.00", "96.63"], ["5 x 5", "55.00", "97.58"], ["global", "70.00", "-"],
        ["C4 G-CNN, 3 x 3", "80.00", "-"], ["C4 G-CNN, rate 0.04, 3 x 3", "85.00", "-"],
    ]  # fmt: skip
    assert cells(tables["ablations"]) == [
        ["sharpness 4", "66.00"], ["sharpness 1", "65.00"], ["sharpness 4, without places", "45.00"]
    ]  # fmt: skip
    assert cells(tables["equivariance"]) == [
        ["R4_SA", "ge_vit", "2.0e-07", "2.0e-06", "1e-5"],
        ["R4_SA", "gsa", "1.0e-01", "5.0e-01", "1e-1"],
        ["C4 G-CNN", "-", "1.0e-08", "1.0e-07", "-"],
    ]
    for figure in ("accuracy", "windows", "equivariance"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000
