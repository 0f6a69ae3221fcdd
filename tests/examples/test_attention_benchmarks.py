"""The benchmarks of attention run end to end on small settings, against baselines that compute the same."""

import math

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


def test_attention_over_all_pairs_by_a_double_sum():
    """Scores from scalars in their own width, however it is padded; values of scalars and vectors alike."""
    from point_clouds import CHANNELS, InvariantAttention

    torch.manual_seed(0)
    layer = InvariantAttention().double()
    scalars, vectors = torch.randn(2, 7, CHANNELS).double(), torch.randn(2, 7, CHANNELS, 3).double()
    with torch.no_grad():
        found, turned = layer(scalars, vectors)
        query, key = layer.query_key(scalars).chunk(2, -1)
        for b in range(2):
            for i in range(7):
                scores = [math.exp(float(query[b, i] @ key[b, j]) / 4) for j in range(7)]
                mean = sum(s * scalars[b, j] for j, s in enumerate(scores)) / sum(scores)
                torch.testing.assert_close(found[b, i], layer.scalars(mean))
                mean = sum(s * vectors[b, j] for j, s in enumerate(scores)) / sum(scores)
                torch.testing.assert_close(turned[b, i], layer.vectors.weight @ mean)


def test_where_two_layers_cross():
    """Between sizes as a power of the size, at the last crossing; noise before it does not count."""
    from point_clouds import crossover

    times = {n: (n / 700) ** 0.8 for n in (100, 300, 1000, 3000)}
    assert crossover(times) == "all pairs are slower from 700 points on, 3.2 times at 3,000"
    assert crossover(times | {100: 1.1}) == crossover(times)
    assert crossover({100: 0.1, 300: 0.4}) == "all pairs are faster at all of these sizes"
    assert crossover({100: 1.0, 300: 1.4}) == "all pairs are slower at all of these sizes"


@pytest.mark.slow
def test_point_clouds_benchmark(tmp_path):
    table = tmp_path / "table.md"
    result = run("benchmarks/point_clouds.py", "--nodes", 20, "--sizes", 16, "--compared", 64, 30, "--repeats", 1,
                 "--layers", "pairs", "--output", table)  # fmt: skip
    assert result.returncode == 0, result.stderr
    large, small, *compared = [line.split("|")[1:-1] for line in table.read_text().splitlines()
                               if line.startswith(("| 20", "| 16", "| 30", "| 64"))]  # fmt: skip
    assert all(number(cell) > 0 for row in (large[2:], small[1:]) for cell in row)
    assert [number(row[0]) for row in compared] == [30, 64]
    for _, *cells in compared:
        values = [number(cell) for cell in cells]
        assert values[5] == pytest.approx(values[4] / values[2], rel=0.02)
    assert table.read_text().count(": all pairs are ") == 2
    assert table.with_suffix(".png").stat().st_size > 5000
