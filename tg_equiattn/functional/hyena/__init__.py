"""Long context: convolutions by FFT, attention by cross products, the geometric algebra."""

from .clifford import geometric_product
from .long_conv import scalar_long_conv, vector_long_conv
from .vector_attention import vector_attention

__all__ = [
    "geometric_product",
    "scalar_long_conv",
    "vector_attention",
    "vector_long_conv",
]
