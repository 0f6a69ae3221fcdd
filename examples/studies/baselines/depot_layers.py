"""Predictions for every node of a graph: layers of messages and attention, which all see the same edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import SGFormer
from torch_geometric.nn.models import Polynormer
from torch_geometric.utils import scatter

from .graph_layers import messages, without_far_part

Positions = Literal["none", "as they are", "shifted", "centred"]


class NodePredictor(nn.Module):
    """Layers between a linear map of every node's features and one to its outputs.

    Args:
        layer: makes one of a width; called with features (N, C), those of edges (E, 2 or 1), near pairs and the batch.
        channels: the width.
        layers: how many.
        inputs, outputs: channels of a node.
        invariant: whether edges have lengths in place of offsets, and positions among the inputs turn in training.
        positions: whether they are among the inputs: from the middle of the square, with random shifts of the graph by
            up to its side in training, or from the mean of the graph.
        side: of the square that nodes lie in, in training.
    """

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        channels: int,
        layers: int,
        inputs: int,
        outputs: int,
        invariant: bool,
        positions: Positions,
        side: float,
    ) -> None:
        super().__init__()
        self.invariant, self.positions, self.side = invariant, positions, side
        self.of_edges = EdgeFeatures(invariant)
        self.embed = nn.Linear(inputs + 2 * (positions != "none"), channels)
        self.layers = nn.ModuleList(layer(channels) for _ in range(layers))
        self.head = nn.Linear(channels, outputs)

    def forward(self, data: Batch) -> Tensor:
        x, (source, target) = data.x, data.edge_index
        if self.positions != "none":
            x = torch.cat([x, self._places(data).to(x.dtype)], 1)
        edge_attr = self.of_edges(data.pos[source] - data.pos[target])
        near, x = None, self.embed(x)
        for layer in self.layers:
            if isinstance(layer, RelativeGPSBlock):
                if near is None:
                    near = layer.neighbors(data.edge_index, data.batch, pos=data.pos, num_nodes=len(x))
                x = layer(
                    x, data.edge_index, data.batch, edge_attr, data.pos, batch_size=data.num_graphs, neighbors=near
                )
            else:
                x = layer(x, edge_attr, data)
        return self.head(x)

    def _places(self, data: Batch) -> Tensor:
        """Positions as inputs."""
        pos, graphs = data.pos, data.num_graphs
        if self.positions == "centred":
            pos = pos - scatter(pos, data.batch, 0, graphs, "mean")[data.batch]
        else:
            pos = pos - self.side / 2
        if self.training and self.invariant:
            angle = 2 * math.pi * torch.rand(graphs, device=pos.device, dtype=pos.dtype)
            turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)
            pos = (turn[data.batch] @ pos[:, :, None])[:, :, 0]
        if self.training and self.positions == "shifted":
            pos = pos + self.side * (2 * torch.rand(graphs, 2, device=pos.device, dtype=pos.dtype) - 1)[data.batch]
        return 2 * pos / self.side


def relative_layer(
    channels: int, heads: int, edge_dim: int, far: bool = True, *, norm: dict[str, Any] | None = None, **attention: Any
) -> RelativeGPSBlock:
    """``RelativeGPSBlock``; with ``far=False`` its attention is among near pairs alone. ``norm`` has its arguments of
    normalisation."""
    conv = messages(channels, heads, edge_dim)
    block = RelativeGPSBlock(channels, conv, heads, attn_kwargs=attention, **(norm or {}))
    if not far:
        without_far_part(block.attention)
    return block


class WholeModel(nn.Module):
    """A model of torch_geometric with its own layers, without dropout. Its output is a logarithm of softmax, from which
    the mean over channels is subtracted: what is left are logits without their mean.

    Args:
        name: ``"SGFormer"`` or ``"Polynormer"``.
        channels: of inputs, outputs and between.
    """

    def __init__(self, name: str, channels: int) -> None:
        super().__init__()
        if name == "SGFormer":
            self.model: nn.Module = SGFormer(channels, channels, channels, trans_dropout=0.0, gnn_dropout=0.0)
        else:
            none = {"in_dropout": 0.0, "dropout": 0.0, "global_dropout": 0.0}
            self.model = Polynormer(channels, channels, channels, **none)
            self.model._global = True  # with its attention, which is off at the start

    def forward(self, x: Tensor, edge_attr: Tensor, data: Batch) -> Tensor:
        out = self.model(x, data.edge_index, data.batch)
        return out - out.mean(1, keepdim=True)


class EdgeFeatures(nn.Module):
    """Features of an edge from the difference of its ends' positions, (E, 2): itself in single precision, or its
    length."""

    def __init__(self, invariant: bool) -> None:
        super().__init__()
        self.invariant = invariant

    def forward(self, offsets: Tensor) -> Tensor:
        offsets = offsets.to(torch.get_default_dtype())
        return offsets.norm(dim=1, keepdim=True) if self.invariant else offsets
