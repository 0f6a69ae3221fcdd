"""Modules: project, reshape, call one kernel; blocks and whole models."""

from .attention import GroupAttention, LiftingAttention
from .block import GroupAttentionBlock
from .clifford import CliffordMLP
from .ge_vit import GEViT
from .hyena import Hyena, Transformer
from .norm import RegularBatchNorm, RegularLayerNorm
from .performer import PerformerAttention
from .pointwise import Pointwise
from .pooling import GlobalPooling, GroupPooling, SpatialCrop, SpatialMaxPool
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, PixelEmbedding, RelativePerformer
from .se3_hyena import SE3Hyena, SE3HyenaOperator
from .vector_self_attention import SE3Transformer, VectorSelfAttention

__all__ = [
    "CliffordMLP",
    "GEViT",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupPooling",
    "Hyena",
    "LiftingAttention",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "Pointwise",
    "RandomFeatures",
    "RegularBatchNorm",
    "RegularLayerNorm",
    "RelativePerformer",
    "SE3Hyena",
    "SE3HyenaOperator",
    "SE3Transformer",
    "SpatialCrop",
    "SpatialMaxPool",
    "Transformer",
    "VectorSelfAttention",
]
