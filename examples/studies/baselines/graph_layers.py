"""Networks for graphs with positions: GPS layers whose messages see the offsets of edges, and what stands beside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MLP, GATv2Conv, GPSConv, MessagePassing, PointTransformerConv, global_mean_pool

Attention = Literal["performer", "multihead"]


class GraphClassifier(nn.Module):
    """Logits of every graph of a batch: layers between a linear map of every node and one of their mean.

    Args:
        layer: makes one of a width; called with features (N, C), features of edges (E, 2 or 1) and the batch.
        channels: the width.
        layers: how many.
        lengths: whether edges have lengths for features in place of offsets.
        positions: whether they are among the inputs.
        moved: by how much they move there, at most, in training: whole graphs, anew every time.
        centre: of the positions among the inputs, which are divided by it.
        unit: that offsets are divided by.
    """

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        channels: int,
        layers: int,
        centre: float,
        unit: float,
        lengths: bool = False,
        positions: bool = False,
        moved: float = 0.0,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.centre, self.unit, self.lengths, self.positions, self.moved = centre, unit, lengths, positions, moved
        self.embed = nn.Linear(3 if positions else 1, channels)
        self.layers = nn.ModuleList(layer(channels) for _ in range(layers))
        self.head = nn.Linear(channels, classes)

    def forward(self, data: Batch) -> Tensor:
        (source, target), x = data.edge_index, data.x
        offsets = (data.pos[source] - data.pos[target]) / self.unit
        if self.positions:
            pos = data.pos - self.centre
            if self.training and self.moved:
                pos = pos + self.moved * (2 * torch.rand(data.num_graphs, 2).to(pos) - 1)[data.batch]
            x = torch.cat([x, pos / self.centre], 1)
        x = self.through(self.embed(x), offsets.norm(dim=1, keepdim=True) if self.lengths else offsets, data)
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))

    def through(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x, edge_attr, data)
        return x


def messages(channels: int, heads: int, edge_dim: int) -> GATv2Conv:
    """What all attentions stand beside: ``GATv2Conv`` that sees features of edges."""
    return GATv2Conv(channels, channels // heads, heads, edge_dim=edge_dim)


def without_far_part(layer: RelativePerformerConv) -> None:
    """Leave attention among near pairs alone: what all pairs weigh is next to nothing, and stays so."""
    far_bias = layer.attention.positions.far_bias
    far_bias.requires_grad_(False).fill_(-1e4)


class AttentionLayer(GPSConv):
    """``GPSConv`` with an attention of its own."""

    def __init__(self, channels: int, heads: int, conv: MessagePassing, attention: Attention, **norm: Any) -> None:
        width = {"head_channels": channels // heads} if attention == "performer" else {}
        super().__init__(channels, conv, heads, attn_type=attention, attn_kwargs=width, **norm)

    def forward(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        return super().forward(x, data.edge_index, data.batch, edge_attr=edge_attr)


class LocalLayer(GPSConv):
    """``GPSConv`` without attention."""

    def __init__(self, channels: int, conv: MessagePassing) -> None:
        super().__init__(channels, conv)
        self.attn = self.norm2 = None

    def forward(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        x = self.norm1(x + self.local(x, edge_attr, data))
        return self.norm3(x + self.mlp(x))

    def local(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        """Messages."""
        return self.conv(x, data.edge_index, edge_attr)


class PointTransformerLayer(LocalLayer):
    """The same with ``PointTransformerConv`` and the perceptrons of its paper."""

    def __init__(self, channels: int, unit: float) -> None:
        perceptrons = (MLP([width, channels, channels], norm=None) for width in (2, channels))
        super().__init__(channels, PointTransformerConv(channels, channels, *perceptrons))
        self.unit = unit

    def local(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        return self.conv(x, data.pos / self.unit, data.edge_index)


class PixelNetwork(nn.Module):
    """Three convolutions of the image itself, ``data.pixels`` (B, H, W) of any size, and the maximum over places."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__()
        widths = 1, channels, 2 * channels, 2 * channels
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.convolutions = nn.Sequential(*layers[:-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, data: Batch) -> Tensor:
        return self.head(self.convolutions(data.pixels[:, None]).amax((2, 3)))
