"""Attention in linear time with relative positions, and the Relative Performer."""
