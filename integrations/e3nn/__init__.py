"""Global geometric context as e3nn modules: SE(3)-Hyena, vector self-attention and Ewald attention on node features
with irreps. As in e3nn, components of inputs and outputs should have about unit variance."""

from tg_equiattn import checks as _checks

from .._host import require

require("e3nn", "e3nn")

from .ewald_attention import IrrepsChargeInteraction, IrrepsEwaldAttention, IrrepsPredictedChargeInteraction  # noqa
from .se3_hyena import IrrepsSE3Hyena, IrrepsSE3HyenaOperator, IrrepsVectorSelfAttention  # noqa: E402
from .tensor_product_hyena import LongTensorProduct, TensorProductHyenaOperator  # noqa: E402

__all__ = [
    "IrrepsChargeInteraction",
    "IrrepsEwaldAttention",
    "IrrepsPredictedChargeInteraction",
    "IrrepsSE3Hyena",
    "IrrepsSE3HyenaOperator",
    "IrrepsVectorSelfAttention",
    "LongTensorProduct",
    "TensorProductHyenaOperator",
]

_checks.refuse_unknown_arguments(globals()[_name] for _name in __all__)
