"""Lifting and group self-attention, norms, pooling, blocks and models (GroupTransformer, GE-ViT)."""
