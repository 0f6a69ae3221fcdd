"""Long context: convolutions by FFT, attention by cross products, the geometric algebra."""

from .clifford import geometric_product
from .fft_convolution import NORMS, SAME_LENGTH_MODES, fft_convolution
from .lag_convolution import LAG_MODES, first_lag, lag_convolution, lag_long_conv
from .long_conv import bilinear_long_conv, scalar_long_conv, vector_long_conv
from .short_conv import short_conv, short_convolution
from .softmax_attention import softmax_attention
from .vector_attention import vector_attention

__all__ = [
    "LAG_MODES",
    "NORMS",
    "SAME_LENGTH_MODES",
    "bilinear_long_conv",
    "fft_convolution",
    "first_lag",
    "geometric_product",
    "lag_convolution",
    "lag_long_conv",
    "scalar_long_conv",
    "short_conv",
    "short_convolution",
    "softmax_attention",
    "vector_attention",
    "vector_long_conv",
]
