"""Attention through waves: pairs, reciprocal lattices, meshes."""

from .ewald_attention import ewald_attention
from .kernels import EwaldKernels

__all__ = ["EwaldKernels", "ewald_attention"]
