"""Kernels: pure functions of tensors and tables, without parameters."""

from .clifford import geometric_product
from .group_attention import group_attention, lifting_attention
from .linear_attention import linear_attention
from .long_conv import scalar_long_conv, vector_long_conv
from .random_features import orthogonal_projection, relu_features, softmax_features
from .relative_attention import clipped_attention, window_attention
from .vector_attention import vector_attention

__all__ = [
    "clipped_attention",
    "geometric_product",
    "group_attention",
    "lifting_attention",
    "linear_attention",
    "orthogonal_projection",
    "relu_features",
    "scalar_long_conv",
    "softmax_features",
    "vector_attention",
    "vector_long_conv",
    "window_attention",
]
