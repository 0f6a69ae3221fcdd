"""Position encodings of linear attention."""

import torch

from tg_equiattn.linear.positions import OffsetTable


def test_offsets_beyond_the_table_have_no_weight_where_values_are_not_read():
    """Compiled, as on CUDA; elsewhere they are refused."""
    bias = torch.compile(OffsetTable(2, heads=3, cutoff=3), fullgraph=True, backend="eager")
    out = bias(torch.tensor([[0.0, 1.0], [3.0, 0.0], [torch.nan, 0.0]]))
    assert out[:, 0].isfinite().all()
    assert bool((out[:, 1:] == -torch.inf).all())
