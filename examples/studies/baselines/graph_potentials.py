"""Energies of molecules by GPS layers and by SchNet's, from species, kinds of bonds and distances."""

from __future__ import annotations

import math
from typing import Literal

import torch
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GINEConv, GPSConv, global_add_pool
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

from .graph_layers import without_far_part

Attention = Literal["none", "performer", "multihead", "features", "pairs", "near", "SchNet"]
Edges = Literal["bonds", "pairs"]
KINDS = 2  # of bonds
BUMPS = 20  # functions of the distance
WIDTH = KINDS + BUMPS + 1  # of the features of an edge
SMOOTH = {"act": "silu", "norm": "layer_norm", "norm_kwargs": {"mode": "node"}}  # forces are derivatives


class SmoothGINEConv(GINEConv):
    """``GINEConv`` whose messages are smooth and weighed by the edge's last feature, which is zero at the cutoff."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return edge_attr[:, -1:] * nn.functional.silu(x_j + self.lin(edge_attr))


class GraphPotential(nn.Module):
    """The energy of every graph: layers between an embedding of every atom and a perceptron whose outputs are summed.

    Args:
        attention: the global one of GPS layers: none, torch_geometric's, or ours by random features or all pairs, or
            ours between near pairs alone; or SchNet's layers, which have none.
        edges: along which messages pass: bonds, or all pairs nearer than the cutoff.
        species: how many.
        channels, layers, heads: sizes.
        cutoff: of pairs.
    """

    def __init__(
        self,
        attention: Attention,
        edges: Edges,
        species: int,
        channels: int,
        layers: int,
        heads: int,
        cutoff: float,
    ) -> None:
        super().__init__()
        self.attention, self.edges, self.cutoff = attention, edges, cutoff
        self.embed = nn.Linear(species, channels)
        self.bumps = GaussianSmearing(0.6, cutoff, BUMPS)
        self.layers = nn.ModuleList(_layer(attention, channels, heads, cutoff) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 1))

    def forward(self, data: Batch, pos: Tensor) -> Tensor:
        x, batch = self.embed(data.x), data.batch
        index, kinds = _edges(data, self.edges)
        length = (pos[index[0]] - pos[index[1]]).norm(dim=1)
        features = torch.cat([kinds, self.bumps(length), _envelope(length / self.cutoff)], 1)
        near = None
        if isinstance(self.layers[0], RelativeGPSBlock):
            near = self.layers[0].neighbors(data.pair_index, batch, data.pair_attr, pos, num_nodes=len(x))
        for layer in self.layers:
            if isinstance(layer, InteractionBlock):
                x = x + layer(x, index, length, features)
            elif isinstance(layer, RelativeGPSBlock):
                x = layer(x, index, batch, features, pos, batch_size=data.num_graphs, neighbors=near)
            else:
                x = layer(x, index, batch, edge_attr=features)
        return global_add_pool(self.head(x), batch, data.num_graphs)[:, 0]


class LocalLayer(GPSConv):
    """``GPSConv`` without attention."""

    def __init__(self, channels: int, conv: nn.Module) -> None:
        super().__init__(channels, conv, **SMOOTH)
        self.attn = self.norm2 = None

    def forward(self, x: Tensor, index: Tensor, batch: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.norm1(x + self.conv(x, index, edge_attr), batch)
        return self.norm3(x + self.mlp(x), batch)


def _layer(attention: Attention, channels: int, heads: int, cutoff: float) -> nn.Module:
    if attention == "SchNet":
        return InteractionBlock(channels, WIDTH, channels, cutoff)
    perceptron = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels))
    local = SmoothGINEConv(perceptron, edge_dim=WIDTH)
    if attention == "none":
        return LocalLayer(channels, local)
    if attention in ("performer", "multihead"):
        width = {"head_channels": channels // heads} if attention == "performer" else {}
        return GPSConv(channels, local, heads, attn_type=attention, attn_kwargs=width, **SMOOTH)
    block = RelativeGPSBlock(
        channels, local, heads, **SMOOTH,
        attn_kwargs={
            "pos_dim": 3, "offset": "distance", "values": "offset", "cutoff": cutoff, "edge_dim": KINDS,
            "method": "pairs" if attention == "pairs" else "features",
        },
    )  # fmt: skip
    if attention == "near":
        without_far_part(block.attention)
    return block


def _edges(data: Batch, which: Edges) -> tuple[Tensor, Tensor]:
    """Sources and targets, and which kind of bond joins them."""
    return (data.edge_index, data.edge_attr) if which == "bonds" else (data.pair_index, data.pair_attr)


def _envelope(x: Tensor) -> Tensor:
    """Falls from 1 to 0 at 1, smoothly."""
    return ((math.pi * x.clamp(max=1)).cos() / 2 + 0.5)[:, None]
