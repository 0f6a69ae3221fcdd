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
from .linear import (
    MeanReadout,
    PerformerAttention,
    PerformerBlock,
    PixelEmbedding,
    PositionalPerformerAttention,
    RandomFeatures,
    RelativePerformer,
)
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
    "MeanReadout",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "Pointwise",
    "PositionalPerformerAttention",
    "RandomFeatures",
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
