"""The examples run end to end on small settings, and their loaders refuse what they cannot read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


TINY = ("--epochs", 1, "--channels", 6, "--heads", 1, "--blocks", 1)


def test_rotated_digits(tmp_path):
    models = ("--models", "Z2_SA", "R4_SA", "R4M_SA", "--norm", "layer", "--blocks", 2)
    result = run("rotated_digits.py", *TINY, *models, "--train-images", 32, "--size", 12, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    for figure in ("translation", "rotation", "reflection", "errors"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000
    rows = [line.split("|")[1:-1] for line in (tmp_path / "equivariance.md").read_text().splitlines()[2:]]
    errors = {(name.strip(), relation.strip()): float(worst) for name, relation, _, worst in rows}
    assert set(errors) == {(m, r) for m in ("R4_SA", "R4M_SA") for r in ("ge_vit", "gsa")}
    for (_, relation), worst in errors.items():
        assert worst < 1e-5 if relation == "ge_vit" else worst > 1e-4
    accuracy = (tmp_path / "accuracy.md").read_text()
    assert accuracy.splitlines()[0] == "| model | ge_vit | gsa |"
    assert str(tmp_path) in result.stdout


def write_rotmnist(folder, rows):
    for name in (
        "mnist_all_rotation_normalized_float_train_valid.amat",
        "mnist_all_rotation_normalized_float_test.amat",
    ):
        table = np.random.default_rng(0).random((rows, 785))
        table[:, -1] = np.arange(rows) % 10
        np.savetxt(folder / name, table, fmt="%.4f")


def test_published_files(tmp_path):
    write_rotmnist(tmp_path, 20)
    result = run("rotated_digits.py", *TINY, "--data", tmp_path, "--models", "R4_SA", "--relation", "relative",
                 "--output", tmp_path / "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "20 digits to train, 20 to test, 28 x 28 pixels" in result.stdout


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_bad_files(tmp_path, damage):
    write_rotmnist(tmp_path, 3)
    path = tmp_path / "mnist_all_rotation_normalized_float_test.amat"
    if damage == "missing":
        path.unlink()
    else:
        np.savetxt(path, np.zeros((3, 700)))
    result = run("rotated_digits.py", *TINY, "--data", tmp_path)
    assert result.returncode != 0
    assert str(path) in result.stderr
    assert ("is missing" if damage == "missing" else "must hold 785 numbers a line") in result.stderr


def test_odd_size():
    result = run("rotated_digits.py", "--size", 9)
    assert "--size must be even" in result.stderr


def test_group_attention_benchmark(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/group_attention.py", "--cases", "C4", "--size", 6, "--batch", 1, "--repeats", 1,
                 "--variants", "baseline", "eager", "--output", table)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line for line in table.read_text().splitlines() if line.startswith("| C4")]
    assert [row.split("|")[3].strip() for row in rows] == ["forward", "forward+backward"]
    assert all("x)" in row.split("|")[5] for row in rows)
