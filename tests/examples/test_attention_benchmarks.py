"""The benchmarks of attention run end to end on small settings, against baselines that compute the same."""

import pytest
import torch
from defaults import CASES, measure, tiny
from frames import peak
from linear_attention import (
    CHANNELS,
    CLIPPED,
    HEADS,
    WINDOW,
    GatheredClipped,
    PerformerAttention,
    PixelGrid,
    bias_of,
)

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


def test_benchmark_baselines_compute_the_same():
    grid, x = PixelGrid((9, 7), CLIPPED), torch.randn(1, 63, CHANNELS)
    gathered = GatheredClipped(
        CHANNELS, CHANNELS, HEADS, position="clipped", cutoff=CLIPPED, method="features"
    ).window_of(grid, "cpu")
    layer = PerformerAttention(CHANNELS, CHANNELS, HEADS, position="clipped", cutoff=CLIPPED, method="features")
    layer.load_state_dict(gathered.state_dict())
    torch.testing.assert_close(gathered(x, grid=grid), layer(x, grid=grid), rtol=1e-4, atol=1e-5)
    window = PerformerAttention(CHANNELS, CHANNELS, HEADS, cutoff=WINDOW, method="features")
    near = PixelGrid((9, 7), WINDOW).neighbors()
    bias = bias_of(PixelGrid((9, 7), WINDOW), window.positions.offset_bias.table)[0]
    row, col = near.target, near.source
    torch.testing.assert_close(bias[:, row, col], window.positions.offset_bias(near.offsets))


def test_memory_is_the_most_that_is_held_at_once():
    """Not the sum of all that is allocated, and nothing that was there before."""
    x = torch.ones(1000)
    assert peak(lambda: x.exp()) == 4000
    assert peak(lambda: (x.exp(), x.exp())) == 8000
    assert peak(lambda: [x.exp().sum() for _ in range(3)]) < 5000


@pytest.mark.parametrize("content", [1, 4])
def test_frames_hold_at_most_four_tensors_of_scores(content):
    """Forward and backward, gradients included."""
    layer = GroupAttention(cyclic(8), 8, 8, heads=4, head_channels=4, content_heads=content)
    x = torch.randn(2, 8, 8, 32, 32)
    places = layer.window.count()
    assert peak(lambda: layer(x).square().sum().backward()) < 4 * 4 * (2 * 4 * places * 8 * 32 * 32)


@pytest.mark.parametrize("name", ["R2LiftingAttention, C4", "RelativePerformerConv, pairs", "IrrepsEwaldAttention"])
def test_a_row_of_the_table_at_the_defaults(name):
    _, make = CASES[name]
    cells = measure(make, "tiny", 1, False, "cpu")
    assert len(cells) == 6
    assert all(float(cell) > 0 for cell in (*cells, *tiny(make, 1, "cpu")))
