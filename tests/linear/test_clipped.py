"""Strategy 2 where no node is far; its double sum is in tests/linear/test_paper_positions.py."""

import copy

import torch
from oracles import performer_double_sum

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention


def test_stays_right_where_every_node_is_near():
    """The far row of the table may weigh more than all others by 1e20: with no node far it must not be felt."""
    layer = PerformerAttention(3, 6, 2, position="clipped", cutoff=3, key_channels=1, num_random_features=4).eval()
    layer.positions.distance_table.data = torch.tensor([9.0, 8.9, 9.0, 0.0]).view(1, 4, 1)
    near, x = PixelGrid((1, 2), 3).neighbors(), torch.randn(2, 3)
    exact = copy.deepcopy(layer).double()
    edges, batch = torch.stack([near.source, near.target]), torch.zeros(2, dtype=torch.int64)
    expected = performer_double_sum(exact, x.double(), edges, near.offsets, batch)
    torch.testing.assert_close(layer(x, neighbors=near).double(), expected, rtol=1e-4, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-2
