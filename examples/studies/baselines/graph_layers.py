"""Usual networks for graphs with positions: layers of PyG between a linear map of every node and one of their mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MLP, BatchNorm, GATv2Conv, GINEConv, GPSConv, PointTransformerConv, global_mean_pool


class GraphClassifier(nn.Module):
    """Logits of every graph of a batch.

    Args:
        layer: makes one of a width; called with features (N, C), positions (N, 2) and the batch.
        channels: the width.
        layers: how many.
        positions: whether they are among the inputs.
        centre: subtracted from positions.
        unit: that positions are divided by.
    """

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        channels: int,
        layers: int,
        positions: bool,
        centre: float,
        unit: float,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.positions, self.centre, self.unit = positions, centre, unit
        self.embed = nn.Linear(3 if positions else 1, channels)
        self.layers = nn.ModuleList(layer(channels) for _ in range(layers))
        self.head = nn.Linear(channels, classes)

    def forward(self, data: Batch) -> Tensor:
        pos = (data.pos - self.centre) / self.unit
        x = self.embed(torch.cat([data.x, pos], 1) if self.positions else data.x)
        for layer in self.layers:
            x = layer(x, pos, data)
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))


class GATLayer(nn.Module):
    """``GATv2Conv`` with a shortcut and batch norm."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.conv, self.norm = GATv2Conv(channels, channels // heads, heads), BatchNorm(channels)

    def forward(self, x: Tensor, pos: Tensor, data: Batch) -> Tensor:
        return self.norm(x + self.conv(x, data.edge_index)).relu()


class PointTransformerLayer(nn.Module):
    """``PointTransformerConv`` with the perceptrons of its paper, a shortcut and batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        perceptrons = (MLP([width, channels, channels], norm=None) for width in (2, channels))
        self.conv, self.norm = PointTransformerConv(channels, channels, *perceptrons), BatchNorm(channels)

    def forward(self, x: Tensor, pos: Tensor, data: Batch) -> Tensor:
        return self.norm(x + self.conv(x, pos, data.edge_index)).relu()


class PerformerLayer(GPSConv):
    """``GPSConv`` with its Performer, as it comes; messages know the offsets of edges."""

    def __init__(self, channels: int, heads: int) -> None:
        local = GINEConv(MLP([channels, channels, channels], norm=None), edge_dim=2)
        width = {"head_channels": channels // heads}
        super().__init__(channels, local, heads, attn_type="performer", attn_kwargs=width)

    def forward(self, x: Tensor, pos: Tensor, data: Batch) -> Tensor:
        source, target = data.edge_index
        return super().forward(x, data.edge_index, data.batch, edge_attr=pos[source] - pos[target])


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
