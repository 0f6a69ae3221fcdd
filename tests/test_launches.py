"""Launches and memory counted without a GPU agree with counts by hand."""

import re
from pathlib import Path

import pytest
import torch
from cases import Call
from counting import count
from torch import nn

from tg_equiattn.graphs.edge_products import edge_dot, edge_sum
from tg_equiattn.graphs.edges import CSR

pytestmark = pytest.mark.filterwarnings("ignore")  # tracing on the device meta warns
FLOAT = 4
ROOT = Path(__file__).parents[1]


def eager(function, *shapes, parts=()):
    inputs = {name: torch.randn(*shape) for name, shape in zip("xyz", shapes, strict=False)}
    return count(Call(function, *parts), inputs)


def test_counts_of_a_linear_layer_are_those_by_hand():
    """Forward is one operation; backward forms two products, a sum over rows, and the ones that it begins with."""
    forward, training = eager(lambda linear, x: linear(x), (7, 3), parts=(nn.Linear(3, 5),))
    out = 7 * 5
    assert (forward.operations, forward.peak) == (1, FLOAT * out)
    assert training.operations == 5
    assert training.peak == FLOAT * (out + out + 21 + 15 + 5)


def test_near_pairs_beyond_a_tile_are_sparse_products_unless_their_order_matters():
    """2 million pairs, 8 heads of 16."""
    nodes, pairs = 200_000, 2_000_000
    row = torch.arange(nodes).repeat_interleave(pairs // nodes)
    relation = CSR.from_sorted(row, row, nodes, nodes)
    function = Call(
        lambda query, key, **tables: edge_sum(edge_dot(query, key, CSR(*tables.values())), key, CSR(*tables.values()))
    )
    inputs = {"query": torch.empty(8, nodes, 16), "key": torch.empty(8, nodes, 16)}
    inputs |= {f"table{n}": x for n, x in enumerate(relation)}
    sparse, _ = count(function, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        gathered, training = count(function, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sparse.names["aten.sparse_sampled_addmm.default"] == 8
    assert gathered.names["aten.index_add.default"] == 1
    assert not [name for name in (gathered.names + training.names) if "sparse" in name]


@pytest.mark.parametrize("name", ["GroupAttention", "LiftingAttention", "RelativePerformerConv"])
def test_layers_launch_no_more_kernels_than_the_page_says(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/benchmarks"))
    from launches import measured

    page = (ROOT / "docs/performance.md").read_text()
    row = re.search(rf"^\| {name} \| (\d+) \| [\d,]+ \| (\d+) \|", page, re.MULTILINE)
    forward, training = (counts.operations for counts in measured(name, "small"))
    assert (forward <= int(row[1]), training <= int(row[2])) == (True, True), (forward, training)
