"""Lifting and group self-attention: factorised, direct, fused."""

from .attention import group_attention, lifting_attention
from .frames import frame_attention, separable_group_convolution
from .global_attention import global_group_attention

__all__ = [
    "frame_attention",
    "global_group_attention",
    "group_attention",
    "lifting_attention",
    "separable_group_convolution",
]
