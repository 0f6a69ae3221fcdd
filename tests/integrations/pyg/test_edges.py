"""The layers take the same graph written in any of PyG's ways."""

import warnings

import pytest
import torch
from performers import NEAR
from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor

SIZES = (13, 2, 17)


def permuted(edges, attr):
    order = torch.randperm(edges.shape[1])
    return edges[:, order], None if attr is None else attr[order]


def by_rows(edges, attr):
    """Sources and features sorted by target, and where targets begin."""
    order = torch.argsort(edges[1] * 10**6 + edges[0])
    return edges[0, order], attr[order], lambda n: torch.searchsorted(edges[1, order], torch.arange(n + 1))


def edge_index_sorted(edges, attr, n):
    edges, order = EdgeIndex(edges, sparse_size=(n, n)).sort_by("row")
    return edges, attr[order]


def compressed(make, edges, attr, n, values=None):
    source, attr, starts = by_rows(edges, attr)
    values = attr if values is None else values
    return make(starts(n), source, values, (n, n, *values.shape[1:])), attr


def torch_sparse(edges, attr, n):
    package = pytest.importorskip("torch_sparse")
    return package.SparseTensor(row=edges[1], col=edges[0], value=attr, sparse_sizes=(n, n)), None


def adj_t_of(edges, attr, n, layout):
    data = Data(edge_index=edges, edge_attr=attr, num_nodes=n)
    return ToSparseTensor(attr="edge_attr", layout=layout)(data).adj_t, None


def of(adjacency):
    return lambda edges, attr, n: (adjacency(edges, attr, n), None)


CSR, CSC = torch.sparse_csr_tensor, torch.sparse_csc_tensor
WAYS = {
    "permuted": lambda edges, attr, n: permuted(edges, attr),
    "EdgeIndex": lambda edges, attr, n: (EdgeIndex((e := permuted(edges, attr))[0], sparse_size=(n, n)), e[1]),
    "int32": lambda edges, attr, n: (edges.int(), attr),
    "EdgeIndex of int32": lambda edges, attr, n: (EdgeIndex(edges.int(), sparse_size=(n, n)), attr),
    "EdgeIndex by row": edge_index_sorted,
    "torch CSR": of(lambda edges, attr, n: compressed(CSR, edges, attr, n)[0]),
    "torch CSC": of(lambda edges, attr, n: compressed(CSC, edges.flip(0), attr, n)[0]),
    "torch CSR beside edge_attr": lambda edges, attr, n: compressed(CSR, edges, attr, n, torch.rand(len(attr))),
    "PyG COO": of(lambda edges, attr, n: to_torch_coo_tensor(edges.flip(0), attr, (n, n))),
    "PyG CSC": of(lambda edges, attr, n: to_torch_csc_tensor(edges.flip(0), attr, (n, n))),
    "adj_t CSR": lambda *graph: adj_t_of(*graph, torch.sparse_csr),
    "SparseTensor": torch_sparse,
}


ALONE = "permuted", "int32", "EdgeIndex", "EdgeIndex of int32", "PyG COO", "PyG CSC"
CASES = [("features", way) for way in WAYS] + [(kind, way) for kind in ("window", "distance values") for way in ALONE]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_every_way_to_write_edges(kind, way, make_conv, arbitrary_graphs, equal, error):
    """With features, which an adjacency holds as its values, and alone."""
    conv = make_conv(values="offset", edge_dim=3) if kind == "features" else make_conv(**NEAR[kind])
    data = arbitrary_graphs(SIZES)
    given = {"batch": data.batch, "pos": data.pos}
    features = torch.randn(data.edge_index.shape[1], 3, dtype=torch.float64) if kind == "features" else None
    expected = conv(data.x, data.edge_index, edge_attr=features, **given)
    reverse = conv(data.x, data.edge_index.flip(0), edge_attr=features, **given)
    assert error(reverse, expected) > 1e-3  # sources and targets are told apart
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is in beta state.*", UserWarning)
        adj, attr = WAYS[way](data.edge_index, features, len(data.x))
        equal(conv(data.x, adj, edge_attr=attr, **given), expected)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("method", ["pairs", "features"])
def test_features_of_every_dtype(loops, method, make_conv, point_graphs, equal, error):
    """Kinds of bonds, one-hot or counted, with and without self-loops; two loops of a node count twice."""
    conv = make_conv(edge_dim=3, method=method)
    data = point_graphs(SIZES)
    edges = torch.cat([data.edge_index, torch.tensor([[4, 4, 20], [4, 4, 20]])], 1) if loops else data.edge_index
    kinds = torch.nn.functional.one_hot(torch.arange(edges.shape[1]) % 3, 3)
    given = {"batch": data.batch, "pos": data.pos}
    expected = conv(data.x, edges, edge_attr=kinds.double(), **given)
    assert error(conv(data.x, edges, edge_attr=kinds.flip(1), **given), expected) > 1e-3
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32):
        equal(conv(data.x, edges, edge_attr=kinds.to(dtype), **given), expected)
    large = 100 * kinds  # two loops of a node add up to more than 8 bits hold
    equal(conv(data.x, edges, edge_attr=large.to(torch.uint8), **given), conv(data.x, edges, edge_attr=large, **given))


def test_repeated_pairs_of_a_coo_adjacency_stay_apart(make_conv, equal):
    conv, x = make_conv(edge_dim=2), torch.randn(5, 12, dtype=torch.float64)
    pos = torch.tensor([[0, 0], [1, 0], [1, 1], [2, 1], [0, 1]])
    edges = torch.tensor([[0, 0, 3], [1, 1, 2]])
    attr = torch.tensor([[1.0, 0], [1, 0], [0, -1]]).double()
    adj_t = torch.sparse_coo_tensor(edges.flip(0), attr, (5, 5, 2))
    batch = torch.zeros(5, dtype=torch.long)
    equal(conv(x, adj_t, batch, pos=pos), conv(x, edges, batch, attr, pos))


def test_edges_as_given():
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2]])
    pos, features = torch.tensor([[0.0, 0], [1, 0], [5, 0]]), torch.arange(4.0)
    conv = RelativePerformerConv(4, 4, edge_dim=1)
    pairs = conv.neighbors(edge_index, pos=pos, edge_attr=features, num_nodes=3)
    assert pairs.offsets.tolist() == [[1, 0], [-1, 0], [4, 0]]
    assert pairs.features.flatten().tolist() == [1, 0, 2]
    assert pairs.between_positions
    for message, options in [
        ("edge_index must not join nodes of different graphs", {"batch": torch.tensor([0, 0, 1])}),
        ("pos or edge_offset must be given", {"pos": None}),
        (r"edge_attr must be real numbers of shape \(4, 1\)", {"edge_attr": torch.zeros(3)}),
        ("edge_attr must be .* got list", {"edge_attr": [0.0]}),
    ]:
        with pytest.raises(ValueError, match=message):
            conv.neighbors(edge_index, num_nodes=3, **{"pos": pos, "edge_attr": features} | options)
