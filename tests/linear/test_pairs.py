"""Attention over all pairs: in chunks as at once, by torch's kernels as by the definition, and how many pairs fit."""

import pytest
import torch
from clouds import double, equal
from space import batch_of
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tg_equiattn.graphs import NeighborList
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.linear.linear_attention import Inputs
from tg_equiattn.linear.near_pairs import Near, pair_attention_impl, window_attention_impl

pytestmark = pytest.mark.usefixtures("operators_for_few_numbers")

HEADS, D, SIZES = 3, 5, (13, 1, 0, 17)
NODES = sum(SIZES)


@pytest.fixture
def nodes():
    return NodeBatch.flat(torch.empty(NODES), batch_of(SIZES), len(SIZES))


def test_ten_thousand_nodes():
    """One graph with near pairs, whose 10^8 scores are never in memory at once; some rows by definition."""
    count, rows = 10_000, torch.tensor([0, 4321, 9999])
    query, key, value = torch.randn(3, 1, count, 2)
    edges = torch.stack([torch.arange(1, count), torch.arange(count - 1)])
    pairs, bias, far = NeighborList(edges, count), torch.randn(1, count - 1), torch.tensor([0.3])
    with torch.no_grad():
        near = Near(pairs, bias, torch.zeros(1, 1), far)
        found = window_attention_impl(Inputs(query, key, value), near, NodeBatch.flat(torch.empty(count), None))
    scores = (query[0, rows] @ key[0].T / 2**0.5).double()
    weights = (scores + 0.3).exp()
    for n, i in enumerate(rows.tolist()):
        weights[n, i] += scores[n, i].exp()
        if i < count - 1:
            weights[n, i + 1] += (scores[n, i + 1] + bias[0, i]).exp()
    wanted = weights / weights.sum(-1, keepdim=True) @ value[0].double()
    torch.testing.assert_close(found[0, rows].double(), wanted, rtol=1e-4, atol=1e-5)


def test_more_pairs_than_fit_are_refused():
    nodes = NodeBatch.flat(torch.empty(70_000), None)
    x = torch.empty(1, 1, 1).expand(1, 70_000, 1)
    with pytest.raises(ValueError, match=r"16 GiB in float32\), got 1 heads of 70000 nodes: pass method='features'"):
        pair_attention_impl(Inputs(x, x, x), nodes)


def products_of_kernel(query, key, value, *rest, **more):
    return sdpa_flop_count(query, key, value)


@pytest.mark.parametrize("largest", [100, 200])
@pytest.mark.parametrize("kind", ["content", "near"])
def test_small_graphs_are_not_padded_to_the_largest(kind, largest):
    """Products of a batch are few more than those of its graphs alone, and outputs and gradients are the same."""
    sizes = (largest, 3, 17, *30 * [5], 0, 90, 29)
    graph = batch_of(sizes)
    edges = ((graph[:, None] == graph) & (torch.rand(len(graph), len(graph)) < 0.2)).nonzero().T
    pairs = NeighborList(edges, len(graph))
    bias, itself, far = double(HEADS, len(pairs.target)), double(HEADS, len(graph)), double(HEADS)
    values = double(len(pairs.target), 2), double(2), double(HEADS, 2, D)
    operands = [double(HEADS, len(graph), D).requires_grad_() for _ in range(3)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(first, last, sizes):
        batch, mine = batch_of(sizes), (pairs.target >= first) & (pairs.target < last)
        near = None
        if kind == "near":
            some = NeighborList(torch.stack([pairs.source, pairs.target])[:, mine] - first, last - first)
            near = Near(some, bias[:, mine], itself[:, first:last], far, (values[0][mine], *values[1:]))
        nodes = NodeBatch.flat(batch, batch, len(sizes))
        inputs = Inputs(*(x[:, first:last] for x in operands))
        with FlopCounterMode(display=False, custom_mapping={kernel: products_of_kernel}) as counter:
            out = window_attention_impl(inputs, near, nodes) if near else pair_attention_impl(inputs, nodes)
        return out, counter.get_total_flops()

    found, products = attend(0, len(graph), sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    alone = [attend(end - size, end, (size,)) for size, end in zip(sizes, ends, strict=True) if size]
    equal(found, torch.cat([out for out, _ in alone], 1), operands)
    assert products < 1.5 * sum(flops for _, flops in alone)
