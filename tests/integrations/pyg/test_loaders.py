"""One large graph in parts, as PyG's loaders cut it: neighbourhoods of seeds, clusters, random nodes."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData, ClusterLoader, NodeLoader, RandomNodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

NODES, PARTS = 101, 7


@pytest.fixture
def graph():
    pos = 10 * torch.rand(NODES, 2, dtype=torch.float64)
    edges = (torch.cdist(pos, pos) < 1.8).fill_diagonal_(False).nonzero().T
    x = torch.randn(NODES, 12, dtype=torch.float64)
    return Data(x=x, pos=pos + 1e3, edge_index=edges, number=torch.arange(NODES), num_nodes=NODES)


class AllNeighbors(BaseSampler):
    """What NeighborLoader's sampler finds with all neighbors of one hop, seeds first, without its C++."""

    def __init__(self, edge_index):
        super().__init__()
        self.edge_index = edge_index

    def sample_from_nodes(self, inputs, **kwargs):
        seeds = inputs.node
        some, _, _, kept = k_hop_subgraph(seeds, 1, self.edge_index, num_nodes=NODES)
        node = torch.cat([seeds, some[~torch.isin(some, seeds)]])
        place = torch.full((NODES,), -1).scatter(0, node, torch.arange(len(node)))
        row, col = place[self.edge_index[:, kept]]
        return SamplerOutput(node, row, col, kept.nonzero()[:, 0], metadata=(inputs.input_id, inputs.time))

    def sample_from_edges(self, *args, **kwargs):
        raise NotImplementedError


class Stripes(ClusterData):
    """Clusters by position, without the C++ of METIS."""

    def __init__(self, data):
        self.cluster = (data.pos[:, 0].argsort().argsort() * PARTS) // NODES
        super().__init__(data, PARTS, log=False)

    def _metis(self, edge_index, num_nodes):
        return self.cluster


LOADERS = {
    "NodeLoader": lambda graph: NodeLoader(graph, AllNeighbors(graph.edge_index), batch_size=17),
    "ClusterLoader": lambda graph: ClusterLoader(Stripes(graph), batch_size=2, shuffle=True),
    "RandomNodeLoader": lambda graph: RandomNodeLoader(graph, PARTS),
}
LAYERS = {
    "near": {"offset": "mlp", "cutoff": 1.8},
    "far": {"offset": "distance", "values": "offset", "cutoff": 1.8},
    "far pairs": {"offset": "mlp", "values": "offset", "cutoff": 1.8, "method": "pairs"},
    "clipped": {"position": "clipped"},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_parts_are_graphs(kind, name, graph, make_conv, equal, error):
    """A part is the graph of its nodes and edges, whichever way they are numbered; it may be moved; all nodes come."""
    conv, seen = make_conv(**LAYERS[name]), []
    if name == "clipped":
        graph.pos = graph.pos.round()
    for part in LOADERS[kind](graph):
        count, edges = part.num_nodes, part.edge_index
        seen.append(part.number[: part.get("batch_size", count)])
        assert torch.equal(part.x, graph.x[part.number])
        given = {"batch": torch.zeros(count, dtype=torch.long)}  # parts may have several clusters
        out = conv(part.x, edges, pos=part.pos, **given)
        order = torch.argsort(part.number)  # as they are in the graph
        nodes = part.number[order]
        again = conv(graph.x[nodes], torch.argsort(order)[edges], pos=graph.pos[nodes] - 1e3, **given)
        equal(again, out[order], 1e-9)
        if edges.shape[1]:
            assert error(conv(part.x, edges[:, :0], pos=part.pos, **given), out) > 1e-6
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NODES))
