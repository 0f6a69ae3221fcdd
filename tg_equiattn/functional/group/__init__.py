"""Kernels of lifting and group self-attention."""
