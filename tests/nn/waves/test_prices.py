"""Prices of the methods of Ewald attention, from counts of operations or measured."""

import re

import pytest
import torch

from tg_equiattn.functional.waves.methods import PRICES, Prices
from tg_equiattn.nn import EwaldAttention, measure_ewald_prices


def test_one_atom_in_a_wide_cell_costs_its_reciprocal_vectors():
    """On a core of a CPU it took 1.4 s, whatever the number of atoms; the warning said 0.003 s."""
    layer, pos = EwaldAttention(8, 8, width=1.75), torch.zeros(1, 3)
    with pytest.warns(UserWarning, match="cell of graph 0 is far wider than its 1 nodes") as warned, torch.no_grad():
        layer(torch.randn(1, 8), torch.randn(1, 8, 3), pos=pos, cell=50 * torch.eye(3))
    seconds = float(re.search(r"about (\S+) s on a core", str(warned[0].message))[1])
    assert 1.4 / 3 < seconds < 1.4 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")
def test_measured_prices_are_used():
    kept = PRICES["cpu"]
    try:
        found = measure_ewald_prices()
        assert PRICES["cpu"] == Prices(**found)
        assert all(0 < x < float("inf") for x in found.values())
    finally:
        PRICES["cpu"] = kept
