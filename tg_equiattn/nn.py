"""Modules: project, reshape, call one kernel; blocks and whole models. One folder a family, every module here."""

from typing import NoReturn

from . import checks as _checks
from .chains.clifford import CliffordMLP
from .chains.se3_hyena import SE3Hyena, SE3HyenaOperator, VectorSelfAttention
from .ewald.charges import ChargeInteraction, PredictedChargeInteraction
from .ewald.ewald_layer import EwaldAttention
from .group.attention import GlobalGroupAttention, GroupAttention, LiftingAttention
from .group.encodings import no_weight_decay
from .group.frame_transformer import FrameTransformer, FrameTransformerBlock
from .group.group_transformer import GEViT, GroupAttentionBlock, GroupTransformer
from .group.layers import GlobalPooling, GroupLinear, RegularGlobalNorm, RegularLayerNorm
from .group.scales import ScaleGroupAttention, ScaleLiftingAttention
from .linear.attention import PerformerAttention, RelativePerformer

__all__ = [
    "ChargeInteraction",
    "CliffordMLP",
    "EwaldAttention",
    "FrameTransformer",
    "FrameTransformerBlock",
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
    "ScaleGroupAttention",
    "ScaleLiftingAttention",
    "VectorSelfAttention",
    "no_weight_decay",
]

_checks.refuse_unknown_arguments(globals()[_name] for _name in __all__)

_OLD = {"VectorTransformer": "SE3Hyena(..., attention=True)"}  # old names, and what to write instead


def __getattr__(name: str) -> NoReturn:
    if name in _OLD:
        raise ImportError(f"{__name__}.{name} is now {_OLD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
