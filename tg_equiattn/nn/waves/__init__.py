"""Modules of attention through waves."""

from .ewald_attention import EwaldAttention
from .ewald_network import EwaldNetwork, EwaldOptions

__all__ = ["EwaldAttention", "EwaldNetwork", "EwaldOptions"]
