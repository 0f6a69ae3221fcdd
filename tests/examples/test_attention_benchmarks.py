"""The benchmarks of attention run end to end on small settings, against baselines that compute the same."""

import pytest
import torch
from running import evaluate_here, number, run

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


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
from linear_attention import PositionalPerformerAttention
grid, x = PixelGrid((9, 7), CLIPPED), torch.randn(1, 63, CHANNELS)
gathered = GatheredClipped(CHANNELS, CHANNELS, HEADS, cutoff=CLIPPED).window_of(grid, "cpu")
layer = PositionalPerformerAttention(CHANNELS, CHANNELS, HEADS, cutoff=CLIPPED)
layer.load_state_dict(gathered.state_dict())
torch.testing.assert_close(gathered(x, grid=grid), layer(x, grid=grid), rtol=1e-4, atol=1e-5)
window = PerformerAttention(CHANNELS, CHANNELS, HEADS, cutoff=WINDOW, method="features")
near = PixelGrid((9, 7), WINDOW).neighbors()
bias = bias_of(PixelGrid((9, 7), WINDOW), window.positions.offset_bias.table)[0]
row, col = near.target, near.source
torch.testing.assert_close(bias[:, row, col], window.positions.offset_bias(near.offsets))
print("equal")
"""
    assert evaluate_here(code) == "equal"


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


def test_memory_is_the_most_that_is_held_at_once():
    """Not the sum of all that is allocated, and nothing that was there before."""
    from frames import peak

    x = torch.ones(1000)
    assert peak(lambda: x.exp()) == 4000
    assert peak(lambda: (x.exp(), x.exp())) == 8000
    assert peak(lambda: [x.exp().sum() for _ in range(3)]) < 5000


@pytest.mark.parametrize("content", [1, 4])
def test_frames_hold_at_most_four_tensors_of_scores(content):
    """Forward and backward, gradients included."""
    from frames import peak

    layer = GroupAttention(cyclic(8), 8, 8, heads=4, head_channels=4, kernel_size=5, content_heads=content)
    x = torch.randn(2, 8, 8, 32, 32)
    places = layer.neighbourhood.count()
    assert peak(lambda: layer(x).square().sum().backward()) < 4 * 4 * (2 * 4 * places * 8 * 32 * 32)
