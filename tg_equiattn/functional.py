"""Kernels: pure functions of tensors and tables, without parameters. One folder a family, every function here."""

from typing import NoReturn

from .chains.clifford_algebra import geometric_product
from .chains.long_conv import scalar_long_conv, vector_long_conv
from .chains.vector_attention import vector_attention
from .ewald.ewald_attention import charge_energies, ewald_attention
from .ewald.kernels import Coulomb, Gaussian, Kernel
from .linear.linear_attention import linear_attention, orthogonal_projection, softmax_features
from .linear.near_pairs import window_attention

__all__ = [
    "Coulomb",
    "Gaussian",
    "Kernel",
    "charge_energies",
    "ewald_attention",
    "geometric_product",
    "linear_attention",
    "orthogonal_projection",
    "scalar_long_conv",
    "softmax_features",
    "vector_attention",
    "vector_long_conv",
    "window_attention",
]

_OLD = {  # old names, and what to write instead
    "group_attention": "part of a layer: use tg_equiattn.nn.GroupAttention",
    "lifting_attention": "part of a layer: use tg_equiattn.nn.LiftingAttention",
}


def __getattr__(name: str) -> NoReturn:
    if name in _OLD:
        raise ImportError(f"{__name__}.{name} is now {_OLD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
