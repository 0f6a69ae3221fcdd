"""Long context: convolutions by FFT, attention by cross products, the geometric algebra."""

from .clifford import geometric_product
from .fft_convolution import SAME_LENGTH_MODES, fft_convolution
from .long_conv import bilinear_long_conv, scalar_long_conv, vector_long_conv
from .softmax_attention import softmax_attention
from .vector_attention import vector_attention

__all__ = [
    "SAME_LENGTH_MODES",
    "bilinear_long_conv",
    "fft_convolution",
    "geometric_product",
    "scalar_long_conv",
    "softmax_attention",
    "vector_attention",
    "vector_long_conv",
]
