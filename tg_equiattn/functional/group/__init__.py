"""Lifting and group self-attention: factorised, direct, fused."""

from .attention import group_attention, lifting_attention

__all__ = [
    "group_attention",
    "lifting_attention",
]
