"""Prices of the methods of Ewald attention, from counts of operations or measured."""

import re

import pytest
import torch

from tg_equiattn.functional.waves.methods import PRICES, Prices, choose, number_of_vectors, time_of_steps
from tg_equiattn.functional.waves.nufft import nufft_available
from tg_equiattn.nn import EwaldAttention, measure_ewald_prices
from tg_equiattn.node_batch import NodeBatch


def test_one_atom_in_a_wide_cell_costs_its_reciprocal_vectors():
    """On a core of a CPU it took 1.4 s, whatever the number of atoms; the warning said 0.003 s."""
    layer, pos = EwaldAttention(8, 8, width=1.75), torch.zeros(1, 3)
    with pytest.warns(UserWarning, match="cell of graph 0 is far wider than its 1 nodes") as warned, torch.no_grad():
        layer(torch.randn(1, 8), torch.randn(1, 8, 3), pos=pos, cell=50 * torch.eye(3))
    seconds = float(re.search(r"about (\S+) s on a core", str(warned[0].message))[1])
    assert 1.4 / 3 < seconds < 1.4 * 3


@pytest.fixture
def interaction():
    """Four Gaussian and four Coulomb kernels, the narrowest of width 2.5."""
    layer = EwaldAttention(16, 16, width=2.5)
    return layer.interaction(torch.zeros(()))


@pytest.mark.parametrize(("size", "direct", "nufft"), [(4000, 3.2, None), (10_000, 20.3, 26.9)])
def test_time_of_large_open_systems(size, direct, nufft, interaction):
    """Seconds measured on a core of a CPU; direct sums took twice as long beside other programs."""
    _, vectors = number_of_vectors(1.0, 3 * [(10 * size) ** (1 / 3)], interaction)
    steps = Prices(*time_of_steps(size, vectors, interaction, (size, 1, 8, 4), 128, 1))
    assert direct / 3 < 1e-9 * steps.direct < direct * 3
    if nufft is not None:
        assert nufft / 3 < 1e-9 * (steps.vectors + steps.nufft) < nufft * 3


@pytest.mark.skipif(not nufft_available("cpu"), reason="finufft is not installed")
@pytest.mark.parametrize(("size", "wanted"), [(2000, "direct"), (30_000, "nufft")])
def test_auto_takes_the_faster_method_for_open_systems(size, wanted, interaction):
    pos = (10 * size) ** (1 / 3) * torch.rand(size, 3, dtype=torch.float64)
    query, value = torch.zeros(size, 1, 8, 4), torch.zeros(size, 1, 64)
    chosen = choose("auto", pos, query, (query, value), interaction, NodeBatch.flat(query, None), None)
    assert [choice.method for choice in chosen] == [wanted]


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
