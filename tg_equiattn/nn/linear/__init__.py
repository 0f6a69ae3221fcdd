"""Attention in linear time with relative positions, and the Relative Performer."""

from .performer import PerformerAttention
from .pixel_layers import MeanReadout, PixelEmbedding
from .positional_performer import PositionalPerformerAttention
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, RelativePerformer

__all__ = [
    "MeanReadout",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "PositionalPerformerAttention",
    "RandomFeatures",
    "RelativePerformer",
]
