"""The model of residues that every row of the study of proteins shares, its messages, and the baselines' layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from data.protein_graphs import CLASSES, Graph, pair_geometry
from torch import Tensor, nn
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch_geometric.utils import to_dense_batch

BUMPS = 16
PUSH = 10.0  # the size of a force of 1 where it enters
Global = Callable[[], nn.Module]


def mlp(inside: int, hidden: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, hidden), nn.SiLU(), nn.Linear(hidden, outside))


def bumps(distance: Tensor, reach: float) -> Tensor:
    """Gaussians that tell distances up to ``reach`` apart, (..., BUMPS)."""
    centres = torch.linspace(0, reach, BUMPS, dtype=distance.dtype, device=distance.device)
    return (-((distance[..., None] - centres) * (BUMPS / reach / 1.5)).square()).exp()


def total(x: Tensor, target: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, *x.shape[1:]).index_add(0, target, x)


class Messages(nn.Module):
    """Messages of scalars (N, S) and vectors (N, V, 3) along edges, linear in the vectors; returns their changes.

    Along an edge with direction u go scalars, vectors and u (u . vector), with weights from the scalars of both ends,
    the distance and the separation along the chain. A residue adds products of its vectors with its frame.

    Args:
        scalars, vectors: channels.
        hidden: width of the networks.
        reach: distance up to which lengths are told apart.
        neighbors: number by which sums are divided.
        all_pairs: along all pairs of residues in place of the edges of the graph.
    """

    def __init__(
        self, scalars: int, vectors: int, hidden: int, reach: float, neighbors: float, all_pairs: bool = False
    ) -> None:
        super().__init__()
        self.reach, self.neighbors, self.all_pairs = reach, neighbors, all_pairs
        self.edge_sizes, self.node_sizes = [scalars, vectors, vectors], [scalars, vectors, vectors, 9 * vectors]
        self.edge = mlp(2 * scalars + BUMPS + CLASSES + 6, hidden, sum(self.edge_sizes))
        self.node = mlp(2 * scalars + 6, hidden, sum(self.node_sizes))
        self.before = nn.Linear(vectors, vectors, bias=False)
        self.after = nn.Linear(3 * vectors, vectors, bias=False)

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        (source, target), kind, length, unit = pair_geometry(graph) if self.all_pairs else graph.edges
        angles = [(graph.frames[end] @ unit[..., None])[..., 0] for end in (source, target)]
        inside = torch.cat([h[source], h[target], bumps(length, self.reach), one_hot(kind, CLASSES), *angles], 1)
        scalar, own, along = self.edge(inside).split(self.edge_sizes, 1)
        there = self.before(v.mT)[source]  # edges, 3, V
        vector = own[:, None] * there + unit[..., None] * (along * (unit[:, None] @ there)[:, 0])[:, None]
        scalar, vector = (total(x, target, len(h)) / self.neighbors for x in (scalar, vector))
        row, column = torch.triu_indices(3, 3)
        angles = (graph.frames @ graph.frames.mT)[:, row, column]
        parts = self.node(torch.cat([h, scalar, angles], 1)).split(self.node_sizes, 1)
        turned = graph.frames.mT @ (parts[3].view(len(h), 3, 3, -1) * (graph.frames @ v.mT)[:, None]).sum(2)
        mixed = torch.cat([parts[1][:, None] * vector, parts[2][:, None] * v.mT, turned], 2)
        return parts[0], self.after(mixed).mT


class DistanceAttention(nn.Module):
    """A transformer's self-attention with a learned function of the distance added to its logits.

    Weights are invariant, so they also mix vectors; returns the changes of scalars and vectors.
    """

    def __init__(self, scalars: int, vectors: int, heads: int, reach: float) -> None:
        super().__init__()
        self.heads, self.reach = heads, reach
        self.norm = nn.LayerNorm(scalars)
        self.project = nn.Linear(scalars, 3 * scalars)
        self.bias = mlp(BUMPS + 1, BUMPS, heads)
        self.value = nn.Linear(vectors, heads * vectors, bias=False)
        self.out = nn.Linear(scalars, scalars)
        self.out_vectors = nn.Linear(heads * vectors, vectors, bias=False)

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        query, key, value = (x.unflatten(1, (self.heads, -1)) for x in self.project(self.norm(h)).chunk(3, 1))
        vectors = self.value(v.mT).unflatten(2, (self.heads, -1)).transpose(1, 2)  # N, heads, 3, V
        values = torch.cat([value, vectors.flatten(2)], 2)
        query, key, values, pos = (to_dense_batch(x, graph.batch)[0] for x in (query, key, values, graph.pos))
        there = to_dense_batch(torch.ones_like(h[:, 0]), graph.batch)[1]
        length = torch.cdist(pos, pos)
        bias = self.bias(torch.cat([bumps(length, self.reach), length[..., None] / self.reach], 3)).movedim(3, 1)
        bias = bias.masked_fill(~there[:, None, None], -torch.inf)
        mixed = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, values)), bias)
        mixed = mixed.transpose(1, 2)[there]
        scalars, vectors = mixed.split([value.shape[2], 3 * v.shape[1]], 2)
        vectors = vectors.unflatten(2, (3, -1)).transpose(1, 2).flatten(2)
        return self.out(scalars.flatten(1)), self.out_vectors(vectors).mT


class ChainModel(nn.Module):
    """Messages, each followed by global layers, and a readout of the displacement of each residue.

    Args:
        layers: what makes the global layers behind each layer of messages.
        num_layers: number of layers of messages.
        rigid: whether outputs keep their rigid motion.
    """

    def __init__(
        self, scalars: int, vectors: int, hidden: int, layers: Sequence[Global], num_layers: int, reach: float,
        neighbors: float, rigid: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rigid = rigid
        self.embed = nn.Embedding(20, scalars)
        self.inputs = nn.Linear(3, scalars)
        self.start = nn.Linear(1, vectors, bias=False)
        self.messages = nn.ModuleList(Messages(scalars, vectors, hidden, reach, neighbors) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(scalars) for _ in range(num_layers))
        self.layers = nn.ModuleList(nn.ModuleList(make() for make in layers) for _ in range(num_layers))
        self.out = mlp(scalars, hidden, vectors)

    def forward(self, graph: Graph) -> Tensor:
        """Displacements or forces (N, 3)."""
        h = self.embed(graph.residue) + self.inputs(torch.cat([graph.mark, graph.size], 1))
        v = self.start(PUSH * graph.push[..., None]).mT
        for messages, norm, layers in zip(self.messages, self.norms, self.layers, strict=True):
            for layer in (messages, *layers):
                scalars, vectors = layer(h, v, graph)
                h, v = h + scalars, v + vectors
                if layer is messages:
                    h = norm(h)
        out = (self.out(h)[..., None] * v).sum(1)
        return out if self.rigid else without_rigid_motion(out, graph)


def without_rigid_motion(vectors: Tensor, graph: Graph) -> Tensor:
    """Vectors (N, 3) less the translation and the rotation of each protein that fit them best."""
    sizes = torch.bincount(graph.batch, minlength=graph.count)[:, None]
    arm = graph.frames[:, 2]  # from the middle
    vectors = vectors - (total(vectors, graph.batch, graph.count) / sizes)[graph.batch]
    eye = torch.eye(3, dtype=arm.dtype, device=arm.device)
    inertia = arm.square().sum(1)[:, None, None] * eye - arm[:, :, None] * arm[:, None]
    turn = torch.linalg.solve(
        total(inertia, graph.batch, graph.count), total(torch.linalg.cross(arm, vectors), graph.batch, graph.count)
    )
    return vectors - torch.linalg.cross(turn[graph.batch], arm)
