"""Modules: project, reshape, call one kernel; blocks and whole models. One folder a family, every module here."""

from ..encodings.group import no_weight_decay
from ..tables import cached_tables
from .group.attention import GlobalGroupAttention, GroupAttention, LiftingAttention
from .group.group_transformer import GEViT, GroupAttentionBlock, GroupTransformer
from .group.layers import GlobalPooling, GroupLinear, RegularGlobalNorm, RegularLayerNorm
from .hyena.se3_hyena import SE3Hyena, SE3HyenaOperator
from .performer.attention import PerformerAttention, RelativePerformer
from .vector.clifford import CliffordMLP
from .vector.self_attention import VectorSelfAttention, VectorTransformer
from .waves.charges import ChargeInteraction, PredictedChargeInteraction
from .waves.ewald_layer import EwaldAttention

__all__ = [
    "ChargeInteraction",
    "CliffordMLP",
    "EwaldAttention",
    "GEViT",
    "GlobalGroupAttention",
    "GlobalPooling",
    "GroupAttention",
    "GroupAttentionBlock",
    "GroupLinear",
    "GroupTransformer",
    "LiftingAttention",
    "PerformerAttention",
    "PredictedChargeInteraction",
    "RegularGlobalNorm",
    "RegularLayerNorm",
    "RelativePerformer",
    "SE3Hyena",
    "SE3HyenaOperator",
    "VectorSelfAttention",
    "VectorTransformer",
    "cached_tables",
    "no_weight_decay",
]
