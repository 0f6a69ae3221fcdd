"""GPS layers whose messages see the offsets of edges."""

from __future__ import annotations

from typing import Any, Literal

from tg_equiattn.integrations.pyg import RelativePerformerConv
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.nn import GATv2Conv, GPSConv, MessagePassing

Attention = Literal["performer", "multihead"]


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
