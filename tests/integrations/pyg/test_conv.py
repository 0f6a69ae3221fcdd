"""The layers against those of the core, on batches, and permuted."""

import pytest
import torch

from tg_equiattn.graphs import NeighborList

pytestmark = pytest.mark.filterwarnings("ignore:offset='distance' leaves out")  # of edges of any length


def test_equals_the_core(any_conv, arbitrary_graphs, equal):
    """With self-loops, a graph of one node, and nodes without edges."""
    data = arbitrary_graphs((7, 1, 9, 2))
    edges = data.edge_index[:, ((data.edge_index > 1) & (data.edge_index < 17)).all(0)]
    assert bool((edges[0] == edges[1]).any())
    near = NeighborList(edges, 19, data.pos[edges[0]] - data.pos[edges[1]])
    own = {"neighbors": near} if any_conv.attention.needs.neighbors else {}
    wanted = any_conv.attention(data.x, pos=data.pos, batch=data.batch, **own)
    equal(any_conv(data.x, edges, data.batch, pos=data.pos), wanted)


def arguments(data, joined=True):
    edges = {"edge_index": data.edge_index, "edge_offset": data.edge_offset} if joined else {}
    return {"pos": data.pos, **edges}


def test_other_ways_to_say_which_graph_a_node_is_in(on_device, any_conv, point_graphs, equal):
    """Sizes far apart; one graph has a single node, so no edges, and others have no nodes."""
    data = point_graphs((3, 31, 1, 13, 2))
    for joined in (True, False):  # near pairs are given or found
        given = arguments(data, joined)
        out = any_conv(data.x, batch=data.batch, **given)
        equal(any_conv(data.x, ptr=data.ptr, **given), out)
        equal(any_conv(data.x, batch=2 * data.batch + 1, batch_size=11, **given), out)
        equal(any_conv(data.x, ptr=data.ptr.repeat_interleave(2), **given), out)


@pytest.mark.parametrize("joined", [True, False], ids=["edges", "found"])
def test_nodes_of_graphs_in_any_order(on_device, joined, any_conv, point_graphs, equal, error):
    """As disjoint sampling gives them, seeds first; with graphs of one size, and of none."""
    for sizes in ((3, 0, 31, 1, 13, 2), (7, 7, 7)):
        data, order = point_graphs([n for n in sizes if n]), torch.randperm(sum(sizes))
        batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        given = arguments(data, joined)
        expected = any_conv(data.x, batch=batch, batch_size=len(sizes), **given)
        mixed = {**given, "pos": data.pos[order]} | ({"edge_index": order.argsort()[data.edge_index]} if joined else {})
        out = any_conv(data.x[order], batch=batch[order], batch_size=len(sizes), **mixed)
        equal(out, expected[order])
        assert error(any_conv(data.x[order], batch=batch, batch_size=len(sizes), **given), expected[order]) > 1e-3


def test_an_unsorted_batch_is_sorted(make_conv):
    """In the graph: the values of batch are not known before."""
    conv, batch = make_conv(None), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    given = {"x": torch.randn(7, 12, dtype=torch.float64), "batch": batch, "batch_size": 2}
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given), conv(**given))
    mixed = {**given, "batch": batch[torch.tensor([6, 0, 3, 1, 5, 2, 4])]}
    torch.testing.assert_close(compiled(**mixed), conv(**mixed))
