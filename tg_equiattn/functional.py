"""Kernels: pure functions of tensors and tables, without parameters. One folder a family, every function here."""

from .chains.clifford_algebra import geometric_product
from .chains.long_conv import scalar_long_conv, vector_long_conv
from .chains.vector_attention import vector_attention
from .ewald.ewald_attention import charge_energies, ewald_attention
from .ewald.kernels import Coulomb, Gaussian, Kernel
from .group.heads import group_attention, lifting_attention
from .linear.linear_attention import linear_attention, orthogonal_projection, softmax_features
from .linear.near_pairs import window_attention

__all__ = [
    "Coulomb",
    "Gaussian",
    "Kernel",
    "charge_energies",
    "ewald_attention",
    "geometric_product",
    "group_attention",
    "lifting_attention",
    "linear_attention",
    "orthogonal_projection",
    "scalar_long_conv",
    "softmax_features",
    "vector_attention",
    "vector_long_conv",
    "window_attention",
]
