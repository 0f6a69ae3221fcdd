"""Attention over all pairs: in tiles as at once, by torch's kernels as by the definition, and how many pairs fit."""

import pytest
import torch
from clouds import equal
from space import batch_of
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tg_equiattn.graphs import NeighborList
from tg_equiattn.nn import PerformerAttention

CHANNELS, HEADS, D = 2, 3, 5


def test_ten_thousand_nodes():
    """One graph with near pairs, whose 10^8 scores are never in memory at once; some rows by definition."""
    count, rows = 10_000, torch.tensor([0, 4321, 9999])
    layer = PerformerAttention(3, 2, offset=None, key_channels=2, method="pairs").eval()
    torch.nn.init.constant_(layer.positions.far_bias, 0.3)
    edges = torch.stack([torch.arange(1, count), torch.arange(count - 1)])
    x = torch.randn(count, 3)
    with torch.no_grad():
        found = layer(x, neighbors=NeighborList(edges, count))[rows]
        query, key, value = (linear(x).double() for linear in (layer.query, layer.key, layer.value))
        scores = query[rows] @ key.T / 2**0.5
        near = (scores + layer.positions.offset_bias.bias).exp()
        weights = (scores + 0.3).exp()
        for n, i in enumerate(rows.tolist()):
            weights[n, i : i + 2] += near[n, i : i + 2]
        wanted = layer.double().out(weights / weights.sum(-1, keepdim=True) @ value)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def products_of_kernel(query, key, value, *rest, **more):
    return sdpa_flop_count(query, key, value)


@pytest.mark.parametrize("largest", [100, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["content", "near"])
def test_small_graphs_are_not_padded_to_the_largest(kind, largest, randomise):
    """Products of a batch are few more than those of its graphs alone, and outputs and gradients are the same."""
    sizes = (largest, 3, 17, *30 * [5], 0, 90, 29)
    graph = batch_of(sizes)
    options = {"position": None} if kind == "content" else {"offset": "mlp", "values": "offset", "cutoff": 1.0}
    layer = PerformerAttention(CHANNELS, HEADS * D, HEADS, key_channels=D, method="pairs", **options)
    randomise(layer).double().eval()
    edges = ((graph[:, None] == graph) & (torch.rand(len(graph), len(graph)) < 0.2)).nonzero().T
    x, pos = (torch.randn(len(graph), 2, dtype=torch.float64) for _ in range(2))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(first, last, sizes):
        places, more = pos[first:last], {}
        if kind == "near":
            own = edges[:, (edges[1] >= first) & (edges[1] < last)] - first
            more = {"pos": places, "neighbors": NeighborList(own, last - first, places[own[0]] - places[own[1]])}
        with FlopCounterMode(display=False, custom_mapping={kernel: products_of_kernel}) as counter:
            out = layer(x[first:last], batch=batch_of(sizes), batch_size=len(sizes), **more)
        return out, counter.get_total_flops()

    x.requires_grad_()
    found, products = attend(0, len(graph), sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    alone = [attend(end - size, end, (size,)) for size, end in zip(sizes, ends, strict=True) if size]
    equal(found, torch.cat([out for out, _ in alone]), (x, *layer.parameters()), 1e-9, 1e-9)
    assert products < 1.5 * sum(flops for _, flops in alone)
