from .modes import LayerNorm

__all__ = ["LayerNorm"]
