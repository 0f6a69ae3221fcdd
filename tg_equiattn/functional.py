"""Kernels: pure functions of tensors and tables, without parameters. One folder a family, every function here."""

from typing import NoReturn

from .chains.clifford_algebra import geometric_product
from .chains.long_conv import scalar_long_conv, vector_long_conv
from .chains.vector_attention import vector_attention
from .ewald.ewald_attention import charge_energies, ewald_attention
from .ewald.kernels import Coulomb, Gaussian, Kernel

__all__ = [
    "Coulomb",
    "Gaussian",
    "Kernel",
    "charge_energies",
    "ewald_attention",
    "geometric_product",
    "scalar_long_conv",
    "vector_attention",
    "vector_long_conv",
]

_OLD = {  # old names, and what to write instead
    "group_attention": "part of a layer: use tg_equiattn.nn.GroupAttention",
    "lifting_attention": "part of a layer: use tg_equiattn.nn.LiftingAttention",
    "linear_attention": "part of a layer: use tg_equiattn.nn.PerformerAttention(..., position=None)",
    "orthogonal_projection": "part of a layer: use tg_equiattn.nn.PerformerAttention",
    "softmax_features": "part of a layer: use tg_equiattn.nn.PerformerAttention",
    "window_attention": "part of a layer: use tg_equiattn.nn.PerformerAttention",
}


def __getattr__(name: str) -> NoReturn:
    if name in _OLD:
        raise ImportError(f"{__name__}.{name} is now {_OLD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
