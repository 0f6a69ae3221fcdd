"""Attention in linear time with relative positions, and the Relative Performer."""

from .performer import PerformerAttention
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, PixelEmbedding, RelativePerformer

__all__ = [
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "RandomFeatures",
    "RelativePerformer",
]
