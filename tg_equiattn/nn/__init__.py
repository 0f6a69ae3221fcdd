"""Modules: project, reshape, call one kernel; blocks and whole models. One folder a family, every module here."""

from .group import (
    GEViT,
    GlobalPooling,
    GroupAttention,
    GroupAttentionBlock,
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
    EuclideanFastAttention,
    MeanReadout,
    PerformerAttention,
    PerformerBlock,
    PixelEmbedding,
    RandomFeatures,
    RelativePerformer,
)

__all__ = [
    "CliffordMLP",
    "EuclideanFastAttention",
    "GEViT",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupPooling",
    "LiftingAttention",
    "MeanReadout",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "Pointwise",
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
