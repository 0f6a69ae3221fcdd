"""The examples run end to end on small settings, and their loaders refuse what they cannot read."""

import gzip

import numpy as np
import pytest
from running import evaluate, number, run

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


SMALL = ("--epochs", 1, "--channels", 8, "--layers", 1, "--heads", 2, "--batch", 8)


def test_pixel_graphs(tmp_path):
    few = ("--train-images", 16, "--test-images", 12, "--size", 10, "--shift", 1, "--seeds", 0, 1)
    result = run("pixel_graphs.py", *SMALL, *few, "--max-distance", 2, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "shifts.png").stat().st_size > 5000
    rows = [line.split("|")[1:-1] for line in (tmp_path / "accuracy.md").read_text().splitlines()]
    assert [cell.strip() for cell in rows[0]] == ["model", "digits", "params"]
    assert len(rows) == 2 + 5
    assert all("+-" in row[1] and int(row[2].replace(",", "")) > 500 for row in rows[2:])
    shifts = [line.split("|")[1:-1] for line in (tmp_path / "shifts.md").read_text().splitlines()]
    assert [cell.strip() for cell in shifts[0]] == ["shift in pixels", "-1", "0", "1"]
    without = next(row for row in shifts if "No Pos." in row[0])
    assert len(set(without[1:])) == 1  # no positions, no borders: shifts change nothing


def test_pixel_graphs_on_a_torus(tmp_path):
    few = ("--train-images", 16, "--test-images", 40, "--size", 10, "--shift", 1, "--positions", "window", "clipped")
    result = run("pixel_graphs.py", *SMALL, *few, "--max-distance", 2, "--periodic", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[2:-1] for line in (tmp_path / "shifts.md").read_text().splitlines()[2:]]
    assert len(rows) == 2
    assert all(len(set(row)) == 1 for row in rows)


@pytest.mark.parametrize("flag", ["--shift", "--size", "--epochs", "--max-distance"])
def test_pixel_graphs_refuses_zero(flag):
    result = run("pixel_graphs.py", flag, 0)
    assert result.returncode == 2
    assert f"{flag} must be" in result.stderr


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header + array.tobytes())


def write_mnist(folder, rows):
    random = np.random.default_rng(0)
    for part, suffix in (("train", ""), ("t10k", ".gz")):
        images = random.integers(256, size=(rows, 28, 28), dtype=np.uint8)
        images[:, :, :9], images[:, :, -9:] = 0, 0
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(rows, dtype=np.uint8) % 10)


def test_mnist_files(tmp_path):
    write_mnist(tmp_path, 9)
    result = run("pixel_graphs.py", *SMALL, "--data", tmp_path, "--size", 28, "--positions", "none", "--shift", 8,
                 "--label", 1, "--output", tmp_path / "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "9 images to train, 9 to test, 28 x 28 pixels; 1 can be shifted by 8 pixels" in result.stdout


def test_cifar_files(tmp_path):
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
        table = random.integers(256, size=(2, 3073), dtype=np.uint8)
        table[:, 0] %= 10
        (tmp_path / name).write_bytes(table.tobytes())
    result = run("pixel_graphs.py", *SMALL, "--data", tmp_path, "--size", 8, "--positions", "none", "--embedding",
                 "lookup", "--output", tmp_path / "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "10 images to train, 2 to test, 8 x 8 pixels; 0 can be shifted" in result.stdout
    assert "No test image can be shifted so far" in result.stdout


@pytest.mark.parametrize("damage", ["nothing there", "missing", "truncated", "cifar"])
def test_bad_image_files(tmp_path, damage):
    write_mnist(tmp_path, 3)
    labels, images = tmp_path / "train-labels-idx1-ubyte", tmp_path / "train-images-idx3-ubyte"
    if damage == "truncated":
        images.write_bytes(images.read_bytes()[:-1])
    elif damage == "missing":
        labels.unlink()
    else:
        images.unlink()
    if damage == "cifar":
        (tmp_path / "data_batch_1.bin").write_bytes(b"x" * 3072)
    result = run("pixel_graphs.py", *SMALL, "--data", tmp_path)
    assert result.returncode != 0
    wanted = {
        "nothing there": f"{images} (or .gz) and",
        "missing": f"{labels} is missing",
        "truncated": f"{images} must be an idx file",
        "cifar": f"{tmp_path / 'data_batch_1.bin'} must hold 3073 bytes an image",
    }[damage]
    assert wanted in result.stderr


def test_linear_attention_benchmark(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/linear_attention.py", "--sizes", 8, 12, "--repeats", 1, "--output", table, "--rates",
                 1e10, 1e11, 1e9, "--variants", "PyG Performer", "SDPA", "window")  # fmt: skip
    assert result.returncode == 0, result.stderr
    text = table.read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| window |", "| SDPA |"))]
    assert len(rows) == 2 * 2 * 2
    for _, time, _, floor, times in rows:
        assert number(times) == pytest.approx(number(time) / number(floor), rel=0.02)
    assert text.count("- window, forward: time per doubling of N") == 1


def test_benchmark_baselines_compute_the_same():
    """The gathered double sum and the dense bias are the layers they are measured against."""
    code = """
import torch
from linear_attention import CHANNELS, CLIPPED, HEADS, WINDOW, GatheredClipped, PerformerAttention, PixelGrid, bias_of
grid, x = PixelGrid((9, 7), CLIPPED), torch.randn(1, 63, CHANNELS)
gathered = GatheredClipped(CHANNELS, CHANNELS, HEADS, position="clipped", max_distance=CLIPPED).window_of(grid, "cpu")
layer = PerformerAttention(CHANNELS, CHANNELS, HEADS, position="clipped", max_distance=CLIPPED)
layer.load_state_dict(gathered.state_dict())
torch.testing.assert_close(gathered(x, grid=grid), layer(x, grid=grid), rtol=1e-4, atol=1e-5)
window = PerformerAttention(CHANNELS, CHANNELS, HEADS, position="window", max_distance=WINDOW)
near = PixelGrid((9, 7), WINDOW).neighbours()
bias = bias_of(PixelGrid((9, 7), WINDOW), window.offset_bias.table)[0]
row, col = near.pattern.row, near.pattern.col
torch.testing.assert_close(bias[:, row, col], window.offset_bias(near.offsets))
print("equal")
"""
    assert evaluate(code) == "equal"


def test_group_attention_benchmark(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/group_attention.py", "--cases", "C4", "--size", 6, "--batch", 1, "--repeats", 1,
                 "--variants", "baseline", "eager", "--rates", 1e10, 1e11, 1e9, "--output", table)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| C4")]
    assert [row[2].strip() for row in rows] == 2 * ["forward"] + 2 * ["forward+backward"]
    assert [row[3].strip() for row in rows] == 2 * ["materialised", "eager"]
    assert all("x)" in row[4] for row in rows[1::2])
    for row in rows:
        assert number(row[7]) == pytest.approx(number(row[4]) / number(row[6]), rel=0.02)
