"""Attention in linear time with relative positions, and the Relative Performer."""

from .performer import PerformerAttention
from .pixel_layers import MeanReadout, PixelEmbedding
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, RelativePerformer

__all__ = [
    "MeanReadout",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "RandomFeatures",
    "RelativePerformer",
]
