"""Attention in linear time: random features, near windows, clipped distances."""

from .attention import linear_attention
from .clipped import clipped_attention, sum_aggregation
from .random_features import orthogonal_projection, softmax_features
from .window import window_attention

__all__ = [
    "clipped_attention",
    "linear_attention",
    "orthogonal_projection",
    "softmax_features",
    "sum_aggregation",
    "window_attention",
]
