"""Kernels: pure functions of tensors and tables, without parameters."""

from .group_attention import group_attention, lifting_attention

__all__ = ["group_attention", "lifting_attention"]
