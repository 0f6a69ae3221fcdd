"""The benchmarks of attention run end to end on small settings, against baselines that compute the same."""

import pytest
from running import evaluate, number, run


@pytest.mark.slow
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
bias = bias_of(PixelGrid((9, 7), WINDOW), window.positions.offset_bias.table)[0]
row, col = near.pattern.row, near.pattern.col
torch.testing.assert_close(bias[:, row, col], window.positions.offset_bias(near.offsets))
print("equal")
"""
    assert evaluate(code) == "equal"


@pytest.mark.slow
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
        if row[8].strip() == "not installed":  # escnn
            assert row[9].strip() == "-"
        else:
            assert number(row[9]) == pytest.approx(number(row[4]) / number(row[8]), rel=0.02)


@pytest.mark.slow
def test_relative_is_measured_beside_the_convolution(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/group_attention.py", "--cases", "D4 relative", "--size", 6, "--batch", 1, "--repeats", 1,
                 "--channels", 4, "--heads", 2, "--head-channels", 3, "--variants", "baseline", "eager", "--rates",
                 1e10, 1e11, 1e9, "--output", table)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| D4")]
    assert [row[3].strip() for row in rows] == 2 * ["eager"]  # there is no materialised formula of it
    assert all(len(row) == 10 and row[8].strip() for row in rows)


@pytest.mark.slow
def test_what_locality_costs_is_measured(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/locality.py", "--layers", "ge_vit, C4, 5 x 5", "--ways", "eager", "--repeats", 1,
                 "--output", table)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| ge_vit")]
    assert [row[2].strip() for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        without, beside, times = (float(x) for x in row[3:6])
        assert times == pytest.approx(beside / without, rel=0.02, abs=0.01)
        assert float(row[6]) > 0
        assert float(row[7]) > 0
