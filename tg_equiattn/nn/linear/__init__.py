"""Attention in linear time with relative positions, and the Relative Performer."""

from .euclidean_attention import EuclideanFastAttention
from .euclidean_network import EuclideanNetwork, EuclideanOptions
from .performer import PerformerAttention
from .pixel_layers import MeanReadout, PixelEmbedding
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, RelativePerformer
from .spherical_features import Irrep

__all__ = [
    "EuclideanFastAttention",
    "EuclideanNetwork",
    "EuclideanOptions",
    "Irrep",
    "MeanReadout",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "RandomFeatures",
    "RelativePerformer",
]
