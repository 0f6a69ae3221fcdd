"""Group self-attention between escnn layers: every module here is an ``escnn.nn.EquivariantModule``.

Works for every discrete gspace: the modules that begin with ``R2`` for planar ones, ``rot2dOnR2(N)``,
``flipRot2dOnR2(N)``, ``flip2dOnR2()`` and ``trivialOnR2()``; those that begin with ``R3`` for ``octaOnR3()``,
``fullOctaOnR3()``, ``icoOnR3()``, ``fullIcoOnR3()``, ``rot2dOnR3(N)``, ``dihedralOnR3(N)``, ``conicalOnR3(N)``,
``cylindricalOnR3(N)``, ``fullCylindricalOnR3(N)``, ``mirOnR3()``, ``invOnR3()`` and ``trivialOnR3()``; ``GEViT``,
``between_fields`` and ``group_from_gspace`` for both. escnn's field types, and so escnn models, do not pickle (their
change-of-group maps are local functions): ``export()`` a model to pickle, deep-copy or compile it, and keep
``state_dict()`` for checkpoints.
"""

from .._host import require

require("escnn", "escnn")

from .between import between_fields  # noqa: E402
from .exported import export  # noqa: E402
from .ge_vit import GEViT  # noqa: E402
from .images import (  # noqa: E402
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    R2RegularGlobalNorm,
    R2RegularLayerNorm,
)
from .linear import GroupLinear  # noqa: E402
from .types import group_from_gspace  # noqa: E402
from .volumes import (  # noqa: E402
    R3AttentionBlock,
    R3GlobalAttention,
    R3GroupAttention,
    R3LiftingAttention,
    R3RegularGlobalNorm,
    R3RegularLayerNorm,
)

__all__ = [
    "GEViT",
    "GroupLinear",
    "R2AttentionBlock",
    "R2GlobalAttention",
    "R2GroupAttention",
    "R2LiftingAttention",
    "R2RegularGlobalNorm",
    "R2RegularLayerNorm",
    "R3AttentionBlock",
    "R3GlobalAttention",
    "R3GroupAttention",
    "R3LiftingAttention",
    "R3RegularGlobalNorm",
    "R3RegularLayerNorm",
    "between_fields",
    "export",
    "group_from_gspace",
]
