"""SE(3)-Hyena: global geometric context by long convolution."""
