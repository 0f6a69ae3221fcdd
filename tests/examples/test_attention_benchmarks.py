"""Memory of frames, and rows of the table at the defaults."""

import pytest
import torch
from defaults import CASES, measure, tiny
from frames import peak

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


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
    cells = measure(make, "tiny", 1, "cpu")
    assert len(cells) == 6
    assert all(float(cell) > 0 for cell in (*cells, *tiny(make, 1, "cpu")))
