"""Lifting and group self-attention, what stands around it, and GE-ViT."""

from .attention import GroupAttention, LiftingAttention
from .block import GroupAttentionBlock
from .ge_vit import GEViT
from .global_attention import GlobalGroupAttention
from .group_linear import GroupLinear
from .norm import RegularBatchNorm, RegularGlobalNorm, RegularLayerNorm
from .pointwise import Pointwise
from .pooling import GlobalPooling, GroupPooling, SpatialCrop, SpatialMaxPool

__all__ = [
    "GEViT",
    "GlobalGroupAttention",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupLinear",
    "GroupPooling",
    "LiftingAttention",
    "Pointwise",
    "RegularBatchNorm",
    "RegularGlobalNorm",
    "RegularLayerNorm",
    "SpatialCrop",
    "SpatialMaxPool",
]
