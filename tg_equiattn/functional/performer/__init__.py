"""Attention in linear time: random features, near windows, clipped distances."""
