"""Lifting and group self-attention, what stands around it, and GE-ViT."""
