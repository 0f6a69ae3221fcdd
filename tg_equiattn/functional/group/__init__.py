"""Lifting and group self-attention: factorised, direct, fused."""

from .attention import check_backend, group_attention, lifting_attention

__all__ = [
    "check_backend",
    "group_attention",
    "lifting_attention",
]
