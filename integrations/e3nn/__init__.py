"""Global geometric context as e3nn modules: SE(3)-Hyena, vector self-attention and Ewald attention, on node features
with irreps."""

from .._host import require

require("e3nn", "e3nn")

from .clifford import CliffordMLP  # noqa: E402
from .ewald_attention import IrrepsEwaldAttention  # noqa: E402
from .long_tensor_product import LongTensorProduct  # noqa: E402
from .operator import SE3Hyena, SE3HyenaOperator, VectorSelfAttention  # noqa: E402
from .tensor_product_hyena import TensorProductHyenaOperator  # noqa: E402

__all__ = [
    "CliffordMLP",
    "IrrepsEwaldAttention",
    "LongTensorProduct",
    "SE3Hyena",
    "SE3HyenaOperator",
    "TensorProductHyenaOperator",
    "VectorSelfAttention",
]
