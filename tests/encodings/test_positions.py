"""Position encodings of linear attention."""

import pytest
import torch

from tg_equiattn.encodings.positions import AbsoluteEncoding, OffsetTable


def test_absolute():
    encoding = AbsoluteEncoding(12, pos_dim=3)
    pos = torch.tensor([[2.0, 0.5, -1.0]]).double()
    expected = [f(w * p) for p in pos[0] for w in (1, 0.01) for f in (torch.sin, torch.cos)]
    torch.testing.assert_close(encoding(pos)[0], torch.stack(expected))


@pytest.mark.parametrize("pos_dim", [1, 2, 3])
def test_table_tells_all_offsets_apart(pos_dim):
    bias = OffsetTable(pos_dim, heads=2, cutoff=3)
    offsets = torch.cartesian_prod(*[torch.arange(-2, 3)] * pos_dim).view(-1, pos_dim)
    assert len(bias(offsets)[0].unique()) == 5**pos_dim
    torch.testing.assert_close(bias(offsets), bias.table, rtol=0, atol=0)
    torch.testing.assert_close(bias(offsets.float() + 0.3 * torch.rand(offsets.shape)), bias.table, rtol=0, atol=0)


def test_table_masks_where_values_are_not_read():
    """Compiled, as on CUDA."""
    bias = torch.compile(OffsetTable(2, heads=3, cutoff=3), fullgraph=True, backend="eager")
    out = bias(torch.tensor([[0.0, 1.0], [3.0, 0.0], [torch.nan, 0.0]]))
    assert out[:, 0].isfinite().all()
    assert bool((out[:, 1:] == -torch.inf).all())
