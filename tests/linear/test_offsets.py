"""Offsets beyond the table of a layer."""

import torch

from tg_equiattn.graphs import NeighborList
from tg_equiattn.nn import PerformerAttention


def test_offsets_beyond_the_table_have_no_weight_where_values_are_not_read():
    """Compiled, as on CUDA; elsewhere they are refused."""
    layer = PerformerAttention(5, 6, heads=3, cutoff=3, method="features").eval()
    edges, offsets = torch.tensor([[1, 2, 3], [0, 0, 1]]), torch.tensor([[0.0, 1.0], [3.0, 0.0], [torch.nan, 0.0]])

    @torch.compile(fullgraph=True, backend="eager")
    def attend(x, edges, offsets):
        return layer(x, neighbors=NeighborList(edges, 4, offsets))

    x = torch.randn(4, 5)
    expected = layer(x, neighbors=NeighborList(edges[:, :1], 4, offsets[:1]))
    torch.testing.assert_close(attend(x, edges, offsets), expected)
