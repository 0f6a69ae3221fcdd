"""The global layers of the study of proteins by name, as its models call them."""

from __future__ import annotations

from typing import Any, Literal

from baselines.chain_layers import DistanceAttention, Global, Messages
from data.protein_graphs import Graph
from torch import Tensor, nn

from tg_equiattn.nn import EwaldAttention, SE3HyenaOperator, VectorSelfAttention

AVG_NUM_NODES = 30.0  # of Ewald attention
Model = Literal[
    "messages", "messages, all pairs", "distance attention", "vector attention", "Hyena, implicit", "Ewald",
    "Ewald + Hyena",
]  # fmt: skip
ORDERED = "Hyena, implicit", "Ewald + Hyena"  # which read residue numbers


class LibraryLayer(nn.Module):
    """A layer of the library as models of residues call it; ``ordered`` ones get residue numbers and chains."""

    def __init__(self, layer: nn.Module, ordered: bool = False) -> None:
        super().__init__()
        self.layer, self.ordered = layer, ordered

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        order = {"index": graph.index, "chain": graph.chain} if self.ordered else {}
        return self.layer(h, v, pos=graph.pos, batch=graph.batch, batch_size=graph.count, **order)


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
            num_coulomb=kernels[1], lmax=lmax, avg_num_nodes=AVG_NUM_NODES,
        )
    )  # fmt: skip
    return {
        "messages": [],
        "messages, all pairs": [lambda: Messages(scalars, vectors, hidden // 2, reach, AVG_NUM_NODES, all_pairs=True)],
        "distance attention": [lambda: DistanceAttention(scalars, vectors, 4, reach)],
        "vector attention": [
            lambda: LibraryLayer(VectorSelfAttention(scalars, vectors, hidden_scalars=8, hidden_vectors=vectors))
        ],
        "Hyena, implicit": [hyena(filter="implicit", short_conv=3)],
        "Ewald": [ewald],
        "Ewald + Hyena": [ewald, hyena(filter="implicit", short_conv=3)],
    }[name]
