"""Memory of frames, and rows of the table at the defaults."""

import pytest
from defaults import CASES, measure, tiny


@pytest.mark.parametrize("name", ["R2LiftingAttention, C4", "RelativePerformerConv, pairs", "IrrepsEwaldAttention"])
def test_a_row_of_the_table_at_the_defaults(name):
    _, make = CASES[name]
    cells = measure(make, "tiny", 1, "cpu")
    assert len(cells) == 6
    assert all(float(cell) > 0 for cell in (*cells, *tiny(make, 1, "cpu")))
