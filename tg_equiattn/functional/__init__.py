"""Kernels: pure functions of tensors and tables, without parameters. One folder a family, every function here."""

from .group.heads import group_attention, lifting_attention
from .hyena.long_conv import scalar_long_conv, vector_long_conv
from .operators import use_gpu_kernels
from .performer.linear_attention import linear_attention, orthogonal_projection, softmax_features
from .performer.near_pairs import window_attention
from .vector.attention import vector_attention
from .vector.clifford import geometric_product
from .waves.ewald_attention import charge_energies, ewald_attention
from .waves.kernels import Coulomb, Gaussian, Kernel

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
    "use_gpu_kernels",
    "vector_attention",
    "vector_long_conv",
    "window_attention",
]
