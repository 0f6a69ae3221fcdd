"""Strategy 2 where no node is far; its double sum is in tests/linear/test_paper_positions.py."""

import pytest
import torch

from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.grids import PixelGrid
from tg_equiattn.linear.linear_attention import Inputs
from tg_equiattn.linear.near_pairs import clipped_attention_impl

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")


def test_stays_right_where_every_node_is_near():
    """The far row of the table may weigh more than all others by 1e20: with no node far it must not be felt."""
    near, projection = PixelGrid((1, 2), 3).neighbors(), torch.tensor([[1.0]])
    table = torch.tensor([1e-20, 3e-20, 1e-20, 1.0]).log()
    table = 1 - (1 - 2 * table).sqrt()  # of the two numbers w with w - w^2 / 2 as asked for, the lower one
    query, value, nodes = torch.zeros(1, 2, 1), torch.randn(1, 2, 3), NodeBatch.flat(torch.empty(2), None)
    out = clipped_attention_impl(Inputs(query, query, value, projection), table[None, :, None], near, nodes)
    torch.testing.assert_close(out, (value + 3 * value.flip(1)) / 4, rtol=1e-4, atol=1e-5)
