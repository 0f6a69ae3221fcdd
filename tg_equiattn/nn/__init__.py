"""Modules: project, reshape, call one kernel; blocks and whole models. One folder a family, every module here."""

from .group import (
    GEViT,
    GlobalGroupAttention,
    GlobalPooling,
    GroupAttention,
    GroupAttentionBlock,
    GroupLinear,
    GroupPooling,
    LiftingAttention,
    Pointwise,
    RegularBatchNorm,
    RegularGlobalNorm,
    RegularLayerNorm,
    SpatialCrop,
    SpatialMaxPool,
)
from .hyena import CliffordMLP, SE3Hyena, SE3HyenaOperator, VectorSelfAttention, VectorTransformer
from .performer.attention import PerformerAttention
from .performer.relative_performer import RelativePerformer
from .waves.ewald_attention import EwaldAttention

__all__ = [
    "CliffordMLP",
    "EwaldAttention",
    "GEViT",
    "GlobalGroupAttention",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupLinear",
    "GroupPooling",
    "LiftingAttention",
    "PerformerAttention",
    "Pointwise",
    "RegularBatchNorm",
    "RegularGlobalNorm",
    "RegularLayerNorm",
    "RelativePerformer",
    "SE3Hyena",
    "SE3HyenaOperator",
    "SpatialCrop",
    "SpatialMaxPool",
    "VectorSelfAttention",
    "VectorTransformer",
]
