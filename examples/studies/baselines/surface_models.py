"""The model of the study of potentials on protein surfaces, and its global layers by name."""

from __future__ import annotations

from typing import Any, Literal

import torch
from data.protein_graphs import Graph
from data.surfaces import NET, POTENTIALS, Surface
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention
from tg_equiattn.integrations.pyg import EwaldAttention
from torch import Tensor, nn
from torch_geometric.nn import GPSConv

from baselines.chain_layers import DistanceAttention, Messages, mlp
from baselines.protein_models import LibraryLayer
from tg_equiattn.nn import SE3HyenaOperator

Model = Literal[
    "messages", "messages, net charge", "messages, potentials", "distance attention", "all pairs", "GPS, multihead",
    "SE(3)-Hyena", "Ewald (e3nn)", "Ewald (e3nn), no messages", "Ewald (PyG)", "Ewald (PyG), no messages",
    "Ewald (e3nn), potentials",
]  # fmt: skip
REACH, FAR = 1.6, 4.8  # up to which messages of near residues, and those of all pairs, tell lengths apart
NEIGHBORS, PAIRS = 10, 30.0  # by which their sums are divided


class EwaldIrreps(nn.Module):
    """Ewald attention of e3nn features."""

    def __init__(self, scalars: int, vectors: int, **settings: Any) -> None:
        super().__init__()
        irreps = f"{scalars}x0e + {vectors}x1o"
        self.layer = IrrepsEwaldAttention(irreps, irreps, **settings)

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        out = self.layer(torch.cat([h, v.flatten(1)], 1), graph.pos, graph.batch, batch_size=graph.count)
        return out[:, : h.shape[1]], out[:, h.shape[1] :].view(v.shape)


class Invariant(nn.Module):
    """A layer of PyG as a change of scalars: Ewald attention, or GPSConv, which adds its input itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        gps = isinstance(self.layer, GPSConv)
        out = self.layer(h, None, graph.batch) - h if gps else self.layer(h, graph.pos, graph.batch)
        return out, torch.zeros_like(v)


class Nodewise(nn.Module):
    """In place of messages: a network of each residue."""

    def __init__(self, scalars: int, hidden: int) -> None:
        super().__init__()
        self.network = mlp(scalars, hidden, scalars)

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        return self.network(h), torch.zeros_like(v)


class SurfaceModel(nn.Module):
    """Messages, a global layer and messages, each of normalised scalars, with residuals; then the potential.

    Args:
        name: of the global layer and the hand-made inputs.
        scalars, vectors: channels.
        hidden: width of the networks.
        ewald: settings of Ewald attention.
    """

    def __init__(self, name: str, scalars: int, vectors: int, hidden: int, ewald: dict[str, Any]) -> None:
        super().__init__()

        def near() -> nn.Module:
            if "no messages" in name:
                return Nodewise(scalars, hidden)
            return Messages(scalars, vectors, hidden, REACH, NEIGHBORS)

        def far() -> nn.Module | None:
            if name.startswith("Ewald (e3nn)"):
                return EwaldIrreps(scalars, vectors, **ewald)
            if name.startswith("Ewald (PyG)"):
                return Invariant(EwaldAttention(scalars, scalars, out_vectors=vectors, **ewald))
            if name == "SE(3)-Hyena":
                layer = SE3HyenaOperator(
                    scalars,
                    vectors,
                    hidden_scalars=8,
                    hidden_vectors=vectors,
                    filter="implicit",
                    short_conv=3,
                    mixed_products=False,
                )
                return LibraryLayer(layer, ordered=True)
            if name == "GPS, multihead":
                return Invariant(GPSConv(scalars, None, heads=4, attn_type="multihead", norm="layer_norm"))
            if name == "distance attention":
                return DistanceAttention(scalars, vectors, 4, FAR)
            if name == "all pairs":
                return Messages(scalars, vectors, hidden // 2, FAR, PAIRS, all_pairs=True)
            return None

        self.columns = NET if "net charge" in name else POTENTIALS if "potentials" in name else slice(0)
        self.embed, self.embed_vectors = nn.Embedding(20, scalars), nn.Embedding(20, 3 * vectors)
        self.inputs = nn.Linear(2 + self.columns.stop - (self.columns.start or 0), scalars)
        self.layers = nn.ModuleList(layer for layer in (near(), far(), near()) if layer is not None)
        self.norms = nn.ModuleList(nn.LayerNorm(scalars) for _ in self.layers)
        self.invariants = nn.ModuleList(nn.Linear(3 * vectors, scalars, bias=False) for _ in self.layers)
        self.out, self.linear = mlp(scalars, hidden, 1), nn.Linear(scalars, 1)

    def forward(self, graph: Surface) -> Tensor:
        """Potentials (N, 1)."""
        h = self.embed(graph.residue) + self.inputs(torch.cat([graph.size, graph.inputs[:, self.columns]], 1))
        v = self.embed_vectors(graph.residue).unflatten(1, (-1, 3)) @ graph.frames
        for layer, norm, invariants in zip(self.layers, self.norms, self.invariants, strict=True):
            scalars, vectors = layer(norm(h), v, graph)
            h, v = h + scalars, v + vectors
            h = h + invariants((v @ graph.frames.mT).flatten(1))
        return self.linear(h) + self.out(h)
