"""Attention in linear time: random features, near windows, clipped distances."""

from .attention import linear_attention
from .clipped import clipped_attention, sum_aggregation
from .crystals import wave_numbers
from .euclidean_attention import euclidean_fast_attention
from .random_features import orthogonal_projection, softmax_features
from .window import window_attention

__all__ = [
    "clipped_attention",
    "euclidean_fast_attention",
    "linear_attention",
    "orthogonal_projection",
    "softmax_features",
    "sum_aggregation",
    "wave_numbers",
    "window_attention",
]
