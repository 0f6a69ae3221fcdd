"""Attention in linear time by random features, exact near pairs, and attention over exact pairs."""
