"""Lifting and group self-attention: factorised, direct, fused."""

from .attention import group_attention, lifting_attention
from .global_attention import global_group_attention

__all__ = [
    "global_group_attention",
    "group_attention",
    "lifting_attention",
]
