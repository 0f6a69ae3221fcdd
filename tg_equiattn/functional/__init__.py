"""Kernels: pure functions of tensors and tables, without parameters."""

from .group_attention import group_attention, lifting_attention
from .linear_attention import linear_attention
from .random_features import orthogonal_projection, relu_features, softmax_features
from .relative_attention import clipped_attention, window_attention

__all__ = [
    "clipped_attention",
    "group_attention",
    "lifting_attention",
    "linear_attention",
    "orthogonal_projection",
    "relu_features",
    "softmax_features",
    "window_attention",
]
