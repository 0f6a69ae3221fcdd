"""Group self-attention between escnn layers: every module here is an ``escnn.nn.EquivariantModule``.

Works for every discrete planar gspace: ``rot2dOnR2(N)``, ``flipRot2dOnR2(N)``, ``flip2dOnR2()`` and ``trivialOnR2()``.
escnn's field types, and so escnn models, do not pickle (their change-of-group maps are local functions):
``export()`` a model to pickle, deep-copy or compile it, and keep ``state_dict()`` for checkpoints.
"""

from .._host import require

require("escnn", "escnn")

from .attention import R2GlobalAttention, R2GroupAttention, R2LiftingAttention  # noqa: E402
from .between import between_fields  # noqa: E402
from .block import R2AttentionBlock, R2RegularGlobalNorm, R2RegularLayerNorm  # noqa: E402
from .ge_vit import GEViT  # noqa: E402
from .types import group_from_gspace  # noqa: E402

__all__ = [
    "GEViT",
    "R2AttentionBlock",
    "R2GlobalAttention",
    "R2GroupAttention",
    "R2LiftingAttention",
    "R2RegularGlobalNorm",
    "R2RegularLayerNorm",
    "between_fields",
    "group_from_gspace",
]
