"""Modules: project, reshape, call one kernel; blocks and whole models."""

from .attention import GroupAttention, LiftingAttention
from .block import GroupAttentionBlock
from .ge_vit import GEViT
from .norm import RegularBatchNorm, RegularLayerNorm
from .performer import PerformerAttention
from .pointwise import Pointwise
from .pooling import GlobalPooling, GroupPooling, SpatialCrop, SpatialMaxPool
from .random_features import RandomFeatures
from .relative_performer import PerformerBlock, PixelEmbedding, RelativePerformer

__all__ = [
    "GEViT",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupPooling",
    "LiftingAttention",
    "PerformerAttention",
    "PerformerBlock",
    "PixelEmbedding",
    "Pointwise",
    "RandomFeatures",
    "RegularBatchNorm",
    "RegularLayerNorm",
    "RelativePerformer",
    "SpatialCrop",
    "SpatialMaxPool",
]
