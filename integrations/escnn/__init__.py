"""Group self-attention between escnn layers: every module here is an ``escnn.nn.EquivariantModule``.

The modules support every discrete gspace. Modules that begin with ``R2`` are for planar ones: ``rot2dOnR2(N)``,
``flipRot2dOnR2(N)``, ``flip2dOnR2()`` and ``trivialOnR2()``. Modules that begin with ``R3`` are for ``octaOnR3()``,
``fullOctaOnR3()``, ``icoOnR3()``, ``fullIcoOnR3()``, ``rot2dOnR3(N)``, ``dihedralOnR3(N)``, ``conicalOnR3(N)``,
``cylindricalOnR3(N)``, ``fullCylindricalOnR3(N)``, ``mirOnR3()``, ``invOnR3()`` and ``trivialOnR3()``.
``between_fields`` and ``group_from_gspace`` are for both. For whole models on tensors use
``tg_equiattn.nn.GroupTransformer(group_from_gspace(gspace), ...)``. escnn's field types, and so escnn models, cannot be
pickled (their change-of-group maps are local functions): call ``export()`` of a model to pickle, deep-copy or compile
it, and use ``state_dict()`` for checkpoints.
"""

from tg_equiattn import checks as _checks

from .._host import require

require("escnn", "escnn")

from .attention import (  # noqa: E402  # noqa: E402
    R2AttentionBlock,
    R2GlobalAttention,
    R2GroupAttention,
    R2LiftingAttention,
    R2RegularLayerNorm,
    R3AttentionBlock,
    R3GlobalAttention,
    R3GroupAttention,
    R3LiftingAttention,
    R3RegularLayerNorm,
)
from .export import to_standard_torch  # noqa: E402
from .masks import MaskedSequential  # noqa: E402
from .transformers import (  # noqa: E402
    R2FrameTransformer,
    R2TransformerBlock,
    R3FrameTransformer,
    R3TransformerBlock,
)
from .types import between_fields, group_from_gspace  # noqa: E402

__all__ = [
    "MaskedSequential",
    "R2AttentionBlock",
    "R2FrameTransformer",
    "R2GlobalAttention",
    "R2GroupAttention",
    "R2LiftingAttention",
    "R2RegularLayerNorm",
    "R2TransformerBlock",
    "R3AttentionBlock",
    "R3FrameTransformer",
    "R3GlobalAttention",
    "R3GroupAttention",
    "R3LiftingAttention",
    "R3RegularLayerNorm",
    "R3TransformerBlock",
    "between_fields",
    "group_from_gspace",
    "to_standard_torch",
]

_checks.refuse_unknown_arguments(globals()[_name] for _name in __all__)
