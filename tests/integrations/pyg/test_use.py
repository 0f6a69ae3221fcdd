"""The layers within PyG: GPSConv, Sequential, HeteroConv, clusters of one graph."""

import pytest
import torch
from torch_geometric.nn import GPSConv, HeteroConv, Sequential, global_add_pool


def gps(make_conv, position):
    return GPSConv(12, make_conv(position, in_channels=12, out_channels=12, heads=3), heads=2).double().eval()


def gps_arguments(data):
    return {"edge_offset": data.edge_offset, "pos": data.pos}


@pytest.mark.parametrize("position", ["window", "clipped", "sinusoid", None])
def test_gps_conv_without_ptr_warns(position, make_conv, point_graphs):
    """Otherwise graphs of a batch would attend to each other in silence."""
    layer, data = gps(make_conv, position), point_graphs((11, 1, 23))
    with pytest.warns(UserWarning, match=r"batch is None.*ptr=data\.ptr.*batch=torch\.zeros\(35"):
        layer(data.x, data.edge_index, data.batch, **gps_arguments(data))
    assert layer.conv(data.x, data.edge_index, batch=torch.zeros(35).long(), **gps_arguments(data)).shape == (35, 12)


def test_sequential(make_conv, point_graphs, equal):
    first, second, data = make_conv(), make_conv("clipped", 35, 21, 7), point_graphs((11, 1, 23))
    arguments = "x, edge_index, batch, edge_attr, pos"
    wiring = f"{arguments} -> x"
    model = Sequential(
        arguments, [(first, wiring), torch.nn.GELU(), (second, wiring), (global_add_pool, "x, batch -> x")]
    )
    graph = data.edge_index, data.batch
    expected = second(torch.nn.functional.gelu(first(data.x, *graph, pos=data.pos)), *graph, pos=data.pos)
    equal(model(data.x, *graph, None, data.pos), global_add_pool(expected, data.batch), 0)


def two_clusters():
    """One graph of two clusters, whose nodes are sorted by cluster, at places of their own."""
    x = torch.randn(7, 12, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 1, 4, 5, 6]])
    return x, edges, torch.tensor([[0, 0], [1, 0], [2, 0], [9, 0], [9, 1], [9, 2], [9, 3]])


def test_clusters_of_one_graph(make_conv, equal):
    """A suspicion is a warning, and none where batch is given."""
    x, edges, pos = two_clusters()
    conv = make_conv()
    expected = conv(x, edges, pos=pos, batch=torch.zeros(7).long())
    with pytest.warns(UserWarning, match="form 2 separate blocks"):
        equal(conv(x, edges, pos=pos), expected)
    equal(conv(x, edges, pos=pos), expected)  # without another warning


def test_hetero_conv(make_conv, equal):
    """Which passes batch on by its own name."""
    x, edges, pos = two_clusters()
    near, far = make_conv(), make_conv("clipped")
    layer = HeteroConv({("atom", "near", "atom"): near, ("atom", "bond", "atom"): far})
    edge_index = {("atom", "near", "atom"): edges, ("atom", "bond", "atom"): edges.flip(0)}
    offsets = {kind: pos[e[0]] - pos[e[1]] for kind, e in edge_index.items()}
    batch = torch.zeros(7).long()
    out = layer({"atom": x}, edge_index, edge_offset_dict=offsets, batch_dict={"atom": batch})["atom"]
    equal(out, near(x, edges, pos=pos, batch=batch) + far(x, edges.flip(0), pos=pos, batch=batch))
