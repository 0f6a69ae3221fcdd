"""Kernels of the distance and energies of charges. Everything else is a layer of :mod:`tg_equiattn.nn`."""

from typing import NoReturn

from .ewald.ewald_attention import charge_energies
from .ewald.kernels import Coulomb, Gaussian, Kernel

__all__ = [
    "Coulomb",
    "Gaussian",
    "Kernel",
    "charge_energies",
]

_OLD = {  # old names, and what to write instead
    "ewald_attention": "part of a layer: use tg_equiattn.nn.EwaldAttention",
    "geometric_product": "part of a layer: use tg_equiattn.nn.CliffordMLP",
    "group_attention": "part of a layer: use tg_equiattn.nn.GroupAttention",
    "lifting_attention": "part of a layer: use tg_equiattn.nn.LiftingAttention",
    "linear_attention": "part of a layer: use tg_equiattn.nn.PerformerAttention(..., position=None)",
    "orthogonal_projection": "part of a layer: use tg_equiattn.nn.PerformerAttention",
    "scalar_long_conv": "part of a layer: use tg_equiattn.nn.SE3HyenaOperator",
    "softmax_features": "part of a layer: use tg_equiattn.nn.PerformerAttention",
    "vector_attention": "part of a layer: use tg_equiattn.nn.VectorSelfAttention",
    "vector_long_conv": "part of a layer: use tg_equiattn.nn.SE3HyenaOperator",
    "window_attention": "part of a layer: use tg_equiattn.nn.PerformerAttention",
}


def __getattr__(name: str) -> NoReturn:
    if name in _OLD:
        raise ImportError(f"{__name__}.{name} is now {_OLD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
