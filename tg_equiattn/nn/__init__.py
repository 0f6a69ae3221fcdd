"""Modules: project, reshape, call one kernel; blocks and whole models. One folder a family, every module here."""

from .group.attention import GroupAttention, LiftingAttention
from .group.block import GroupAttentionBlock
from .group.ge_vit import GEViT
from .group.global_attention import GlobalGroupAttention
from .group.linear import GroupLinear
from .group.norm import RegularGlobalNorm, RegularLayerNorm
from .group.pooling import GlobalPooling
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
    "LiftingAttention",
    "PerformerAttention",
    "RegularGlobalNorm",
    "RegularLayerNorm",
    "RelativePerformer",
    "SE3Hyena",
    "SE3HyenaOperator",
    "VectorSelfAttention",
    "VectorTransformer",
]
