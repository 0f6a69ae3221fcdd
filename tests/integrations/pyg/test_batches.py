"""The layers on batches: graphs alone, of any size, permuted, and dense."""

import torch
from torch_geometric.utils import to_dense_batch

SIZES = (13, 2, 17)


def arguments(data, joined=True):
    edges = {"edge_index": data.edge_index, "edge_offset": data.edge_offset} if joined else {}
    return {"pos": data.pos, **edges}


def test_alone_equals_in_a_batch(on_device, any_conv, point_graphs, equal):
    """And the dense layer. Sizes far apart; one graph has a single node, so no edges, and others have no nodes."""
    data = point_graphs((3, 31, 1, 13, 2))
    dense, mask = to_dense_batch(data.x, data.batch)
    pos, _ = to_dense_batch(data.pos, data.batch, fill_value=1.0)
    padded = any_conv.attention(dense, mask=mask, pos=pos)
    assert bool((padded[~mask] == 0).all())
    for joined in (True, False):  # near pairs are given or found
        given = arguments(data, joined)
        out = any_conv(data.x, batch=data.batch, **given)
        equal(out, padded[mask])
        equal(any_conv(data.x, ptr=data.ptr, **given), out)
        equal(any_conv(data.x, batch=2 * data.batch + 1, batch_size=11, **given), out)
        equal(any_conv(data.x, ptr=data.ptr.repeat_interleave(2), **given), out)
        for number, graph in enumerate(data.to_data_list()):
            alone = any_conv(graph.x, batch=torch.zeros(len(graph.x), dtype=torch.long), **arguments(graph, joined))
            equal(out[data.batch == number], alone)
            assert alone.shape == (len(graph.x), 35)


def test_nan_stays_in_its_graph(on_device, any_conv, point_graphs, equal):
    conv, data = any_conv, point_graphs((3, 29, 1, 13))
    expected = conv(data.x, batch=data.batch, **arguments(data))
    bad = data.batch == 1
    data.x[bad.nonzero()[7]] = torch.nan
    out = conv(data.x, batch=data.batch, **arguments(data))
    equal(out[~bad], expected[~bad])
    assert bool(out[bad].isnan().all())


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
