"""SE(3)-Hyena, vector self-attention, and the Clifford layers they are made of."""

from .clifford import CliffordMLP
from .se3_hyena import SE3Hyena, SE3HyenaOperator
from .vector_self_attention import VectorSelfAttention, VectorTransformer

__all__ = [
    "CliffordMLP",
    "SE3Hyena",
    "SE3HyenaOperator",
    "VectorSelfAttention",
    "VectorTransformer",
]
