"""The global layers of the study of proteins by name, as its models call them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from data.protein_graphs import CLASSES, Graph, separations
from tg_equiattn.integrations.e3nn import TensorProductHyenaOperator
from torch import Tensor, nn
from torch.nn.functional import one_hot

from baselines.chain_layers import BUMPS, DistanceAttention, Global, Messages, bumps, without_rigid_motion
from baselines.egnn import EGNNLayer
from tg_equiattn.nn import EwaldAttention, SE3HyenaOperator, VectorSelfAttention

AVG_NUM_NODES = 30.0  # of Ewald attention
Model = Literal[
    "messages", "messages, all pairs", "distance attention", "vector attention", "Hyena, implicit", "Ewald",
    "Ewald + Hyena", "Hyena, degree 2", "EGNN",
]  # fmt: skip
CROSS_PRODUCTS = {"filter": "implicit", "mixed_products": False, "short_conv": 3}  # as the stored results
ORDERED = "Hyena, implicit", "Ewald + Hyena", "Hyena, degree 2"  # which read residue numbers


class LibraryLayer(nn.Module):
    """A layer of the library as models of residues call it; ``ordered`` ones get residue numbers and chains."""

    def __init__(self, layer: nn.Module, ordered: bool = False) -> None:
        super().__init__()
        self.layer, self.ordered = layer, ordered

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        order = {"index": graph.index, "chain": graph.chain} if self.ordered else {}
        return self.layer(h, v, pos=graph.pos, batch=graph.batch, batch_size=graph.count, **order)


class IrrepsLayer(nn.Module):
    """SE(3)-Hyena with features of degree 2 inside."""

    def __init__(self, scalars: int, vectors: int) -> None:
        super().__init__()
        irreps = f"{scalars}x0e + {vectors}x1o"
        hidden = f"8x0e + {vectors // 2}x1o + {vectors // 2}x2e"
        self.layer = TensorProductHyenaOperator(irreps, irreps, hidden, filter="implicit", short_conv=3)

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        out = self.layer(
            torch.cat([h, v.flatten(1)], 1), graph.pos, graph.batch, index=graph.index, chain=graph.chain,
            batch_size=graph.count,
        )  # fmt: skip
        scalars, vectors = out.split([h.shape[1], 3 * v.shape[1]], 1)
        return scalars, vectors.unflatten(1, (-1, 3))


class ChainEGNN(nn.Module):
    """EGNN on all pairs of residues of a protein; the change of positions is read.

    Edges know the distance, the separation along the chain, and what is along them of the pushes at both ends, which
    EGNN as published for particles does not read.
    """

    def __init__(self, channels: int, num_layers: int, reach: float, rigid: bool) -> None:
        super().__init__()
        self.reach, self.rigid = reach, rigid
        self.embed, self.inputs = nn.Embedding(20, channels), nn.Linear(3, channels)
        self.layers = nn.ModuleList(EGNNLayer(channels, BUMPS + CLASSES + 2) for _ in range(num_layers))
        for layer in self.layers:  # forces are as large as lengths; published weights start a thousand times smaller
            nn.init.xavier_uniform_(layer.position[-1].weight)

    def forward(self, graph: Graph) -> Tensor:
        h = self.embed(graph.residue) + self.inputs(torch.cat([graph.mark, graph.size], 1))
        out = torch.cat([self.one(*parts) for parts in zip(*self.parts(h, graph), strict=True)])
        return out if self.rigid else without_rigid_motion(out, graph)

    def parts(self, h: Tensor, graph: Graph) -> list[tuple[Tensor, ...]]:
        sizes = torch.bincount(graph.batch, minlength=graph.count).tolist()
        return [x.split(sizes) for x in (h, graph.pos, graph.push, graph.index, graph.chain)]

    def one(self, h: Tensor, pos: Tensor, push: Tensor, index: Tensor, chain: Tensor) -> Tensor:
        target, source = torch.meshgrid(*2 * [torch.arange(len(h), device=h.device)], indexing="ij")
        offset = pos[:, None] - pos
        length = offset.square().sum(2).fill_diagonal_(1).sqrt()
        unit = offset / length[..., None]
        along = [(unit * push[end]).sum(2, keepdim=True) for end in (target, source)]
        kind = one_hot(separations(index, chain, source, target), CLASSES)
        edges = torch.cat([bumps(length, self.reach), kind, *along], 2)[None]
        h, x, push = h[None], pos[None], push[None]
        for layer in self.layers:
            h, x = layer(h, x, push, edges)
        return x[0] - pos


def global_layers(
    name: str, scalars: int, vectors: int, hidden: int, widths: tuple[float, float], kernels: tuple[int, int], lmax: int
) -> list[Global]:
    """Constructors of the global layers that follow each layer of messages.

    ``widths`` are of the narrowest and the widest kernel of Ewald attention, ``kernels`` numbers of Gaussians and of
    Coulomb kernels.
    """
    reach = widths[1]

    def hyena(**options: Any) -> Global:
        return lambda: LibraryLayer(
            SE3HyenaOperator(scalars, vectors, hidden_scalars=8, hidden_vectors=vectors, **options), ordered=True
        )

    ewald: Global = lambda: LibraryLayer(  # noqa: E731
        EwaldAttention(
            scalars, vectors, width=widths[0], max_width=reach, num_gaussians=kernels[0],
            num_coulomb=kernels[1], lmax=lmax, output_scale=AVG_NUM_NODES,
        )
    )  # fmt: skip
    return {
        "messages": [],
        "messages, all pairs": [lambda: Messages(scalars, vectors, hidden // 2, reach, AVG_NUM_NODES, all_pairs=True)],
        "distance attention": [lambda: DistanceAttention(scalars, vectors, 4, reach)],
        "vector attention": [
            lambda: LibraryLayer(VectorSelfAttention(scalars, vectors, hidden_scalars=8, hidden_vectors=vectors))
        ],
        "Hyena, implicit": [hyena(**CROSS_PRODUCTS)],
        "Ewald": [ewald],
        "Ewald + Hyena": [ewald, hyena(**CROSS_PRODUCTS)],
        "Hyena, degree 2": [lambda: IrrepsLayer(scalars, vectors)],
    }[name]
