"""Attention in linear time: random features, near windows, clipped distances."""

from .attention import linear_attention
from .random_features import orthogonal_projection, relu_features, softmax_features
from .relative_attention import clipped_attention, window_attention

__all__ = [
    "clipped_attention",
    "linear_attention",
    "orthogonal_projection",
    "relu_features",
    "softmax_features",
    "window_attention",
]
