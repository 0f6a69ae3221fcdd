"""The layers on batches: graphs alone, of any size, permuted, and dense."""

import pytest
import torch
from torch_geometric.utils import to_dense_batch

SIZES = (13, 2, 17)


def arguments(data, joined=True):
    edges = {"edge_index": data.edge_index, "edge_offset": data.edge_offset} if joined else {}
    return {"pos": data.pos, **edges}


@pytest.mark.parametrize("joined", [True, False], ids=["edges", "found"])
def test_alone_equals_in_a_batch(on_device, joined, any_conv, point_graphs, equal):
    """Sizes far apart; one graph has a single node, so no edges."""
    conv, data = any_conv, point_graphs((3, 89, 1, 13, 2))
    out = conv(data.x, batch=data.batch, **arguments(data, joined))
    by_ptr = conv(data.x, ptr=data.ptr, **arguments(data, joined))
    equal(by_ptr, out)
    for number, graph in enumerate(data.to_data_list()):
        alone = conv(graph.x, batch=torch.zeros(len(graph.x), dtype=torch.long), **arguments(graph, joined))
        equal(out[data.batch == number], alone)
        assert alone.shape == (len(graph.x), 35)


def test_graphs_at_the_same_place_do_not_touch(near_conv, point_graphs, equal):
    """Neighbors are found within a graph only."""
    data = point_graphs((11,))
    twice, batch = data.pos.repeat(2, 1), torch.arange(2).repeat_interleave(11)
    out = near_conv(data.x.repeat(2, 1), pos=twice, batch=batch)
    equal(out, near_conv(data.x, pos=data.pos).repeat(2, 1))


def test_nan_stays_in_its_graph(on_device, any_conv, point_graphs, equal):
    conv, data = any_conv, point_graphs((3, 29, 1, 13))
    expected = conv(data.x, batch=data.batch, **arguments(data))
    bad = data.batch == 1
    data.x[bad.nonzero()[7]] = torch.nan
    out = conv(data.x, batch=data.batch, **arguments(data))
    equal(out[~bad], expected[~bad])
    assert bool(out[bad].isnan().all())


def test_graphs_without_nodes(any_conv, point_graphs, equal):
    conv, data = any_conv, point_graphs((7, 11))
    expected = conv(data.x, batch=data.batch, **arguments(data))
    equal(conv(data.x, batch=2 * data.batch + 1, batch_size=5, **arguments(data)), expected)
    ptr = torch.tensor([0, 0, 7, 7, 18, 18])
    equal(conv(data.x, ptr=ptr, **arguments(data)), expected)


def test_no_nodes_at_all(any_conv):
    conv, x, pos = any_conv, torch.zeros(0, 12).double().requires_grad_(), torch.zeros(0, 2)
    none = torch.zeros(0, dtype=torch.long)
    edges = none.view(1, 0).expand(2, 0)
    for given in ({}, {"edge_index": edges}, {"edge_index": edges, "batch": none}, {"batch": none, "batch_size": 3}):
        out = conv(x, pos=pos, **given)
        assert out.shape == (0, 35)
        out.sum().backward()
    assert x.grad.shape == (0, 12)


def test_node_permutation(on_device, any_conv, point_graphs, arbitrary_graphs, equal, error):
    conv, data = any_conv, point_graphs(SIZES)
    order = torch.cat([start + torch.randperm(n) for start, n in zip(data.ptr.tolist(), SIZES, strict=False)])
    place = torch.argsort(order)
    for graph in (data, arbitrary_graphs(SIZES)):
        given = {"batch": data.batch, "edge_offset": graph.edge_offset}
        expected = conv(data.x, graph.edge_index, pos=graph.pos, **given)
        out = conv(data.x[order], place[graph.edge_index], pos=graph.pos[order], **given)
        equal(out, expected[order])
        assert error(out, expected) > 1e-3


@pytest.mark.parametrize("joined", [True, False], ids=["edges", "found"])
def test_equals_the_dense_layer(on_device, joined, any_conv, point_graphs, equal):
    conv, data = any_conv, point_graphs((5, 31, 1, 13))
    dense, mask = to_dense_batch(data.x, data.batch)
    pos, _ = to_dense_batch(data.pos, data.batch, fill_value=1.0)
    expected = conv.attention(dense, mask=mask, pos=pos)
    equal(conv(data.x, batch=data.batch, **arguments(data, joined)), expected[mask])
    assert bool((expected[~mask] == 0).all())


@pytest.mark.parametrize("dim", [1, 3])
def test_other_dimensions(dim, make_conv, equal, error):
    """Offsets of edges, from pos, and found, on a line and in space."""
    pos = torch.cartesian_prod(*[torch.arange(3)] * dim).view(-1, dim)[torch.randperm(3**dim)].double()
    x = torch.randn(len(pos), 12).double()
    distance = (pos[:, None] - pos).abs().sum(-1)
    target, source = ((distance < 3) & (distance > 0)).nonzero().T
    edges, offset = torch.stack([source, target]), pos[source] - pos[target]
    for position in ("window", "clipped"):
        conv = make_conv(position, pos_dim=dim)
        expected = conv(x, edges, edge_offset=offset)
        equal(conv(x, edges, pos=pos), expected)
        equal(conv(x, pos=pos), expected)
        if dim == 1:
            equal(conv(x, edges, edge_offset=offset[:, 0]), expected)
        assert error(conv(x, edges, edge_offset=torch.zeros_like(offset)), expected) > 1e-3
